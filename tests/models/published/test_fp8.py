"""Checkpoints in FP8 mean what their scales say, and make the model that the same numbers in bfloat16 make."""

import json
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxvllm.models import checkpoint
from jaxvllm.models.families import model_spec
from jaxvllm.models.published import encoded_files
from jaxvllm.models.published.encoding import FP8, SCALES
from jaxvllm.models.safetensors_files import WeightFiles, open_weights
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from tests.models.dense import dense_logits
from tests.models.fixture import Fixture
from tests.models.published.written import (
    E4M3,
    by_block,
    check_values,
    encoded,
    fp8_checkpoint,
    resized,
    write_model,
    write_tensors,
)

NAME = "x_proj.weight"


def load(directory: Path, size: int = 1, **options: Any) -> Any:
    config = checkpoint.read_config(directory)
    mesh = make_mesh(MeshShape(1, size), jax.devices())
    usual = {"dtype": jnp.bfloat16, "layout": "separate", "mesh": mesh}
    return checkpoint.load(directory, model_spec(config), **(usual | options))


def random_fp8(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(1).normal(0, 50, shape).astype(E4M3)


@pytest.mark.parametrize(
    ("stated", "shape", "block", "scales", "end"),
    [
        ([128, 128], (300, 200), (128, 128), (3, 2), "_scale_inv"),
        ([16, 48], (70, 90), (16, 48), (5, 2), "_scale_inv"),
        ([16, 32], (3, 40, 50), (1, 16, 32), (3, 3, 2), "_scale_inv"),
        (None, (31, 33), (31, 33), (), "_scale_inv"),
        (None, (31, 33), (31, 33), (1,), "_scale"),
        (None, (31, 33), (1, 33), (31, 1), "_scale"),
        (None, (3, 7, 5), (1, 7, 5), (3, 1, 1), "_scale_inv"),
        (None, (3, 7, 5), (3, 7, 5), (), "_scale_inv"),
    ],
)
def test_every_element_is_multiplied_by_its_scale(
    stated: Any, shape: tuple[int, ...], block: tuple[int, ...], scales: tuple[int, ...], end: str, tmp_path: Path
) -> None:
    values, grid = random_fp8(shape), tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
    own = np.asarray(np.random.default_rng(2).uniform(0.1, 2, scales), np.float32)
    write_tensors(tmp_path, {NAME: values, f"{NAME}{end}": own, "x_proj.input_scale": np.ones(1, np.float32)})
    expected = values.astype(np.float32) * by_block(own.reshape(grid), shape, block)
    check_values(encoded(tmp_path, {"quant_method": "fp8", "weight_block_size": stated}), NAME, expected)
    if stated is None:
        check_values(encoded(tmp_path, {"quant_method": "modelopt", "quant_algo": "FP8"}), NAME, expected)
        check_values(encoded(tmp_path, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}), NAME, expected)


def test_large_matrices_are_decoded_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoded_files, "_MOST", 70)  # rows of a matrix, and parts of a row
    values, scales = random_fp8((2, 9, 30)), np.asarray(np.random.default_rng(2).uniform(0.1, 2, (2, 3, 3)), np.float32)
    write_tensors(tmp_path, {NAME: values, f"{NAME}_scale_inv": scales})
    tensors = encoded(tmp_path, {"quant_method": "fp8", "weight_block_size": [4, 13]})
    check_values(tensors, NAME, values.astype(np.float32) * by_block(scales, (2, 9, 30), (1, 4, 13)))


def test_scales_may_be_powers_of_two(tmp_path: Path) -> None:
    values, exponents = random_fp8((40, 50)), np.random.default_rng(2).integers(110, 140, (3, 2)).astype(np.uint8)
    scales = exponents.view(ml_dtypes.float8_e8m0fnu)
    write_tensors(tmp_path, {NAME: values, f"{NAME}_scale_inv": scales})
    spread = by_block(2.0 ** (exponents.astype(np.float32) - 127), (40, 50), (16, 32))
    settings = {"quant_method": "fp8", "weight_block_size": [16, 32]}
    check_values(encoded(tmp_path, settings), NAME, (values.astype(np.float32) * spread).astype(np.float32))


# Latent attention, whose matrix of keys and values is two of our arrays, and experts; and the usual projections.
@pytest.mark.parametrize(("name", "block", "size"), [("deepseek_v3", (32, 16), 2), ("qwen3", (48, 32), 8)])
def test_a_model_in_fp8_is_the_same_model_in_bfloat16(
    name: str, block: tuple[int, int], size: int, tmp_path: Path
) -> None:
    fixture = resized(Fixture.load(name), {100: 104}, intermediate_size=104)
    published, plain = fp8_checkpoint(tmp_path, fixture, block)
    chex.assert_trees_all_equal(load(published, size), load(plain, size))
    chex.assert_trees_all_equal(load(published, layout="stacked"), load(plain, layout="stacked"))


def test_the_logits_of_a_model_in_fp8_and_a_tree_of_it(tmp_path: Path) -> None:
    published, plain = fp8_checkpoint(tmp_path, Fixture.load("qwen3"), (48, 32))
    spec = model_spec(checkpoint.read_config(published))
    expected = np.asarray(dense_logits(load(plain), spec, [1, 2, 3]))
    np.testing.assert_array_equal(np.asarray(dense_logits(load(published), spec, [1, 2, 3])), expected)
    tree = tmp_path / "tree"
    checkpoint.convert(published, tree, dtype="auto", mesh=make_mesh(MeshShape(1, 1), jax.devices()))
    assert "quantization_config" not in checkpoint.read_config(tree)
    chex.assert_trees_all_equal(load(tree), load(plain))


class Watched(np.ndarray):
    """Counts the bytes in FP8 that are taken out of it."""

    taken = 0

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        Watched.taken += part.nbytes if self.dtype == E4M3 else 0
        return part


@pytest.mark.parametrize("size", [2, 8])
def test_devices_read_their_own_parts_alone(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = resized(Fixture.load("qwen3"), {100: 104}, intermediate_size=104)
    published, _ = fp8_checkpoint(tmp_path, fixture, (48, 32))
    read = WeightFiles.tensor

    def tensor(self: WeightFiles, name: str, *args: Any) -> np.ndarray:
        return read(self, name, *args).view(Watched if ".mlp." in name else np.ndarray)

    monkeypatch.setattr(WeightFiles, "tensor", tensor)
    monkeypatch.setattr(Watched, "taken", 0)
    load(published, size)
    assert Watched.taken == 4 * 3 * 104 * 48


Q = "model.layers.1.self_attn.q_proj.weight"


def test_what_does_not_fit_is_refused_by_file_and_tensor(tmp_path: Path) -> None:
    published, _ = fp8_checkpoint(tmp_path, Fixture.load("qwen3"), (48, 32))
    config = checkpoint.read_config(published)
    tensors = {name: np.array(array) for name, array in _stored(published).items()}

    def refused(message: str, changes: dict[str, np.ndarray | None], **settings: Any) -> None:
        kept = {name: array for name, array in (tensors | changes).items() if array is not None}
        write_tensors(published, kept)
        own = config | {"quantization_config": config["quantization_config"] | settings}
        (published / "config.json").write_text(json.dumps(own))
        with pytest.raises(ValueError, match=message):
            load(published)

    scale = f"{Q}_scale_inv"
    refused(rf"lacks the tensor {scale}, which should have shape \(2, 2\)", {scale: None})
    shape = r"model.safetensors: tensor \S*_scale_inv has shape \(\S+ \S+\): a matrix of shape .* has scales of shape"
    refused(shape, {scale: tensors[scale][:1]})
    refused(shape, {}, weight_block_size=[128, 128])
    refused("weight_block_size must be two positive integers, not 128", {}, weight_block_size=128)
    refused(f"model.safetensors: tensor {scale} has dtype I32", {scale: np.zeros((2, 2), np.int32)})
    refused(f"{scale}, and the tensor {Q} is not quantized", {Q: tensors[Q].astype(np.float32)})
    refused(f"tensor {Q} has dtype I8", {Q: tensors[Q].astype(np.int8)})
    refused("unexpected tensor model.extra_proj.weight", {"model.extra_proj.weight_scale_inv": tensors[scale]})
    refused("quant_method 'x' is not supported: supported are fp8", {}, quant_method="x")
    write_model(published, config, tensors)
    file = published / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model.safetensors is not a complete safetensors file"):
        load(published)


def _stored(directory: Path) -> dict[str, np.ndarray]:
    files = open_weights(directory)
    headers = {name: files.header(name) for name in files.names}
    return {name: files.tensor(name, header.shape, {**FP8, **SCALES}) for name, header in headers.items() if header}
