"""NVFP4: floating-point numbers of four bits, 16 of which have a scale in FP8, and a matrix one more in float32."""

from collections.abc import Mapping

import numpy as np

from jaxvllm.models.forms.few_bits import StoredAs
from jaxvllm.models.published.encoding import FP8
from jaxvllm.models.published.mxfp4 import fp4_pairs
from jaxvllm.models.published.parts import Part, by_group, scaled, stored, unpacked
from jaxvllm.models.safetensors_files import WeightFiles
from pallas_kernels.quantized_matmul.code import E4M3, FLOAT4

GROUP = 16
STORED_NVFP4 = StoredAs(FLOAT4, GROUP, E4M3.name)
BYTES: Mapping[str, np.dtype] = {"U8": np.dtype(np.uint8)}
_FLOATS: Mapping[str, np.dtype] = {"F32": np.dtype(np.float32)}
_SCALES = {name: FP8[name] for name in ("F8_E4M3",)}


def nvfp4_part(
    files: WeightFiles, codes: str, scales: str, last: str, shape: tuple[int, ...], *, divides: bool
) -> Part:
    """Returns the values of a matrix [out, in], which three tensors have together.

    codes: u8[out, in / 2], two numbers e2m1 in a byte, of which the lower four bits are the first
    scales: e4m3[out, in / 16], by which the numbers are multiplied
    last: f32, of one element. Everything is divided by it (compressed-tensors) or multiplied by it (ModelOpt)
    """
    rows, columns = shape
    if columns % GROUP:
        raise ValueError(f"{files.where(codes)}: {codes} has groups of {GROUP}, and the config {columns} inputs")
    numbers = files.tensor(codes, (rows, columns // 2), BYTES)
    grid = rows, columns // GROUP
    of_groups = stored(files.tensor(scales, grid, _SCALES))
    factor = one_number(files, last)
    return scaled(unpacked(numbers, fp4_pairs()), by_group(of_groups, (1, GROUP), 1 / factor if divides else factor))


def one_number(files: WeightFiles, name: str) -> float:
    """Returns the only element of a tensor f32. Raises ValueError where it is missing, or is not above 0 and finite."""
    header = files.header(name)
    shape = header.shape if header is not None and all(size == 1 for size in header.shape) else ()
    value = float(files.tensor(name, shape, _FLOATS).reshape(()))
    if not 0 < value < np.inf:
        raise ValueError(f"{files.where(name)}: tensor {name} must be a positive number, not {value}")
    return value
