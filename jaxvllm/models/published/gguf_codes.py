"""`StoredType`: what the blocks of a type of ggml have of each number: codes, scales and minima, as they are stored.

The layouts are those of ggml (`ggml-common.h` and `ggml-quants.c`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

import ml_dtypes
import numpy as np

from jaxvllm.models.published import gguf_grids as grids
from jaxvllm.models.published.parts import Codes, Part, ScaledCodes, by_group, stored
from jaxvllm.models.tiling import Box
from pallas_kernels.integer_matmul.code_panels import UNITS
from pallas_kernels.quantized_matmul.code import (
    E4M3,
    FLOAT4,
    INT8,
    IQ1,
    IQ2,
    IQ3_S,
    IQ3_XXS,
    IQ4,
    UINT4,
    UINT5,
    UINT6,
    Code,
)

_LOW, _PAIRS = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0x0303030303030303)

# Makes u8[.., blocks, size] to [.., blocks, as many values as a block has].
_Read = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Nibbles:
    """Bytes `begin` to `end` of a block have the lower four bits of its codes.

    The lower halves of `run` bytes are those of as many codes, their upper halves those of the next ones, and so on.
    """

    begin: int
    end: int
    run: int

    def codes(self, blocks: np.ndarray) -> np.ndarray:
        """Returns them one in each byte."""
        parts = blocks[..., self.begin : self.end].reshape(*blocks.shape[:-1], -1, 1, self.run)
        found = np.empty((*parts.shape[:-2], 2, self.run), np.uint8)
        np.bitwise_and(parts[..., 0, :], 15, out=found[..., 0, :])
        np.right_shift(parts[..., 0, :], 4, out=found[..., 1, :])
        return found.reshape(*blocks.shape[:-1], -1)

    def words(self, blocks: np.ndarray) -> np.ndarray:
        """Returns those of eight codes as a word u32, as `CodePanels` has them: a byte has codes i and 4 + i."""
        pairs = np.ascontiguousarray(blocks[..., self.begin : self.end]).view(np.uint64)  # of four codes and the next
        # NumPy copies runs of a few bytes fast if they are single numbers.
        piece = np.dtype(np.complex128 if self.run > 16 else np.uint64 if self.run > 8 else np.uint32)
        count = self.run // 2 // piece.itemsize
        found = np.empty((*blocks.shape[:-1], (self.end - self.begin) // self.run, 2, count), piece)
        for half, low in enumerate((pairs & _LOW, pairs >> 4 & _LOW)):
            low |= low >> 28  # the next four codes, whose bits move up by four and down by a word
            runs = low.astype(np.uint32).view(piece).reshape(*found.shape[:-2], count)
            for i in range(count):
                found[..., half, i] = runs[..., i]
        return found.reshape(*blocks.shape[:-1], -1).view(np.uint32)


@dataclass(frozen=True)
class Words:
    """Codes of four bits that are read as words of eight, as `CodePanels` has them."""

    words: _Read

    def codes(self, blocks: np.ndarray) -> np.ndarray:
        """Returns them one in each byte."""
        pairs = self.words(blocks)[..., None].view(np.uint8)
        return np.stack([pairs & 15, pairs >> 4], axis=-2).reshape(*blocks.shape[:-1], -1)


@dataclass(frozen=True)
class StoredType:
    """A type whose blocks have codes, of which groups in a row have a scale, and some a minimum.

    codes: where codes of four to six bits are, or what reads others
    scale: the byte at which a block has its scales, or what reads it in float32
    scale_dtype: of these. A block has one in half precision or in E8M0, or one in E4M3 for each group
    high: reads the upper bits of codes of five and six bits
    high_words: reads those of 32 or 16 codes as a word u32, as `CodePanels` has them
    added: what is added to each code, where the type has no minima
    scales: reads those of the groups of a block, by which that scale is multiplied, or None: there is one group
    min, mins: the same for what is subtracted from each code times its scale
    sign: of minima, which some types have negative
    """

    count: int
    size: int
    code: Code
    codes: Nibbles | Words | _Read
    scale: int | _Read
    added: int = 0
    high: _Read | None = None
    high_words: _Read | None = None
    scales: _Read | None = None
    group: int = 32
    min: int | None = None
    mins: _Read | None = None
    sign: int = 1
    scale_dtype: np.dtype = np.dtype(np.float16)

    def part(self, data: np.ndarray, factor: float = 1) -> ScaledCodes:
        """Returns what u8[.., rows, bytes] have, rows of blocks, times a factor. They are read later."""
        blocks = data.reshape(*data.shape[:-1], -1, self.size)
        ones = (1,) * (data.ndim - 1)

        def half(at: int | _Read, sign: int = 1) -> Part:
            if not isinstance(at, int):
                return read(at, self.count)
            end, dtype = at + self.scale_dtype.itemsize, self.scale_dtype
            if dtype == E4M3.dtype:
                end = at + self.count // self.group
                return Codes(E4M3, read(lambda blocks: blocks[..., at:end], self.group))
            found = stored(blocks[..., at:end].view(dtype)[..., 0])
            return found if sign > 0 else lambda box: -found(box)

        def read(values: _Read, count: int) -> Part:
            """Returns the numbers of which one stands for so many of the matrix."""
            return _of_blocks(blocks, values, self.count // count)

        words, high_words = None, None
        if isinstance(self.codes, Nibbles | Words):
            words = read(self.codes.words, UNITS[4])
            high_words = None if self.high_words is None else read(self.high_words, UNITS[self.code.bits])
        codes = Codes(self.code, read(self._codes, 1), self.added, words, high_words)
        of_block, of_group = (*ones, self.count), (*ones, self.group)
        factors = None if self.scales is None else by_group(half(self.scale), of_block)
        scales = by_group(half(self.scale) if self.scales is None else read(self.scales, self.group), of_group, factor)
        if self.min is None:
            return ScaledCodes(codes, scales, None, factors)
        above = by_group(half(self.min, self.sign), of_block)
        if self.mins is None:
            return ScaledCodes(codes, scales, None, factors, above)
        return ScaledCodes(codes, scales, None, factors, by_group(read(self.mins, self.group), of_group), above)

    def _codes(self, blocks: np.ndarray) -> np.ndarray:
        if not isinstance(self.codes, Nibbles | Words):
            return self.codes(blocks)
        found = self.codes.codes(blocks)
        if self.high is not None:
            found |= self.high(blocks) << 4
        return found


def _of_blocks(blocks: np.ndarray, values: _Read, per_block: int) -> Part:
    """Returns what `values` reads of u8[.., rows, blocks, size]: matrices with so many columns for each block."""

    def part(box: Box) -> np.ndarray:
        (*_, first), (*rows, wanted) = box.start, box.shape
        begin, end = first // per_block, -(-(first + wanted) // per_block)
        (*index, _) = box.index((0,) * len(box.start))
        found = values(blocks[(*index, slice(begin, end))]).reshape(*rows, -1)
        skipped = first - begin * per_block
        return found[..., skipped : skipped + wanted]

    return part


def _spread_bits(begin: int, end: int) -> _Read:
    """Returns what reads each bit of some bytes, the lowest first."""
    return lambda blocks: np.unpackbits(np.ascontiguousarray(blocks[..., begin:end]), axis=-1, bitorder="little")


def _high_of_q5_k(blocks: np.ndarray) -> np.ndarray:
    fifths = (blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return fifths.reshape(*blocks.shape[:-1], 256)


def _high_words_of_q5_k(blocks: np.ndarray) -> np.ndarray:
    """Returns a word for each of eight groups of 32. Bit j of its bytes has number j of eight stored words."""
    words = np.ascontiguousarray(blocks[..., 16:48]).view(np.uint32)
    every = [np.ascontiguousarray(words[..., j]) for j in range(8)]
    groups = [
        reduce(np.bitwise_or, [(word >> group & 0x01010101) << j for j, word in enumerate(every)]) for group in range(8)
    ]
    return np.stack(groups, axis=-1)


def _high_of_q6_k(blocks: np.ndarray) -> np.ndarray:
    pairs = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return (pairs & 3).reshape(*blocks.shape[:-1], 256)


def _high_words_of_q6_k(blocks: np.ndarray) -> np.ndarray:
    """Returns a word for each half of eight groups of 32. Bits 2 j of its bytes have number j of four stored words."""
    words = np.ascontiguousarray(blocks[..., 128:192]).view(np.uint32).reshape(*blocks.shape[:-1], 2, 2, 4)
    # Both halves of a group are one number.
    every = [np.ascontiguousarray(words[..., j]).view(np.uint64)[..., 0] for j in range(4)]
    groups = [
        reduce(np.bitwise_or, [(word >> 2 * group & _PAIRS) << 2 * j for j, word in enumerate(every)])
        for group in range(4)
    ]
    return np.stack(groups, axis=-1).reshape(*blocks.shape[:-1], -1).view(np.uint32)


def _six_bits(rest: int) -> _Read:
    """Returns what reads the scales of Q4_K and Q5_K, of which `rest` is 0, or the minima, whose `rest` is 4.

    Both have six bits: the first four of either have a byte each, whose upper two bits are those of the others.
    """

    def read(blocks: np.ndarray) -> np.ndarray:
        own, mixed = blocks[..., 4 + rest : 8 + rest], blocks[..., 12:16]
        return np.concatenate([own & 63, (mixed >> rest & 15) | (own >> 2 & 48)], axis=-1)

    return read


def _int8(begin: int, end: int) -> _Read:
    return lambda blocks: np.ascontiguousarray(blocks[..., begin:end]).view(np.int8)


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    """Returns codes of which 8 stands for 0, as usual. They are from 4 to 11."""
    return (_crumbs(blocks[..., 32:96]) | _high_of_q3_k(blocks[..., :32]) << 2) + np.uint8(4)


def _crumbs(data: np.ndarray) -> np.ndarray:
    """Returns the lowest two bits of 32 bytes, then the next two, and so on, then those of the next 32 bytes."""
    parts = data.reshape(*data.shape[:-1], -1, 1, 32)
    found = parts >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return found.reshape(*data.shape[:-1], -1)


def _high_of_q3_k(mask: np.ndarray) -> np.ndarray:
    found = mask[..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return found.reshape(*mask.shape[:-1], 256)


def _scales_of_q3_k(blocks: np.ndarray) -> np.ndarray:
    """Returns numbers from -32 to 31: their lower four bits are in eight bytes, and the upper two in four more."""
    low, high = blocks[..., 96:104], blocks[..., None, 104:108]
    upper = (high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).reshape(*blocks.shape[:-1], 16)
    lower = np.concatenate([low & 15, low >> 4], axis=-1)
    return (lower | upper << 4).astype(np.int8) - np.int8(32)


def _scales_of_iq4_xs(blocks: np.ndarray) -> np.ndarray:
    """Returns numbers from -32 to 31: their lower four bits are in four bytes, and the upper two in two more."""
    low, high = blocks[..., 4:8, None], np.ascontiguousarray(blocks[..., 2:4]).view(np.uint16)
    lower = (low >> np.array([0, 4], np.uint8) & 15).reshape(*blocks.shape[:-1], 8)
    upper = (high >> np.arange(0, 16, 2, dtype=np.uint16) & 3).astype(np.uint8)
    return (lower | upper << 4).astype(np.int8) - np.int8(32)


def _tq1_0(blocks: np.ndarray) -> np.ndarray:
    """Returns -1, 0 and 1 as 7, 8 and 9. A byte is a fraction in base 3, of which five digits are codes, or four."""
    parts = []
    for begin, end, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        moved = blocks[..., None, begin:end] * (3 ** np.arange(digits, dtype=np.uint8))[:, None]  # modulo 256
        parts.append((moved.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(*blocks.shape[:-1], -1))
    return np.concatenate(parts, axis=-1) + np.uint8(7)


def _tq2_0(blocks: np.ndarray) -> np.ndarray:
    return _crumbs(blocks[..., :64]) + np.uint8(7)


def _q1_0(blocks: np.ndarray) -> np.ndarray:
    """Returns -1 and 1 as 7 and 9, by the bits of 16 bytes."""
    return _spread_bits(2, 18)(blocks) * np.uint8(2) + np.uint8(7)


# By their numbers in ggml.
STORED_TYPES: Mapping[int, StoredType] = {
    2: StoredType(32, 18, UINT4, Nibbles(2, 18, 16), 0, -8),  # Q4_0
    3: StoredType(32, 20, UINT4, Nibbles(4, 20, 16), 0, min=2, sign=-1),  # Q4_1
    6: StoredType(32, 22, UINT5, Nibbles(6, 22, 16), 0, -16, _spread_bits(2, 6)),  # Q5_0
    7: StoredType(32, 24, UINT5, Nibbles(8, 24, 16), 0, 0, _spread_bits(4, 8), min=2, sign=-1),  # Q5_1
    8: StoredType(32, 34, INT8, _int8(2, 34), 0),  # Q8_0
    10: StoredType(  # Q2_K
        256,
        84,
        UINT4,
        lambda blocks: _crumbs(blocks[..., 16:80]),
        80,
        scales=lambda blocks: blocks[..., :16] & 15,
        group=16,
        min=82,
        mins=lambda blocks: blocks[..., :16] >> 4,
    ),
    11: StoredType(256, 110, UINT4, _q3_k, 108, -8, scales=_scales_of_q3_k, group=16),  # Q3_K
    12: StoredType(  # Q4_K
        256, 144, UINT4, Nibbles(16, 144, 32), 0, scales=_six_bits(0), min=2, mins=_six_bits(4)
    ),
    13: StoredType(  # Q5_K
        256,
        176,
        UINT5,
        Nibbles(48, 176, 32),
        0,
        0,
        _high_of_q5_k,
        _high_words_of_q5_k,
        scales=_six_bits(0),
        min=2,
        mins=_six_bits(4),
    ),
    14: StoredType(  # Q6_K
        256,
        210,
        UINT6,
        Nibbles(0, 128, 64),
        208,
        -32,
        _high_of_q6_k,
        _high_words_of_q6_k,
        scales=_int8(192, 208),
        group=16,
    ),
    16: StoredType(  # IQ2_XXS
        256, 66, IQ2, Words(grids.words_of_iq2_xxs), 0, scales=grids.scales_of_iq2_xxs
    ),
    17: StoredType(  # IQ2_XS
        256, 74, IQ2, Words(grids.words_of_iq2_xs), 0, scales=grids.scales_of_iq2_xs, group=16
    ),
    18: StoredType(  # IQ3_XXS
        256, 98, IQ3_XXS, Words(grids.words_of_iq3_xxs), 0, scales=grids.scales_of_iq3_xxs
    ),
    19: StoredType(256, 50, IQ1, Words(grids.words_of_iq1_s), 0, scales=grids.scales_of_iq1_s),  # IQ1_S
    20: StoredType(32, 18, IQ4, Nibbles(2, 18, 16), 0),  # IQ4_NL
    21: StoredType(256, 110, IQ3_S, Words(grids.words_of_iq3_s), 0, scales=grids.scales_of_iq3_s),  # IQ3_S
    22: StoredType(  # IQ2_S
        256, 82, IQ2, Words(grids.words_of_iq2_s), 0, scales=grids.scales_of_iq2_s, group=16
    ),
    23: StoredType(256, 136, IQ4, Nibbles(8, 136, 16), 0, scales=_scales_of_iq4_xs),  # IQ4_XS
    29: StoredType(  # IQ1_M
        256, 56, IQ1, Words(grids.words_of_iq1_m), grids.factors_of_iq1_m, scales=grids.scales_of_iq1_m, group=16
    ),
    34: StoredType(256, 54, UINT4, _tq1_0, 52, -8, group=256),  # TQ1_0
    35: StoredType(256, 66, UINT4, _tq2_0, 64, -8, group=256),  # TQ2_0
    39: StoredType(  # MXFP4
        32, 17, FLOAT4, Nibbles(1, 17, 16), 0, scale_dtype=np.dtype(ml_dtypes.float8_e8m0fnu)
    ),
    40: StoredType(  # NVFP4
        64, 36, FLOAT4, Nibbles(4, 36, 8), 0, group=16, scale_dtype=np.dtype(ml_dtypes.float8_e4m3fn)
    ),
    41: StoredType(128, 18, UINT4, _q1_0, 0, -8, group=128),  # Q1_0
}
