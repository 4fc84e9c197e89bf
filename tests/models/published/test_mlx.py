"""MLX: every element is its integer times the scale of its group, plus the bias of its group."""

from pathlib import Path

import numpy as np
import pytest

from jaxvllm.models.published import published_encoding, without_encoding
from tests.models.fixture import Fixture
from tests.models.published.written import by_block, check_model, check_values, encoded, resized, write_tensors

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
