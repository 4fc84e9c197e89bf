"""`StoredType`: what the blocks of a type of ggml have of each number: codes, scales and minima, as they are stored.

The layouts are those of ggml (`ggml-common.h` and `ggml-quants.c`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxvllm.models.published.parts import Codes, Part, ScaledCodes, by_group, stored
from jaxvllm.models.tiling import Box
from pallas_kernels.quantized_matmul.code import INT8, UINT4, UINT5, UINT6, Code

# Makes u8[.., blocks, size] to [.., blocks, as many values as a block has].
_Read = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class StoredType:
    """A type whose blocks have codes in integers, of which groups in a row have a scale, and some a minimum.

    added: what is added to each code, where the type has no minima
    scale: the byte at which a block has its scale in half precision
    scales: reads those of the groups of a block, by which that scale is multiplied, or None: there is one group
    min, mins: the same for what is subtracted from each code times its scale
    sign: of minima, which some types have negative
    """

    count: int
    size: int
    code: Code
    codes: _Read
    scale: int
    added: int = 0
    scales: _Read | None = None
    group: int = 32
    min: int | None = None
    mins: _Read | None = None
    sign: int = 1

    def part(self, data: np.ndarray) -> ScaledCodes:
        """Returns what u8[rows, bytes] have, rows of blocks. They are read later."""
        blocks = data.reshape(len(data), -1, self.size)

        def half(at: int, sign: int = 1) -> Part:
            found = stored(blocks[..., at : at + 2].view(np.float16)[..., 0])
            return found if sign > 0 else lambda box: -found(box)

        def read(values: _Read, per_block: int) -> Part:
            return _of_blocks(blocks, values, per_block)

        codes = Codes(self.code, read(self.codes, self.count), self.added)
        of_block, of_group = (1, self.count), (1, self.group)
        supers = None if self.scales is None else by_group(half(self.scale), of_block)
        per_block = self.count // self.group
        scales = by_group(half(self.scale) if self.scales is None else read(self.scales, per_block), of_group)
        if self.min is None:
            return ScaledCodes(codes, scales, None, supers)
        above = by_group(half(self.min, self.sign), of_block)
        if self.mins is None:
            return ScaledCodes(codes, scales, None, supers, above)
        return ScaledCodes(codes, scales, None, supers, by_group(read(self.mins, per_block), of_group), above)


def _of_blocks(blocks: np.ndarray, values: _Read, per_block: int) -> Part:
    """Returns what `values` reads of u8[rows, blocks, size]: a matrix with so many columns for each block."""

    def part(box: Box) -> np.ndarray:
        (row, first), (rows, wanted) = box.start, box.shape
        begin, end = first // per_block, -(-(first + wanted) // per_block)
        found = values(blocks[row : row + rows, begin:end]).reshape(rows, -1)
        skipped = first - begin * per_block
        return found[:, skipped : skipped + wanted]

    return part


def _nibbles(data: np.ndarray, run: int) -> np.ndarray:
    """Returns the lower four bits of `run` bytes, then their upper ones, then those of the next bytes."""
    parts = data.reshape(*data.shape[:-1], -1, 1, run)
    found = np.empty((*parts.shape[:-2], 2, run), np.uint8)
    np.bitwise_and(parts[..., 0, :], 15, out=found[..., 0, :])
    np.right_shift(parts[..., 0, :], 4, out=found[..., 1, :])
    return found.reshape(*data.shape[:-1], -1)


def _with_fifths(nibbles: np.ndarray, fifths: np.ndarray) -> np.ndarray:
    nibbles |= fifths << 4
    return nibbles


def _bits(words: np.ndarray) -> np.ndarray:
    """Returns each bit of u8[.., 4], the lowest first: [.., 32]."""
    return np.unpackbits(np.ascontiguousarray(words), axis=-1, bitorder="little")


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    fifths = (blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return _with_fifths(_nibbles(blocks[..., 48:], 32), fifths.reshape(*blocks.shape[:-1], 256))


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    low = blocks[..., :128].reshape(*blocks.shape[:-1], 2, 2, 32)
    high = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 32)
    found = np.empty((*blocks.shape[:-1], 2, 4, 32), np.uint8)
    for k in range(4):
        np.bitwise_and(high >> (2 * k) if k else high, 3, out=found[..., k, :])
        found[..., k, :] <<= 4
        nibble = low[..., k % 2, :]
        found[..., k, :] |= nibble >> 4 if k > 1 else nibble & 15
    return found.reshape(*blocks.shape[:-1], 256)


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


# By their numbers in ggml.
STORED_TYPES: Mapping[int, StoredType] = {
    2: StoredType(32, 18, UINT4, lambda blocks: _nibbles(blocks[..., 2:], 16), 0, -8),  # Q4_0
    3: StoredType(32, 20, UINT4, lambda blocks: _nibbles(blocks[..., 4:], 16), 0, min=2, sign=-1),  # Q4_1
    6: StoredType(  # Q5_0
        32, 22, UINT5, lambda blocks: _with_fifths(_nibbles(blocks[..., 6:], 16), _bits(blocks[..., 2:6])), 0, -16
    ),
    7: StoredType(  # Q5_1
        32,
        24,
        UINT5,
        lambda blocks: _with_fifths(_nibbles(blocks[..., 8:], 16), _bits(blocks[..., 4:8])),
        0,
        min=2,
        sign=-1,
    ),
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
        256,
        144,
        UINT4,
        lambda blocks: _nibbles(blocks[..., 16:], 32),
        0,
        scales=_six_bits(0),
        min=2,
        mins=_six_bits(4),
    ),
    13: StoredType(256, 176, UINT5, _q5_k, 0, scales=_six_bits(0), min=2, mins=_six_bits(4)),  # Q5_K
    14: StoredType(256, 210, UINT6, _q6_k, 208, -32, scales=_int8(192, 208), group=16),  # Q6_K
}
