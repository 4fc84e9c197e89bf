"""The types of ggml whose codes are places in grids: words of eight codes, each a size and a sign, and their scales.

A place in a grid stands for the sizes of four or eight numbers. The package gguf has the grids, and is imported only
where a file has such a type. The layouts are those of ggml (`ggml-common.h` and `ggml-quants.c`).
"""

from functools import cache

import numpy as np

_ALL_NEGATIVE = 0x88888888
_BYTE, _HALF = np.uint8, np.uint16


def words_of_iq2_xxs(blocks: np.ndarray) -> np.ndarray:
    """Returns those of 256 numbers: for 32 there are four places of a byte, and four times seven bits of signs."""
    places, others = _pairs_of_iq2_xxs(blocks)
    places = np.ascontiguousarray(places).view(_BYTE).reshape(*blocks.shape[:-1], 8, 4)
    return _grid("IQ2_XXS")[places].reshape(*blocks.shape[:-1], 32) | _signs_of_seven(others)


def scales_of_iq2_xxs(blocks: np.ndarray) -> np.ndarray:
    return _odd(_pairs_of_iq2_xxs(blocks)[1] >> 28)


def words_of_iq2_xs(blocks: np.ndarray) -> np.ndarray:
    """Returns those of 256 numbers: for eight there are a place of nine bits and seven bits of signs."""
    halves = _as(blocks, 2, 66, _HALF)
    return _grid("IQ2_XS")[halves & 511] | _signs()[_seven_signs()[halves >> 9]]


def scales_of_iq2_xs(blocks: np.ndarray) -> np.ndarray:
    return _odd(_nibbles(blocks[..., 66:74]))


def words_of_iq2_s(blocks: np.ndarray) -> np.ndarray:
    """Returns those of 256 numbers: for eight there are a place of ten bits, whose upper two lie apart, and signs."""
    high = _fields(blocks[..., 66:74], 2, 4).astype(_HALF)
    return _grid("IQ2_S")[blocks[..., 2:34] | high << 8] | _signs()[blocks[..., 34:66]]


def scales_of_iq2_s(blocks: np.ndarray) -> np.ndarray:
    return _odd(_nibbles(blocks[..., 74:82]))


def words_of_iq3_xxs(blocks: np.ndarray) -> np.ndarray:
    """Returns those of 256 numbers: for eight there are two places of a byte, and seven bits of signs."""
    return _of_fours("IQ3_XXS", blocks[..., 2:66]) | _signs_of_seven(_as(blocks, 66, 98, np.uint32))


def scales_of_iq3_xxs(blocks: np.ndarray) -> np.ndarray:
    return _odd(_as(blocks, 66, 98, np.uint32) >> 28)


def words_of_iq3_s(blocks: np.ndarray) -> np.ndarray:
    """Returns those of 256 numbers: for four there are a place of nine bits, whose highest lies apart, and signs."""
    high = _fields(blocks[..., 66:74], 1, 8).astype(_HALF)
    return _of_fours("IQ3_S", blocks[..., 2:66] | high << 8) | _signs()[blocks[..., 74:106]]


def scales_of_iq3_s(blocks: np.ndarray) -> np.ndarray:
    return _odd(_nibbles(blocks[..., 106:110]))


def words_of_iq1_s(blocks: np.ndarray) -> np.ndarray:
    """Returns those of 256 numbers: for eight there is a place of 11 bits, and for 32 a sign of what is added."""
    halves = _as(blocks, 34, 50, _HALF)
    high = halves[..., None] >> np.arange(0, 12, 3, dtype=_HALF) & 7
    places = blocks[..., 2:34] | high.reshape(*blocks.shape[:-1], 32) << 8
    return _grid("IQ1_S")[places] | np.repeat(_if_negative(halves >> 15), 4, axis=-1)


def scales_of_iq1_s(blocks: np.ndarray) -> np.ndarray:
    return _odd(_as(blocks, 34, 50, _HALF) >> 12 & 7)


def words_of_iq1_m(blocks: np.ndarray) -> np.ndarray:
    """Returns those of 256 numbers: for eight there are a place of 11 bits and a sign of what is added to them."""
    high = _nibbles(blocks[..., 32:48])
    return _grid("IQ1_M")[blocks[..., :32] | (high & 7).astype(_HALF) << 8] | _if_negative(high >> 3)


def scales_of_iq1_m(blocks: np.ndarray) -> np.ndarray:
    scales = _as(blocks, 48, 56, _HALF)[..., None] >> np.arange(0, 12, 3, dtype=_HALF) & 7
    return _odd(scales.reshape(*blocks.shape[:-1], 16))


def factors_of_iq1_m(blocks: np.ndarray) -> np.ndarray:
    """Returns the number in half precision of each block, of which four words have four bits each, as f32."""
    parts = _as(blocks, 48, 56, _HALF) >> 12 << np.arange(0, 16, 4, dtype=_HALF)
    return np.bitwise_or.reduce(parts, axis=-1, keepdims=True).view(np.float16).astype(np.float32)


def _as(blocks: np.ndarray, begin: int, end: int, dtype: type[np.number]) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., begin:end]).view(dtype)


def _pairs_of_iq2_xxs(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the words u32 [.., 8] of places and those of signs and scales."""
    words = _as(blocks, 2, 66, np.uint32)
    return words[..., ::2], words[..., 1::2]


def _fields(data: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Returns the numbers that each byte has, the first in the lowest bits."""
    moves = np.arange(0, bits * count, bits, dtype=_BYTE)
    return (data[..., None] >> moves & (2**bits - 1)).reshape(*data.shape[:-1], -1)


def _nibbles(data: np.ndarray) -> np.ndarray:
    return _fields(data, 4, 2)


def _odd(numbers: np.ndarray) -> np.ndarray:
    """Returns the scales 2 n + 1 of the numbers n of groups."""
    return (2 * numbers + 1).astype(np.int8)


def _of_fours(name: str, places: np.ndarray) -> np.ndarray:
    """Returns the words of a grid whose places stand for four numbers each."""
    found = _grid(name)[places]
    return found[..., ::2] | found[..., 1::2] << 4


def _signs_of_seven(words: np.ndarray) -> np.ndarray:
    """Returns words of signs, of which each of `words` has four times seven bits: signs of eight are an even number."""
    sevens = words[..., None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127
    return _signs()[_seven_signs()[sevens.reshape(*words.shape[:-1], -1)]]


def _if_negative(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32) * np.uint32(_ALL_NEGATIVE)


@cache
def _grid(name: str) -> np.ndarray:
    """Returns the words of all places of a grid: byte i has the size number i, and number 4 + i in its high half."""
    from gguf import quants

    kind = getattr(quants, name)
    kind.init_grid()
    return _words(np.searchsorted(kind.grid_map, kind.grid[0, 0]))


@cache
def _seven_signs() -> np.ndarray:
    """Returns the eight signs of seven stored ones: the number of negative ones is even."""
    sevens = np.arange(128, dtype=_BYTE)
    return sevens | (np.bitwise_count(sevens) & 1) << 7


@cache
def _signs() -> np.ndarray:
    """Returns the words of eight signs, by a byte of these: the highest bit of a code is its sign."""
    return _words(_fields(np.arange(256, dtype=_BYTE)[:, None], 1, 8)) << 3


def _words(codes: np.ndarray) -> np.ndarray:
    """Returns the words u32 of up to eight codes [.., 8]."""
    number = np.arange(codes.shape[-1], dtype=np.uint32)
    return np.bitwise_or.reduce(codes.astype(np.uint32) << (number % 4 * 8 + number // 4 * 4), axis=-1)
