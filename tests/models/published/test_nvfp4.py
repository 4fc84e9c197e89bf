"""NVFP4: every element is its number times the scale of its group, and the matrix's own divides it or multiplies it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxvllm.models import checkpoint
from tests.models.published.test_mxfp4 import NUMBERS
from tests.models.published.written import E4M3, by_block, check_values, encoded, write_tensors

NAME = "x_proj.weight"
SHAPE = (21, 48)
WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": WEIGHTS}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": GROUP},
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
LAST = np.float32(0.04)


def random_parts() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes, scales, and the values without the last scale."""
    stream = np.random.default_rng(0)
    codes = stream.integers(0, 16, SHAPE).astype(np.uint8)
    scales = stream.uniform(0.1, 400, (SHAPE[0], SHAPE[1] // 16)).astype(E4M3)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales, NUMBERS[codes]


def tensors_of(settings: dict[str, Any]) -> dict[str, np.ndarray]:
    packed, scales, _ = random_parts()
    if settings is COMPRESSED:
        own = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": np.full(1, LAST)}
        own["input_global_scale"] = np.ones(1, np.float32)
    else:
        own = {"weight": packed, "weight_scale": scales, "weight_scale_2": np.full((), LAST)}
        own["input_scale"] = np.ones((), np.float32)
    return {f"x_proj.{part}": array for part, array in own.items()}


@pytest.mark.parametrize(("settings", "factor"), [(COMPRESSED, 1 / float(LAST)), (MODELOPT, float(LAST))])
def test_both_conventions_of_the_last_scale(settings: dict[str, Any], factor: float, tmp_path: Path) -> None:
    _, scales, numbers = random_parts()
    write_tensors(tmp_path, tensors_of(settings))
    spread = by_block(scales.astype(np.float32) * np.float32(factor), SHAPE, (1, 16))
    check_values(encoded(tmp_path, settings), NAME, numbers * spread)


def test_modelopt_may_state_its_encoding_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}))
    expected = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    assert checkpoint.read_config(tmp_path)["quantization_config"] == expected
    beside.write_text("{}")
    with pytest.raises(ValueError, match="hf_quant_config.json must have an object named quantization"):
        checkpoint.read_config(tmp_path)


@pytest.mark.parametrize("settings", [COMPRESSED, MODELOPT])
def test_parts_that_are_missing_or_wrong(settings: dict[str, Any], tmp_path: Path) -> None:
    tensors = tensors_of(settings)
    last = next(name for name in tensors if name.endswith(("weight_global_scale", "_scale_2")))
    for changes, message in (
        ({last: None}, f"lacks the tensor {last}"),
        ({last: np.zeros(1, np.float32)}, f"{last} must be a positive number, not 0.0"),
        ({last: np.ones(3, np.float32)}, rf"{last} has shape \(3,\)"),
        ({f"{NAME}_scale": tensors[f"{NAME}_scale"][:, 1:]}, f"{NAME}_scale has shape"),
        ({f"{NAME}_scale": np.ones((21, 3), np.float32)}, f"{NAME}_scale has dtype F32"),
    ):
        write_tensors(tmp_path, {name: array for name, array in (tensors | changes).items() if array is not None})
        with pytest.raises(ValueError, match=message):
            encoded(tmp_path, settings).check(NAME, SHAPE)
    write_tensors(tmp_path, tensors)
    with pytest.raises(ValueError, match="has groups of 16, and the config 40 inputs"):
        encoded(tmp_path, settings).check(NAME, (21, 40))
