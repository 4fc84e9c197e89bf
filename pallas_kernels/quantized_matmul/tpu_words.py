"""The layout of codes in words of 32 bits for TPUs, of which a few shifts and masks make numbers in bfloat16.

A word has codes of one column of the matrix [in, out]. Each of its halves has as many as fit, and the codes at the same
place of both halves, of eight words below each other, are 16 inputs that follow each other: a register of bfloat16
[16, 128] has its rows in pairs in the halves of words. So a register of words becomes some registers of numbers, and
no number ever moves to another row or column.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantized_matmul.code import Code

WORD_ROWS = 8  # the rows of a register
PIECE = 16  # the inputs that codes at the same place of these words are


def bits_of(code: Code) -> int:
    """Returns the bits of a code."""
    return 8 // code.per_byte


def planes_of(code: Code) -> int:
    """Returns how many codes half a word has."""
    return 16 // bits_of(code)


def in_words[Codes: (np.ndarray, jax.Array)](code: Code, codes: Codes) -> Codes:
    """Returns the words i32[.., in / codes of a word] of codes u8[.., in], one in each byte.

    `in` must be a multiple of the inputs of eight words. Both arrays may be those of NumPy or of jax.
    """
    planes = planes_of(code)
    parts = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, planes, WORD_ROWS, 2)
    words = parts[..., 0, :, 0]
    for plane in range(planes):
        for half in range(2):
            if plane or half:
                words = words | parts[..., plane, :, half] << np.uint32(16 * half + bits_of(code) * plane)
    return words.reshape(*codes.shape[:-1], -1).astype(np.int32)


def offset_of(code: Code) -> int:
    """Returns what `numbers` adds to each number: an integer of four bits fills up the mantissa of 128."""
    return 128 if code.name == "uint4" else 0


def numbers(code: Code, words: jax.Array, plane: int, computes_bf16: bool) -> jax.Array:
    """Returns the numbers, and `offset_of` the code added, bf16[16, columns], of a plane of words i32[8, columns].

    All are exact. Codes of FP8 that are no numbers become some.
    """
    bits = bits_of(code)
    first = bits * plane
    if code.name == "uint4":
        return _bf16(_field(words, first, 4, 0) | _in_both(0x4300))
    if code.name == "int8":
        # 128 and the lower bits, less 128 and another 128 if the sign is set.
        low, high = _field(words, first, 7, 0), _field(words, first + 7, 1, 7)
        return _computed(
            lambda a, b: a - b, [_bf16(low | _in_both(0x4300)), _bf16(high | _in_both(0x4300))], computes_bf16
        )
    exponent, mantissa = {"float8_e4m3fn": (4, 3), "float8_e5m2": (5, 2), "float4_e2m1fn": (2, 1)}[code.name]
    bias = 2 ** (exponent - 1) - 1
    placed = _field(words, first, exponent + mantissa, 7 - mantissa) + _in_both((127 - bias) << 7)
    # Numbers below the first power of two lie half as far apart as bfloat16 takes them to lie, and begin at zero.
    least = 2.0 ** (1 - bias)
    size = _computed(lambda q: jnp.minimum(q, q + q - jnp.asarray(least, q.dtype)), [_bf16(placed)], computes_bf16)
    return _bf16(pltpu.bitcast(size, jnp.int32) | _field(words, first + bits - 1, 1, 15))


def in_both_halves(values: jax.Array) -> jax.Array:
    """Returns words i32 of which both halves are these numbers f32, in bfloat16, which must be exact."""
    bits = pltpu.bitcast(values, jnp.int32)
    return bits | jax.lax.shift_right_logical(bits, 16)


def _field(words: jax.Array, first: int, width: int, to: int) -> jax.Array:
    """Returns so many bits of each half, from `first` on, moved to `to` in an empty half."""
    if to > first:
        words = words << (to - first)
    elif to < first:
        words = jax.lax.shift_right_logical(words, first - to)
    return words & _in_both(((1 << width) - 1) << to)


def _in_both(half: int) -> np.int32:
    return np.uint32(half | half << 16).astype(np.int32)


def _bf16(words: jax.Array) -> jax.Array:
    return pltpu.bitcast(words, jnp.bfloat16)


def _computed(function: Callable[..., jax.Array], operands: Sequence[jax.Array], computes_bf16: bool) -> jax.Array:
    """Computes with numbers in bfloat16, in float32 where the vector unit has nothing else."""
    if computes_bf16:
        return function(*operands)
    return function(*(operand.astype(jnp.float32) for operand in operands)).astype(jnp.bfloat16)
