"""MXFP4 and MXFP8: floating-point numbers of four or eight bits, 32 of which have one scale, a power of two."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from jaxvllm.models.declaration import Storage
from jaxvllm.models.forms.few_bits import StoredAs
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.published.encoding import EXPONENTS, Encoding
from jaxvllm.models.published.parts import Part, by_group, scaled, stored, turned, unpacked
from jaxvllm.models.safetensors_files import WeightFiles
from pallas_kernels.quantized_matmul.code import E4M3, FLOAT4

BLOCK = 32
_BYTES: Mapping[str, np.dtype] = {"U8": np.dtype(np.uint8)}
STORED_MXFP4 = StoredAs(FLOAT4, BLOCK, EXPONENTS["U8"].name)
STORED_MXFP8 = StoredAs(E4M3, BLOCK, EXPONENTS["U8"].name)


@dataclass(frozen=True)
class Mxfp4(Encoding):
    """A stack of matrices [X, in, out] is two tensors, which have the matrices [out, in] (gpt-oss).

    Blocks u8[X, out, in / 32, 16] have two numbers in a byte, the lower four bits first, and scales u8[X, out, in / 32]
    their exponents.
    """

    @classmethod
    def read(cls, settings: HfConfig) -> Self:
        """Reads a quantization_config. It says nothing that the files do not say."""
        return cls()

    def usual(self, storage: Storage) -> StoredAs | None:
        return STORED_MXFP4 if storage == "experts" else None

    @property
    def ends(self) -> Mapping[str, str]:
        return {"_blocks": "", "_scales": ""}

    def part(self, files: WeightFiles, name: str, shape: tuple[int, ...]) -> Part | None:
        blocks = f"{name}_blocks"
        if blocks not in files or len(shape) != 3:
            return None
        X, columns, rows = shape
        grid = X, rows, -(-columns // BLOCK)
        if columns % BLOCK:
            raise ValueError(f"{files.where(blocks)}: {blocks} has blocks of {BLOCK}, and the config {columns} inputs")
        packed = files.tensor(blocks, (*grid, BLOCK // 2), _BYTES).reshape((X, rows, columns // 2), copy=False)
        scales = files.tensor(f"{name}_scales", grid, EXPONENTS)
        return turned(scaled(unpacked(packed, fp4_pairs()), by_group(stored(scales), (1, 1, BLOCK))))


def mxfp_part(files: WeightFiles, numbers: np.ndarray, scales: str, shape: tuple[int, int]) -> Part:
    """Returns the values of a matrix [out, in] of numbers with exponents for 32 of a row, which a tensor has.

    numbers: u8[out, in / 2] of two numbers e2m1 in a byte, the lower four bits first, or e4m3[out, in]
    """
    rows, columns = shape
    if columns % BLOCK:
        raise ValueError(f"{files.where(scales)}: {scales} has groups of {BLOCK}, and the config {columns} inputs")
    exponents = stored(files.tensor(scales, (rows, columns // BLOCK), EXPONENTS))
    codes = unpacked(numbers, fp4_pairs()) if numbers.dtype == np.uint8 else stored(numbers)
    return scaled(codes, by_group(exponents, (1, BLOCK)))


def fp4_pairs() -> np.ndarray:
    """Returns the two numbers e2m1 of each byte, f32[256, 2]. The highest of the four bits of a number is its sign."""
    values = np.arange(256)
    return FLOAT4.table[np.stack([values & 15, values >> 4], axis=1)]
