"""bitsandbytes: every element is the value of its table times the scale of its block, or an integer times a row's."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pallas_kernels.quantized_matmul.code import Code
from tests.models.fixture import Fixture
from tests.models.published.written import check_model, check_values, encoded, write_tensors

NAME = "x_proj.weight"
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
EIGHT = {"load_in_8bit": True}  # as old checkpoints state it


def four_bits(
    shape: tuple[int, int], *, nested: bool, kind: str = "nf4", code: Code | None = None
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The stored tensors of a matrix, and its values, one block after another, by the table of `code` or any."""
    size = shape[0] * shape[1]
    stream = np.random.default_rng(size)
    table = code.table[:16] if code is not None else np.sort(stream.uniform(-1, 1, 16)).astype(np.float32)
    codes = stream.integers(0, 16, size + size % 2).astype(np.uint8)
    count = -(-size // 64)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
    tensors = {"": (codes[0::2] << 4 | codes[1::2])[:, None], ".quant_map": table}
    if nested:
        bytes_, second = stream.integers(0, 256, count).astype(np.uint8), stream.normal(0, 1, 256).astype(np.float32)
        outer = stream.uniform(0.1, 1, -(-count // 256)).astype(np.float32)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.03125}
        tensors |= {".absmax": bytes_, ".nested_absmax": outer, ".nested_quant_map": second}
        scales = second[bytes_] * np.repeat(outer, 256)[:count] + np.float32(0.03125)
    else:
        tensors[".absmax"] = scales = stream.uniform(0.1, 2, count).astype(np.float32)
    tensors[f".quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    values = (table[codes[:size]] * np.repeat(scales, 64)[:size]).reshape(shape)
    return {NAME + end: array for end, array in tensors.items()}, values


# Blocks that end with rows and blocks that do not; more than 256 blocks, so that scales have two blocks of their own.
@pytest.mark.parametrize("shape", [(30, 128), (150, 128), (23, 45), (5, 96)])
@pytest.mark.parametrize(("nested", "kind"), [(True, "nf4"), (False, "nf4"), (False, "fp4")])
def test_four_bits(shape: tuple[int, int], nested: bool, kind: str, tmp_path: Path) -> None:
    tensors, values = four_bits(shape, nested=nested, kind=kind)
    check_values(encoded(write_tensors(tmp_path, tensors), FOUR), NAME, values)


def test_eight_bits(tmp_path: Path) -> None:
    stream = np.random.default_rng(0)
    codes, largest = stream.integers(-127, 128, (30, 50)).astype(np.int8), stream.uniform(1, 9, 30).astype(np.float32)
    tensors = {NAME: codes, "x_proj.SCB": largest, "x_proj.weight_format": np.zeros((), np.uint8)}
    values = codes.astype(np.float32) * (largest * np.float32(1 / 127))[:, None]
    check_values(encoded(write_tensors(tmp_path, tensors), EIGHT), NAME, values)
    write_tensors(tmp_path, tensors | {"x_proj.weight_format": np.ones((), np.uint8)})
    with pytest.raises(ValueError, match=r"tensor x_proj.weight_format must be 0, which means rows, not 1"):
        encoded(tmp_path, EIGHT).check(NAME, (30, 50))
    write_tensors(tmp_path, {name: array for name, array in tensors.items() if name != "x_proj.SCB"})
    with pytest.raises(ValueError, match="lacks the tensor x_proj.SCB"):
        encoded(tmp_path, EIGHT).check(NAME, (30, 50))


def test_parts_that_are_missing_or_wrong(tmp_path: Path) -> None:
    tensors, _ = four_bits((30, 128), nested=True)
    state = f"{NAME}.quant_state.bitsandbytes__nf4"

    def refused(message: str, changes: dict[str, np.ndarray | None]) -> None:
        write_tensors(tmp_path, {name: array for name, array in (tensors | changes).items() if array is not None})
        with pytest.raises(ValueError, match=message):
            encoded(tmp_path, FOUR).check(NAME, (30, 128))

    def stated(**changes: Any) -> dict[str, np.ndarray | None]:
        values = json.loads(tensors[state].tobytes()) | changes
        return {state: np.frombuffer(json.dumps(values).encode(), np.uint8)}

    for name in tensors:
        if name not in (NAME, f"{NAME}.nested_absmax"):
            refused(f"lacks the tensor {name}", {name: None})
            refused(f"tensor {name} has shape|is not the state", {name: tensors[name][1:]})
    refused("absmax has dtype U8", {f"{NAME}.nested_absmax": None})
    refused(rf"tensor {NAME} has shape \(1919, 1\)", {NAME: tensors[NAME][1:]})
    refused(r"nf4 is not the state of x_proj.weight: its shape is \[3, 5\]", stated(shape=[3, 5]))
    refused("blocks must be even and at most 4096", stated(blocksize=2**60))
    refused("nested scales need nested_offset", stated(nested_offset=None))
    refused("is not the state", {state: np.full(100_000, ord("["), np.uint8)})


def test_a_model_whose_projections_are_quantized(tmp_path: Path) -> None:
    check_model(
        tmp_path,
        Fixture.load("qwen3"),
        {"quantization_config": FOUR},
        lambda shape: four_bits(shape, nested=True),
        of="_proj",
    )
