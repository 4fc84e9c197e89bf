"""MXFP4: floating-point numbers of four bits, 32 of which have one scale, a power of two (gpt-oss)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import ml_dtypes
import numpy as np

from jaxvllm.models.declaration import Storage
from jaxvllm.models.forms.few_bits import StoredAs
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.published.encoding import Encoding
from jaxvllm.models.published.parts import Part, by_group, scaled, stored, turned, unpacked
from jaxvllm.models.safetensors_files import WeightFiles
from pallas_kernels.quantized_matmul.code import FLOAT4

BLOCK = 32
_BYTES: Mapping[str, np.dtype] = {"U8": np.dtype(np.uint8)}
_EXPONENTS = np.dtype(ml_dtypes.float8_e8m0fnu)  # byte e stands for 2 ** (e - 127)


@dataclass(frozen=True)
class Mxfp4(Encoding):
    """A stack of matrices [X, in, out] is two tensors, which have the matrices [out, in].

    Blocks u8[X, out, in / 32, 16] have two numbers in a byte, the lower four bits first, and scales u8[X, out, in / 32]
    their exponents.
    """

    @classmethod
    def read(cls, settings: HfConfig) -> Self:
        """Reads a quantization_config. It says nothing that the files do not say."""
        return cls()

    def usual(self, storage: Storage) -> StoredAs | None:
        return StoredAs(FLOAT4, BLOCK, _EXPONENTS.name) if storage == "experts" else None

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
        scales = files.tensor(f"{name}_scales", grid, _BYTES).view(_EXPONENTS)
        return turned(scaled(unpacked(packed, fp4_pairs()), by_group(stored(scales), (1, 1, BLOCK))))


def fp4_pairs() -> np.ndarray:
    """Returns the two numbers e2m1 of each byte, f32[256, 2]. The highest of the four bits of a number is its sign."""
    values = np.arange(256)
    return FLOAT4.table[np.stack([values & 15, values >> 4], axis=1)]
