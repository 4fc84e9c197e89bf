"""The layout of codes in words of 32 bits for TPUs, and the numbers of eight bits that masks and shifts make of them.

A register of words [8, 128] is one of bytes [32, 128], of which a word has four rows. So the bytes of eight words below
each other are 32 inputs that follow each other, and where a byte has two codes, its lower bits are those of 32 inputs,
and its upper bits those of the next 32. No number ever moves to another row or column.

TPUs know three kinds of numbers of eight bits: integers, floats with five bits of exponent, and floats with four.
Matrix units multiply rows in bfloat16 by floats of both kinds, as they are, and vector units make wider numbers of all.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import TpuChip
from pallas_kernels.quantized_matmul.code import Code

WORD_ROWS = 8  # the rows of a register of words
BYTE_ROWS = 32  # and of one of bytes


def bits_of(code: Code) -> int:
    """Returns the bits of a code."""
    return 8 // code.per_byte


def in_words[Codes: (np.ndarray, jax.Array)](code: Code, codes: Codes) -> Codes:
    """Returns the words i32[.., in / codes of a word] of codes u8[.., in], one in each byte.

    `in` must be a multiple of the inputs of eight words. Both arrays may be those of NumPy or of jax.
    """
    if code.name == "float8_e4m3fn":  # The bits of -0 are no number where exponents have a bias of 11.
        codes = codes * (codes != 0x80).astype(np.uint8)
    parts = codes.reshape(*codes.shape[:-1], -1, code.per_byte, WORD_ROWS, 4)
    inputs = parts[..., 0, :, :]
    if code.per_byte == 2:
        upper = parts[..., 1, :, :]
        if code.name == "float4_e2m1fn":  # whose first is where FP8 has it, so that it takes a mask alone
            inputs = (inputs & 8) << 4 | (inputs & 7) << 1 | (upper & 7) << 4 | upper >> 3
        else:
            inputs = inputs | upper << 4
    wide = inputs.astype(np.uint32)
    words = wide[..., 0]
    for byte in range(1, 4):
        words = words | wide[..., byte] << np.uint32(8 * byte)
    return words.reshape(*codes.shape[:-1], -1).astype(np.int32)


@dataclass(frozen=True)
class Decoding:
    """Makes numbers of eight bits of codes. A code is its number * factor + base, and factor is a power of two."""

    code: Code
    dtype: Any
    factor: float
    base: int = 0

    def numbers(self, words: jax.Array) -> Iterator[jax.Array]:
        """Yields numbers [32, columns] of words i32[8, columns], in the order of their inputs."""
        for place in range(self.code.per_byte):
            yield pltpu.bitcast(self._bytes(words, place), self.dtype)

    def _bytes(self, words: jax.Array, place: int) -> jax.Array:
        shifted = jax.lax.shift_right_logical
        if self.code.per_byte == 1:
            return words
        if self.code.name == "float4_e2m1fn":
            if place:
                return shifted(words, 3) & _in_all(0x0E) | words << 7 & _in_all(0x80)
            return words & _in_all(0x8E)
        if self.dtype == jnp.int8:
            signed = words ^ _in_all(0x88)
            return (signed if place else signed << 4) & _in_all(0xF0)
        return (shifted(words, 4) if place else words) & _in_all(0x0F)


def floats_of(code: Code, chip: TpuChip) -> Decoding | None:
    """Returns the floats that a matrix unit takes for these codes, or None for int8. All are exact.

    An integer of four bits becomes the last four bits of a float with three bits of mantissa: below twice the least
    power of two such floats lie equally far apart, from zero on. FP4 moves to its place in a wider exponent, and those
    below its first power of two become numbers below that of the wider one.
    """
    if code.name == "int8":
        return None
    if code.name in ("float8_e5m2", "float4_e2m1fn"):
        return Decoding(code, jnp.float8_e5m2, 2.0**14 if code.per_byte == 2 else 1.0)
    # Matrix units before v7x know numbers with this mantissa by a bias of 11, and by no other.
    is_known = "float8_e4m3fn" in chip.multiplies
    dtype, bias = (jnp.float8_e4m3fn, 7) if is_known else (jnp.float8_e4m3b11fnuz, 11)
    if code.per_byte == 1:
        return Decoding(code, dtype, 2.0 ** (bias - 7))
    return Decoding(code, dtype, 2.0 ** (bias + 2))


def numbers_of(code: Code, chip: TpuChip) -> Decoding:
    """Returns what a vector unit makes of codes before it widens them. All are exact.

    Integers of four bits become floats, or the upper four bits of integers with a sign.
    """
    floats = floats_of(code, chip)
    # v6e makes bfloat16 of integers by one instruction, and of floats by three (int4, groups of 32: 66,000 and 88,000
    # bundles). v7x takes one for both, and v5e, which has float32 alone, one for floats and two for integers.
    if code.name == "uint4" and chip.computes_bf16 and "float8_e4m3fn" not in chip.multiplies:
        return Decoding(code, jnp.int8, 1 / 16, 8)
    return floats or Decoding(code, jnp.int8, 1.0)


def in_both_halves(values: jax.Array) -> jax.Array:
    """Returns words i32 of which both halves are these numbers f32, in bfloat16, which must be exact."""
    bits = pltpu.bitcast(values, jnp.int32)
    return bits | jax.lax.shift_right_logical(bits, 16)


def _in_all(byte: int) -> np.int32:
    return np.uint32(byte * 0x01010101).astype(np.int32)
