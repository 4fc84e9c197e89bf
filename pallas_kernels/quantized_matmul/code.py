"""`Code`: the numbers of few bits that checkpoints store, and how arrays hold them."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The values of bitsandbytes: NF4 has quantiles of a normal distribution (arXiv 2305.14314, appendix E), and FP4 numbers
# of which the largest is 1.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = tuple(number / 12 for number in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
_FLOATS: Mapping[str, tuple[float, ...]] = {"nf4": _NF4, "fp4": (*_FP4, *(-value for value in _FP4))}


@dataclass(frozen=True)
class NumberTable:
    """The numbers that 16 codes of four bits stand for: integers of eight bits times a power of two."""

    integers: tuple[int, ...]
    unit: float = 1.0

    @classmethod
    def with_signs(cls, unit: float, *sizes: int) -> "NumberTable":
        """Returns the table of up to eight sizes, whose negative numbers have the highest bit. Others are 0."""
        padded = (*sizes, *(0 for _ in range(8 - len(sizes))))
        return cls((*padded, *(-size for size in padded)), unit)

    @property
    def numbers(self) -> np.ndarray:
        """The numbers f32[16]."""
        return np.array(self.integers, np.float32) * np.float32(self.unit)

    @property
    def unsigned(self) -> tuple[int, ...]:
        """The integers plus `zero`, so that none is negative."""
        return tuple(number + self.zero for number in self.integers)

    @property
    def zero(self) -> int:
        """The least number that makes all integers positive or 0 when it is added."""
        return -min(self.integers)


# E2M1, and what the types of GGUF files have whose codes are places in tables or in grids. A number of a grid is one
# of a few sizes with a sign; those of IQ1_S and IQ1_M are -1, 0 and 1, to which 1/8 is added or taken away.
_TABLES: Mapping[str, NumberTable] = {
    "float4_e2m1fn": NumberTable.with_signs(0.5, 0, 1, 2, 3, 4, 6, 8, 12),
    "iq4": NumberTable((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)),
    "iq3_xxs": NumberTable.with_signs(0.25, 4, 12, 20, 28, 36, 44, 52, 62),
    "iq3_s": NumberTable.with_signs(1.0, 1, 3, 5, 7, 9, 11, 13, 15),
    "iq2": NumberTable.with_signs(0.125, 8, 25, 43),
    "iq1": NumberTable((-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7, 0, 0, 0, 0, 0), 0.125),
}


@dataclass(frozen=True)
class Code:
    """A kind of numbers. A number of eight bits is an element of an array. Two numbers of four bits are one byte.

    The first of two has the lower four bits. A number of five or six bits has a byte of its own, unless a form divides
    its bits among two arrays.
    """

    name: Literal[
        "int8", "uint4", "uint5", "uint6", "uint8", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn",
        "iq4", "iq3_xxs", "iq3_s", "iq2", "iq1", "nf4", "fp4",
    ]  # fmt: skip

    @property
    def bits(self) -> int:
        """The bits that a number has."""
        return 4 if self.values is not None else {"uint4": 4, "uint5": 5, "uint6": 6}.get(self.name, 8)

    @property
    def per_byte(self) -> int:
        """The numbers that a byte has."""
        return 2 if self.bits == 4 else 1

    @property
    def is_by_table(self) -> bool:
        """Whether it numbers the values of a table that are neither integers nor of few bits."""
        return self.name in _FLOATS

    @property
    def values(self) -> np.ndarray | None:
        """The numbers f32[16] of codes of four bits that are places in a table."""
        if self.is_by_table:
            return np.array(_FLOATS[self.name], np.float32)
        return None if self.number_table is None else self.number_table.numbers

    @property
    def dtype(self) -> str:
        """The dtype of arrays of these numbers."""
        return "uint8" if self.bits < 8 else self.name

    @property
    def number_table(self) -> NumberTable | None:
        """The numbers that codes of four bits stand for, if they are no integers from 0 on."""
        return _TABLES.get(self.name)

    @property
    def is_of_gguf(self) -> bool:
        """Whether only GGUF files have such numbers, which no kernel of GPUs and TPUs knows."""
        return self.number_table is not None and self != FLOAT4

    @property
    def has_zero(self) -> bool:
        """Whether a number stands for 0."""
        return self.number_table is None or 0 in self.number_table.integers

    @property
    def zero(self) -> int:
        """The number that stands for 0 where a matrix does not say another one."""
        return 2 ** (self.bits - 1) if self.name.startswith("uint") else 0

    @property
    def table(self) -> np.ndarray:
        """The value of each byte that holds a single number, f32[256]. Four bits say nothing of bytes beyond 15."""
        if self.values is not None:
            return np.tile(self.values, 16)
        return np.arange(256).astype(np.uint8).view(_DTYPES[self.dtype]).astype(np.float32)

    def numbers(self, array: jax.Array) -> jax.Array:
        """Returns the numbers f32[.., in] of an array [.., in], or [.., in / 2] where a byte has two."""
        if self.per_byte == 1:
            return array.astype(jnp.float32)
        return self.numbers_of_codes(jnp.stack([array & 15, array >> 4], axis=-1).reshape(*array.shape[:-1], -1))

    def numbers_of_codes(self, codes: jax.Array) -> jax.Array:
        """Returns the numbers f32[.., in] of codes of four to six bits u8[.., in], one in each byte."""
        if self.values is None:
            return codes.astype(jnp.float32)
        if self != FLOAT4:
            return _chosen(list(self.values), codes)
        # The values of the eight steps lie on three lines, of which the highest counts.
        step = (codes & 7).astype(jnp.float32)
        size = jnp.maximum(jnp.maximum(step / 2, step - 2), 2 * step - 8)
        return jnp.where(codes > 7, -size, size)

    def rounded(self, values: jax.Array) -> jax.Array:
        """Returns the numbers nearest to values f32[.., in], of which none is beyond `largest`, as an array of them."""
        if self.per_byte == 2:
            codes = self.nearest_codes(values)
            return codes[..., ::2] | codes[..., 1::2] << 4
        if self.zero:
            return (jnp.clip(jnp.round(values), -self.zero, self.zero - 1) + self.zero).astype(jnp.uint8)
        dtype = _DTYPES[self.name]
        return (jnp.round(values) if self.name == "int8" else values).astype(dtype)

    def nearest_codes(self, values: jax.Array) -> jax.Array:
        """Returns the codes of four bits that are nearest to values f32[.., in], one in each byte."""
        if self.values is None:
            return (jnp.clip(jnp.round(values), -8, 7) + self.zero).astype(jnp.uint8)
        if self == FLOAT4:
            middles = [(low + high) / 2 for low, high in pairwise(_E2M1)]
            size = sum((jnp.abs(values) > middle).astype(jnp.uint8) for middle in middles)
            return size + jnp.where(values < 0, 8, 0).astype(jnp.uint8)
        numbers, codes = np.unique(self.values, return_index=True)
        middles = [float(low + high) / 2 for low, high in pairwise(numbers)]
        place = sum((values > middle).astype(jnp.uint8) for middle in middles)
        return jnp.asarray(codes.astype(np.uint8))[place]

    @property
    def largest(self) -> float:
        """The value that the largest element of a group is rounded to."""
        if self.values is not None:
            return float(min(self.values.max(), -self.values.min()))
        sizes: Mapping[str, float] = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}
        return self.zero - 1 if self.zero else sizes[self.name]


def _chosen(values: list[Any], numbers: jax.Array) -> jax.Array:
    """Returns the value of each number, of 16 values, by its four bits. XLA:CPU looks up one element at a time."""
    for bit in range(4):
        is_set = (numbers >> np.uint8(bit) & np.uint8(1)).astype(bool)
        values = [jnp.where(is_set, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
    [result] = values
    return result


_DTYPES: Mapping[str, np.dtype] = {
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
INT8, UINT4, FLOAT4 = Code("int8"), Code("uint4"), Code("float4_e2m1fn")
UINT5, UINT6, UINT8 = Code("uint5"), Code("uint6"), Code("uint8")
IQ4, IQ3_XXS, IQ3_S = Code("iq4"), Code("iq3_xxs"), Code("iq3_s")
IQ2, IQ1 = Code("iq2"), Code("iq1")
NF4, FP4 = Code("nf4"), Code("fp4")  # of bitsandbytes
E4M3, E5M2 = Code("float8_e4m3fn"), Code("float8_e5m2")
# The codes of arrays whose elements are single numbers.
BYTES: Mapping[np.dtype, Code] = {_DTYPES[code.name]: code for code in (INT8, UINT8, E4M3, E5M2)}
