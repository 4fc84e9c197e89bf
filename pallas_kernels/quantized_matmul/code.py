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


@dataclass(frozen=True)
class Code:
    """A kind of numbers. A number of eight bits is an element of an array. Two numbers of four bits are one byte.

    The first of two has the lower four bits. A number of five or six bits has a byte of its own, unless a form divides
    its bits among two arrays.
    """

    name: Literal[
        "int8", "uint4", "uint5", "uint6", "uint8", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "nf4", "fp4"
    ]

    @property
    def bits(self) -> int:
        """The bits that a number has."""
        return {"uint4": 4, "float4_e2m1fn": 4, "nf4": 4, "fp4": 4, "uint5": 5, "uint6": 6}.get(self.name, 8)

    @property
    def per_byte(self) -> int:
        """The numbers that a byte has."""
        return 2 if self.bits == 4 else 1

    @property
    def is_by_table(self) -> bool:
        """Whether it numbers the values of a table, which are neither integers nor of few bits."""
        return self.name in ("nf4", "fp4")

    @property
    def dtype(self) -> str:
        """The dtype of arrays of these numbers."""
        return "uint8" if self.bits < 8 else self.name

    @property
    def zero(self) -> int:
        """The number that stands for 0 where a matrix does not say another one."""
        return 2 ** (self.bits - 1) if self.name.startswith("uint") else 0

    @property
    def table(self) -> np.ndarray:
        """The value of each byte that holds a single number, f32[256]. Four bits say nothing of bytes beyond 15."""
        if self.name == "float4_e2m1fn":
            return np.tile(np.array([*_E2M1, *(-value for value in _E2M1)], np.float32), 16)
        if self.is_by_table:
            values = _NF4 if self.name == "nf4" else (*_FP4, *(-value for value in _FP4))
            return np.tile(np.array(values, np.float32), 16)
        return np.arange(256).astype(np.uint8).view(_DTYPES[self.dtype]).astype(np.float32)

    def numbers(self, array: jax.Array) -> jax.Array:
        """Returns the numbers f32[.., in] of an array [.., in], or [.., in / 2] where a byte has two."""
        if self.per_byte == 1:
            return array.astype(jnp.float32)
        both = jnp.stack([array & 15, array >> 4], axis=-1).reshape(*array.shape[:-1], -1)
        if self.name == "uint4":
            return both.astype(jnp.float32)
        if self.is_by_table:
            return _chosen(list(self.table[:16]), both)
        # The values of the eight steps lie on three lines, of which the highest counts.
        step = (both & 7).astype(jnp.float32)
        size = jnp.maximum(jnp.maximum(step / 2, step - 2), 2 * step - 8)
        return jnp.where(both > 7, -size, size)

    def rounded(self, values: jax.Array) -> jax.Array:
        """Returns the numbers nearest to values f32[.., in], of which none is beyond `largest`, as an array of them."""
        if self.per_byte == 1:
            if self.zero:
                return (jnp.clip(jnp.round(values), -self.zero, self.zero - 1) + self.zero).astype(jnp.uint8)
            dtype = _DTYPES[self.name]
            return (jnp.round(values) if self.name == "int8" else values).astype(dtype)
        if self.name == "uint4":
            steps = (jnp.clip(jnp.round(values), -8, 7) + self.zero).astype(jnp.uint8)
        elif self.is_by_table:
            table = self.table[:16]
            order = np.argsort(table, stable=True)
            middles = (table[order][1:] + table[order][:-1]) / 2
            place = sum((values > middle).astype(jnp.uint8) for middle in middles)
            steps = _chosen(list(order.astype(np.uint8)), place)
        else:
            middles = [(low + high) / 2 for low, high in pairwise(_E2M1)]
            size = sum((jnp.abs(values) > middle).astype(jnp.uint8) for middle in middles)
            steps = size + jnp.where(values < 0, 8, 0).astype(jnp.uint8)
        return steps[..., ::2] | steps[..., 1::2] << 4

    @property
    def largest(self) -> float:
        """The value that the largest element of a group is rounded to."""
        sizes: Mapping[str, float] = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}
        if self.is_by_table:
            return 1
        return self.zero - 1 if self.zero else sizes.get(self.name, _E2M1[-1])


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
NF4, FP4 = Code("nf4"), Code("fp4")  # of bitsandbytes
E4M3, E5M2 = Code("float8_e4m3fn"), Code("float8_e5m2")
# The codes of arrays whose elements are single numbers.
BYTES: Mapping[np.dtype, Code] = {_DTYPES[code.name]: code for code in (INT8, UINT8, E4M3, E5M2)}
