"""compressed-tensors, AWQ and GPTQ: every element is its integer less its zero, times its scale."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxvllm.models.published import published_encoding, without_encoding
from tests.models.published.written import E4M3, by_block, check_values, encoded, write_tensors

NAME = "x_proj.weight"


def packed(codes: np.ndarray, bits: int, places: tuple[int, ...] | None = None) -> np.ndarray:
    """Integers of few bits, packed along the last axis in words of 32 bits, one by one."""
    count = 32 // bits
    places = places or tuple(range(count))
    words = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // count)), np.uint32)
    for column in range(codes.shape[-1]):
        shift = bits * places[column % count]
        words[..., column // count] |= codes[..., column].astype(np.uint32) << np.uint32(shift)
    return words.view(np.int32)


def random_codes(shape: tuple[int, ...], bits: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**bits, shape)


def random_scales(shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(7).uniform(0.1, 2, shape).astype(dtype)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ["x"]}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize(("shape", "group"), [((21, 96), 32), ((24, 80), 32), ((9, 50), None)])
def test_packed_compressed_tensors(
    bits: int, is_symmetric: bool, shape: tuple[int, int], group: int | None, tmp_path: Path
) -> None:
    rows, columns = shape
    step = group or columns
    groups = -(-columns // step)
    codes, scales = random_codes(shape, bits), random_scales((rows, groups))
    zeros = np.full((rows, groups), 2 ** (bits - 1)) if is_symmetric else random_codes((rows, groups), bits, 1)
    tensors = {"weight_packed": packed(codes, bits), "weight_scale": scales, "weight_shape": np.array(shape)}
    if not is_symmetric:
        tensors["weight_zero_point"] = np.ascontiguousarray(packed(zeros.T, bits).T)
    write_tensors(tmp_path, {f"x_proj.{part}": array for part, array in tensors.items()})
    expected = (codes - by_block(zeros, shape, (1, step))) * by_block(scales, shape, (1, step))
    settings = compressed("pack-quantized", num_bits=bits, type="int", group_size=group, symmetric=is_symmetric)
    check_values(encoded(tmp_path, settings), NAME, expected.astype(np.float32))


@pytest.mark.parametrize(
    ("grid", "block", "weights"),
    [
        ((1,), (30, 50), {"strategy": "tensor"}),
        ((30, 1), (1, 50), {"strategy": "channel"}),
        ((2, 4), (16, 16), {"strategy": "block", "block_structure": [16, 16]}),
        ((30, 4), (1, 16), {"strategy": "group", "group_size": 16}),
    ],
)
@pytest.mark.parametrize("kind", ["float", "int"])
def test_compressed_tensors_in_bytes(
    kind: str, grid: tuple[int, ...], block: tuple[int, int], weights: dict[str, Any], tmp_path: Path
) -> None:
    shape = (30, 50)
    codes = np.random.default_rng(0).integers(-128, 128, shape).astype(np.int8)
    values = codes if kind == "int" else codes.astype(np.float32).astype(E4M3)
    scales = random_scales(grid)
    tensors = {NAME: values, f"{NAME}_scale": scales, "x_proj.input_scale": scales}
    full = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
    zeros = np.zeros(full, np.int8)
    if kind == "int":
        zeros = np.random.default_rng(1).integers(-9, 9, full).astype(np.int8)
        tensors[f"{NAME}_zero_point"] = zeros
    write_tensors(tmp_path, tensors)
    less = values.astype(np.float32) - by_block(zeros, shape, block)
    expected = (less * by_block(scales.reshape(full), shape, block)).astype(np.float32)
    check_values(encoded(tmp_path, compressed(f"{kind}-quantized", num_bits=8, type=kind, **weights)), NAME, expected)


@pytest.mark.parametrize(("columns", "group"), [(96, 32), (80, 32), (48, -1)])
def test_awq(columns: int, group: int, tmp_path: Path) -> None:
    rows, step = 24, group if group > 0 else columns
    groups = -(-columns // step)
    codes, zeros = random_codes((columns, rows), 4), random_codes((groups, rows), 4, 1)
    scales = random_scales((groups, rows), np.float16)
    # The place of column c in its word, from AutoAWQ's list of the columns in the places of a word.
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    places = tuple(order.index(column) for column in range(8))
    tensors = {"qweight": packed(codes, 4, places), "qzeros": packed(zeros, 4, places), "scales": scales}
    write_tensors(tmp_path, {f"x_proj.{part}": array for part, array in tensors.items()})
    block = (step, 1)
    spread = by_block(scales.astype(np.float32), (columns, rows), block)
    expected = ((codes - by_block(zeros, (columns, rows), block)) * spread).T.astype(np.float32)
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    check_values(encoded(tmp_path, settings), NAME, expected)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("order", ["none", "usual", "mixed"])
def test_gptq(bits: int, version: str, order: str, tmp_path: Path) -> None:
    rows, columns, step = 32, 80, 32
    codes, zeros = random_codes((columns, rows), bits), random_codes((3, rows), bits, 1)
    scales = random_scales((3, rows), np.float16)
    group_of = np.arange(columns) // step
    if order == "mixed":
        group_of = np.random.default_rng(3).permutation(group_of)
    # The first version stores 1 less, and 0 becomes the largest integer.
    kept = (zeros - 1) % 2**bits if version == "gptq" else zeros
    tensors = {"qweight": packed(codes.T, bits).T, "qzeros": packed(kept, bits), "scales": scales}
    if order != "none":
        tensors["g_idx"] = group_of.astype(np.int32)
    write_tensors(tmp_path, {f"x_proj.{part}": array for part, array in tensors.items()})
    expected = ((codes - zeros[group_of]) * scales.astype(np.float32)[group_of]).T.astype(np.float32)
    settings = {"quant_method": "gptq", "bits": bits, "group_size": step, "checkpoint_format": version}
    check_values(encoded(tmp_path, settings), NAME, expected)
    # `dynamic` gives a layer other bits than the config states for most.
    check_values(encoded(tmp_path, settings | {"bits": 8}), NAME, expected)


def test_the_config_of_a_decoder_within_another_model_may_state_the_encoding() -> None:
    settings = compressed("pack-quantized", num_bits=4, type="int", group_size=32)
    inner = {"hidden_size": 8, "quantization_config": settings}
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": inner}
    assert published_encoding(config) == published_encoding({"quantization_config": settings}) is not None
    plain = without_encoding(config | {"quantization_config": settings})
    assert plain == config | {"text_config": {"hidden_size": 8}}
    assert published_encoding(plain) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "hqq"}, "'hqq' is not supported: supported are fp8, fbgemm_fp8, modelopt,"),
        ({"quant_method": "torchao"}, "'torchao' is not supported: its checkpoints are pickles, which can run code"),
        ({"bits": 4}, "quant_method None is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo must be one of FP8, NVFP4, .*'W4A8_AWQ'"),
        (compressed("mxfp6-pack-quantized"), "format must be one of float-quantized.*not 'mxfp6-pack-quantized'"),
        ({"quant_method": "bitsandbytes"}, "must state load_in_4bit or load_in_8bit"),
        ({"bits": 7, "group_size": 64}, "bits of MLX must be one of 2, 3, 4, 5, 6, 8 in mode affine, not 7"),
        ({"bits": 4, "group_size": 16}, "group_size of MLX must be one of 32, 64, 128 in mode affine, not 16"),
        ({"bits": 4, "group_size": 32, "mode": "fp4"}, "mode must be one of affine, mxfp4, mxfp8, nvfp4, not 'fp4'"),
        (compressed("pack-quantized", num_bits=3, type="int"), "num_bits of type int must be 4 or 8"),
        (compressed("float-quantized", num_bits=4, type="float"), "num_bits of type float must be 8"),
        (compressed("int-quantized") | {"transform_config": {"config_groups": {}}}, "transform_config = .* changes"),
        (compressed("int-quantized") | {"config_groups": {"group_0": 3}}, "must have groups with weights, not 3"),
        ({"quant_method": "awq", "bits": 8}, "bits of AWQ must be 4, not 8"),
        ({"quant_method": "awq", "version": "gemv"}, "version of AWQ must be gemm, not 'gemv'"),
        ({"quant_method": "gptq", "bits": 3}, "bits of GPTQ must be one of 2, 4, 8, not 3"),
        ({"quant_method": "gptq", "group_size": 0}, "group_size must be a positive integer, or -1"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format must be one of gptq, gptq_v2"),
    ],
)
def test_what_is_not_known_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        encoded(tmp_path, settings)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (compressed("pack-quantized", num_bits=4, type="int", group_size=32), ("weight_packed", "weight_scale")),
        ({"quant_method": "awq", "group_size": 32}, ("qweight", "qzeros", "scales")),
        ({"quant_method": "gptq", "group_size": 32}, ("qweight", "qzeros", "scales")),
    ],
)
def test_parts_that_are_missing_or_misshapen(settings: dict[str, Any], parts: tuple[str, ...], tmp_path: Path) -> None:
    words = np.zeros((64, 8), np.int32)
    arrays = {
        "weight_packed": words,
        "weight_scale": np.ones((64, 2), np.float32),
        "qweight": words if settings["quant_method"] == "awq" else np.zeros((8, 64), np.int32),
        "qzeros": np.zeros((2, 8), np.int32),
        "scales": np.ones((2, 64), np.float16),
    }
    tensors = {f"x_proj.{part}": arrays[part] for part in parts}
    encoded(write_tensors(tmp_path, tensors), settings).check(NAME, (64, 64))
    for name, array in tensors.items():
        write_tensors(tmp_path, tensors | {name: array[1:]})
        with pytest.raises(ValueError, match=rf"model.safetensors: tensor {name} has shape"):
            encoded(tmp_path, settings).check(NAME, (64, 64))
        write_tensors(tmp_path, {other: tensors[other] for other in tensors if other != name})
        with pytest.raises(ValueError, match=r"lacks the tensor|is not quantized"):
            encoded(tmp_path, settings).check(NAME, (64, 64))
