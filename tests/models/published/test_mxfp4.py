"""Matrices in MXFP4 and MXFP8 mean what their numbers and exponents say."""

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
from jaxvllm.models.forms.few_bits import StoredAs
from jaxvllm.models.published.mxfp4 import STORED_MXFP4, STORED_MXFP8
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from tests.models.fixture import Fixture
from tests.models.published.written import (
    E4M3,
    check_model,
    check_values,
    encoded,
    resized,
    write_model,
    write_tensors,
)

NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def random_experts(name: str, X: int, rows: int, columns: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The stored tensors of a stack of matrices [in, out], and its values."""
    stream = np.random.default_rng(rows)
    codes = stream.integers(0, 16, (X, rows, columns)).astype(np.uint8)
    scales = stream.integers(115, 128, (X, rows, columns // 32)).astype(np.uint8)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    tensors = {f"{name}_blocks": packed.reshape(X, rows, columns // 32, 16), f"{name}_scales": scales}
    values = NUMBERS[codes] * np.repeat(2.0 ** (scales.astype(np.float32) - 127), 32, axis=2)
    return tensors, values.swapaxes(1, 2).astype(np.float32)


def test_every_element_is_its_number_times_a_power_of_two(tmp_path: Path) -> None:
    tensors, expected = random_experts("experts.down_proj", 3, 37, 96)
    check_values(encoded(write_tensors(tmp_path, tensors), SETTINGS), "experts.down_proj", expected)


def gpt_oss() -> Fixture:
    """The fixture with sizes that 32 divides."""
    fixture = resized(Fixture.load("gpt_oss"), {84: 96}, hidden_size=96)
    return resized(fixture, {24: 32, 48: 64}, ".experts.", intermediate_size=32)


def load(directory: Path, size: int) -> Any:
    spec, mesh = model_spec(checkpoint.read_config(directory)), make_mesh(MeshShape(1, size), jax.devices())
    return checkpoint.load(directory, spec, dtype=jnp.bfloat16, layout="separate", mesh=mesh)


def test_gpt_oss_in_mxfp4_is_the_same_model_in_bfloat16(tmp_path: Path) -> None:
    fixture = gpt_oss()
    published: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    for name, weight in fixture.weights().items():
        plain[name] = published[name] = weight.astype(ml_dtypes.bfloat16)
        if name.endswith((".gate_up_proj", ".down_proj")):
            X, columns, rows = weight.shape
            del published[name]
            tensors, values = random_experts(name, X, rows, columns)
            plain[name] = values.astype(ml_dtypes.bfloat16)
            published |= tensors
    one = write_model(tmp_path / "published", fixture.config | {"quantization_config": SETTINGS}, published)
    other = write_model(tmp_path / "plain", fixture.config, plain)
    for size in (1, 2):
        chex.assert_trees_all_equal(load(one, size), load(other, size))
    name = "model.layers.0.mlp.experts.down_proj"
    for changes, message in (
        ({f"{name}_scales": published[f"{name}_scales"][:, 1:]}, f"tensor {name}_scales has shape"),
        ({f"{name}_blocks": published[f"{name}_blocks"][:, 1:]}, f"tensor {name}_blocks has shape"),
        ({f"{name}_scales": published[f"{name}_scales"].astype(np.int32)}, f"{name}_scales has dtype I32"),
    ):
        write_tensors(one, published | changes)
        with pytest.raises(ValueError, match=f"model.safetensors: .*{message}"):
            load(one, 1)
    write_tensors(one, {key: value for key, value in published.items() if key != f"{name}_scales"})
    with pytest.raises(ValueError, match=f"lacks the tensor {name}_scales"):
        load(one, 1)


def test_blocks_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    tensors, _ = random_experts("down_proj", 2, 5, 64)
    with pytest.raises(ValueError, match="down_proj_blocks has blocks of 32, and the config 60 inputs"):
        encoded(write_tensors(tmp_path, tensors), SETTINGS).check("down_proj", (2, 60, 5))


def compressed_settings(form: str, bits: int) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": bits, "type": "float", "strategy": "group", "group_size": 32}
    weights["scale_dtype"] = "torch.uint8"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


MXFP4_PACKED = compressed_settings("mxfp4-pack-quantized", 4)
MXFP8 = compressed_settings("mxfp8-quantized", 8)


def mxfp(settings: dict[str, Any], rows: int, columns: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The stored tensors of a matrix in compressed-tensors, and its values."""
    stream = np.random.default_rng(rows)
    scales = stream.integers(115, 128, (rows, columns // 32)).astype(np.uint8)
    if settings is MXFP8:
        numbers = stream.normal(0, 9, (rows, columns)).astype(E4M3)
        tensors, values = {"x_proj.weight": numbers}, numbers.astype(np.float32)
    else:
        codes = stream.integers(0, 16, (rows, columns)).astype(np.uint8)
        tensors, values = {"x_proj.weight_packed": codes[:, 0::2] | codes[:, 1::2] << 4}, NUMBERS[codes]
    steps = np.repeat(2.0 ** (scales.astype(np.float32) - 127), 32, axis=1)
    return tensors | {"x_proj.weight_scale": scales}, (values * steps).astype(np.float32)


@pytest.mark.parametrize(("settings", "stored"), [(MXFP4_PACKED, STORED_MXFP4), (MXFP8, STORED_MXFP8)])
def test_compressed_tensors(settings: dict[str, Any], stored: StoredAs, tmp_path: Path) -> None:
    tensors, values = mxfp(settings, 21, 96)
    check_values(encoded(write_tensors(tmp_path, tensors), settings), "x_proj.weight", values)
    assert encoded(tmp_path, settings).encoding.usual("matrix") == stored
    fixture = resized(Fixture.load("qwen3"), {48: 64, 100: 96}, hidden_size=64, intermediate_size=96)
    quantized = {"quantization_config": settings}
    check_model(tmp_path, fixture, quantized, lambda shape: mxfp(settings, *shape), of="_proj")
    write_tensors(tmp_path, tensors | {"x_proj.weight_scale": tensors["x_proj.weight_scale"][:, 1:]})
    with pytest.raises(ValueError, match="x_proj.weight_scale has shape"):
        encoded(tmp_path, settings).check("x_proj.weight", (21, 96))
