"""MLX: every element is its integer times the scale of its group, plus the bias of its group."""

from pathlib import Path

import numpy as np
import pytest

from jaxvllm.models.published import published_encoding, without_encoding
from jaxvllm.models.published.mlx import FLOATS
from jaxvllm.models.weight_names import Source
from tests.models.fixture import Fixture
from tests.models.published.test_mxfp4 import NUMBERS
from tests.models.published.written import E4M3, by_block, check_model, check_values, encoded, resized, write_tensors

NAME = "x_proj.weight"
SETTINGS = {"group_size": 64, "bits": 4, "model.layers.0.mlp.down_proj": {"group_size": 32, "bits": 6}}


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Integers in words of 32 bits, lowest bits first, bit by bit."""
    stream = (codes[..., None] >> np.arange(bits)) & 1
    return np.packbits(stream.reshape(len(codes), -1).astype(np.uint8), axis=1, bitorder="little").view(np.uint32)


def random_tensors(
    bits: int, group: int, rows: int = 21, columns: int = 192
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    stream = np.random.default_rng(bits)
    codes, groups = stream.integers(0, 2**bits, (rows, columns)), (rows, columns // group)
    scales, biases = (stream.normal(0, 1, groups).astype(np.float16) for _ in range(2))
    values = codes.astype(np.float32) * by_block(scales.astype(np.float32), codes.shape, (1, group))
    values += by_block(biases.astype(np.float32), codes.shape, (1, group))
    return {NAME: packed(codes, bits), "x_proj.scales": scales, "x_proj.biases": biases}, values


@pytest.mark.parametrize(("bits", "group"), [(2, 64), (3, 32), (3, 64), (4, 32), (5, 64), (6, 64), (8, 32)])
def test_every_element_is_an_integer_times_a_scale_plus_a_bias(bits: int, group: int, tmp_path: Path) -> None:
    tensors, values = random_tensors(bits, group)
    # A layer may have other bits than the config states for most.
    check_values(encoded(write_tensors(tmp_path, tensors), SETTINGS), NAME, values)


def made_by_mlx() -> dict[str, dict[str, np.ndarray]]:
    """Matrices that MLX quantized, by mode, bits and group, and its own values of them (tools/make_mlx_fixtures.py)."""
    found: dict[str, dict[str, np.ndarray]] = {}
    with np.load(Path(__file__).with_name("mlx_modes.npz")) as arrays:
        for key, array in arrays.items():
            name, _, part = key.rpartition(".")
            found.setdefault(name, {})[part] = array
    return found


@pytest.mark.parametrize("name", made_by_mlx())
def test_every_element_is_what_mlx_takes_it_for(name: str, tmp_path: Path) -> None:
    arrays = made_by_mlx()[name]
    values = arrays.pop("values")
    mode, bits, group = name.split("-")
    settings = {"mode": mode, "bits": int(bits), "group_size": int(group)}
    tensors = encoded(write_tensors(tmp_path, {f"x_proj.{part}": array for part, array in arrays.items()}), settings)
    if mode != "affine":
        check_values(tensors, NAME, values)
        return
    ours = np.zeros_like(values)
    tensors.fill(Source(NAME, values.shape, (0, 0), values.shape))(ours, (0, 0))
    # MLX multiplies and adds with one rounding.
    np.testing.assert_allclose(ours, values, rtol=1e-6, atol=1e-6 * np.abs(values).max())


def floats(mode: str, rows: int, columns: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The stored tensors of a matrix of floating-point numbers, and its values."""
    bits, group, _ = FLOATS[mode]
    stream = np.random.default_rng(rows)
    codes = stream.integers(0, 2**bits - 2, (rows, columns))
    table = NUMBERS if bits == 4 else np.arange(256).astype(np.uint8).view(E4M3).astype(np.float32)
    codes[codes == 127] = 0  # NaN
    scales = stream.integers(100, 120, (rows, columns // group)).astype(np.uint8)
    steps = scales.view(E4M3).astype(np.float32) if mode == "nvfp4" else 2.0 ** (scales.astype(np.float32) - 127)
    values = table[codes] * by_block(steps, codes.shape, (1, group))
    return {NAME: packed(codes, bits), "x_proj.scales": scales}, values.astype(np.float32)


@pytest.mark.parametrize("mode", FLOATS)
def test_a_model_of_floating_point_numbers(mode: str, tmp_path: Path) -> None:
    bits, group, stored = FLOATS[mode]
    fixture = resized(Fixture.load("qwen3"), {48: 64, 100: 96}, hidden_size=64, intermediate_size=96)
    settings = {"quantization": {"mode": mode, "bits": bits, "group_size": group}}
    check_model(tmp_path, fixture, settings, lambda shape: floats(mode, *shape))
    encoding = published_encoding(settings)
    assert encoding is not None and encoding.usual("matrix") == stored
    with pytest.raises(ValueError, match=f"bits of MLX must be one of {bits} in mode {mode}, not 6"):
        published_encoding({"quantization": {"mode": mode, "bits": 6, "group_size": group}})


def test_floating_point_numbers_that_are_misshapen(tmp_path: Path) -> None:
    tensors, _ = floats("mxfp4", 6, 64)
    settings = {"mode": "mxfp4", "bits": 4, "group_size": 32}
    write_tensors(tmp_path, tensors | {"x_proj.scales": tensors["x_proj.scales"][:, 1:]})
    with pytest.raises(ValueError, match="tensor x_proj.scales has shape"):
        encoded(tmp_path, settings).check(NAME, (6, 64))
    wider, _ = floats("nvfp4", 6, 32)
    write_tensors(tmp_path, {NAME: wider[NAME][:, :3], "x_proj.scales": wider["x_proj.scales"][:, :1]})
    with pytest.raises(ValueError, match="x_proj.scales has groups of 16, and the config 24 inputs"):
        encoded(tmp_path, {"mode": "nvfp4", "bits": 4, "group_size": 16}).check(NAME, (6, 24))
    write_tensors(tmp_path, tensors | {NAME: tensors[NAME][:, :4]})
    with pytest.raises(ValueError, match="has integers of 2 bits, and scales of floating-point numbers"):
        encoded(tmp_path, settings).check(NAME, (6, 64))


def test_the_config_states_it_under_one_name_or_two() -> None:
    config = {"hidden_size": 8, "quantization": SETTINGS}
    assert published_encoding(config) == published_encoding(config | {"quantization_config": SETTINGS}) is not None
    assert without_encoding(config | {"quantization_config": SETTINGS}) == {"hidden_size": 8}


def test_parts_that_are_missing_or_misshapen(tmp_path: Path) -> None:
    tensors, _ = random_tensors(4, 64)
    for name, array in tensors.items():
        write_tensors(tmp_path, tensors | {name: array[:, 1:]})
        with pytest.raises(ValueError, match=rf"model.safetensors: tensor {name} has shape"):
            encoded(tmp_path, SETTINGS).check(NAME, (21, 192))
        write_tensors(tmp_path, {other: tensors[other] for other in tensors if other != name})
        with pytest.raises(ValueError, match="lacks the tensor"):
            encoded(tmp_path, SETTINGS).check(NAME, (21, 192))


def test_a_model_whose_embedding_is_quantized_too(tmp_path: Path) -> None:
    fixture = resized(Fixture.load("qwen3"), {48: 64, 100: 96}, hidden_size=64, intermediate_size=96)
    check_model(tmp_path, fixture, {"quantization": SETTINGS}, lambda shape: random_tensors(4, 32, *shape))
