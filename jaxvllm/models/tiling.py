"""Describes an array by the origin of each of its parts, so that any part can be read without the rest."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from jaxvllm.cores import num_cores
from jaxvllm.models.declaration import ParamDecl

_MOST_THREADS = 8
# `fill(out, start)` writes into `out` the part of an array that begins at `start` and is shaped like `out`.
Fill = Callable[[np.ndarray, tuple[int, ...]], None]


@dataclass(frozen=True)
class Box:
    """A part of an array: a range along each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.start) == len(self.shape), (self.start, self.shape)

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        """Returns the box of a whole array of this shape."""
        return cls((0,) * len(shape), shape)

    @classmethod
    def of_index(cls, index: tuple[slice, ...], shape: tuple[int, ...]) -> "Box":
        """Returns the part of an array of this shape that `index`, a slice for each dimension, selects."""
        ranges = [part.indices(size) for part, size in zip(index, shape, strict=True)]
        return cls(tuple(start for start, _, _ in ranges), tuple(stop - start for start, stop, _ in ranges))

    @property
    def stop(self) -> tuple[int, ...]:
        return _added(self.start, self.shape)

    def moved(self, offset: tuple[int, ...]) -> "Box":
        """Returns this box with `offset` added to its start."""
        return Box(_added(self.start, offset), self.shape)

    def overlap(self, other: "Box") -> "Box | None":
        """Returns the part that lies in both boxes, or None when there is none."""
        start = tuple(map(max, self.start, other.start))
        stop = map(min, self.stop, other.stop)
        shape = tuple(b - a for a, b in zip(start, stop, strict=True))
        return Box(start, shape) if all(size > 0 for size in shape) else None

    def pieces(self, most: int) -> Iterator["Box"]:
        """Yields boxes of at most so many elements that are this box together, cut along its first axes."""
        size = math.prod(self.shape)
        if size <= most:
            yield self
            return
        axis = next(i for i, length in enumerate(self.shape) if length > 1)
        length = self.shape[axis]
        rows = max(1, most * length // size)
        for first in range(0, length, rows):
            start, shape = list(self.start), list(self.shape)
            start[axis] += first
            shape[axis] = min(rows, length - first)
            yield from Box(tuple(start), tuple(shape)).pieces(most)

    def index(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """Returns this box as an index into the array that begins at `origin`."""
        ranges = zip(self.start, origin, self.shape, strict=True)
        return tuple(slice(start - first, start - first + size) for start, first, size in ranges)


@dataclass(frozen=True)
class Tile:
    """A part of an array whose elements come from another array, where this part begins at `origin`."""

    box: Box
    fill: Fill  # of the other array
    origin: tuple[int, ...]


def spread_boxes(stored: ParamDecl, spread: ParamDecl) -> list[tuple[Box, tuple[int, ...]]]:
    """Returns the boxes of an array that is spread over devices, and where each begins in the stored array.

    KV heads are copied, and their query heads are shared out among the copies. The zeros that fill up query heads and
    vocabulary have no box.
    """
    if stored.heads is None or stored.shape == spread.shape:
        return [(Box.whole(stored.shape), (0,) * len(stored.shape))]
    assert spread.heads is not None, "a spread array has the same heads, fewer in each group"
    return list(_columns_of_heads(stored, spread) if "heads" in stored.axes else _rows_of_heads(stored, spread))


def _shares(group: int, share: int, num_kv_heads: int, copies: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields, for each copy of each KV head: its place, the KV head, its first query head, and how many it has."""
    for place in range(num_kv_heads * copies):
        head, copy = divmod(place, copies)
        first = min(copy * share, group)
        yield place, head, first, min(share, group - first)


def _rows_of_heads(stored: ParamDecl, spread: ParamDecl) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Yields the boxes of an array [K, rows, ...], with each KV head's query heads first."""
    assert stored.heads and spread.heads
    size, own, group, share = stored.heads.size, stored.heads.own, stored.heads.group, spread.heads.group
    num_kv_heads, tail = stored.shape[0], stored.shape[2:]
    zeros = (0,) * len(tail)
    for place, head, first, count in _shares(group, share, num_kv_heads, spread.shape[0] // num_kv_heads):
        yield Box((place, 0, *zeros), (1, count * size, *tail)), (head, first * size, *zeros)
        yield Box((place, share * size, *zeros), (1, own, *tail)), (head, group * size, *zeros)


def _columns_of_heads(stored: ParamDecl, spread: ParamDecl) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Yields the boxes of an array [E, query heads of every KV head]."""
    assert stored.heads and spread.heads
    size, group, share = stored.heads.size, stored.heads.group, spread.heads.group
    E, num_kv_heads = stored.shape[0], stored.shape[1] // (group * size)
    copies = spread.shape[1] // (num_kv_heads * share * size)
    for place, head, first, count in _shares(group, share, num_kv_heads, copies):
        yield Box((0, place * share * size), (E, count * size)), (0, (head * group + first) * size)


def copied(array: np.ndarray) -> Fill:
    """Returns a function that fills with the values of `array`, cast to the dtype of its target."""

    def fill(out: np.ndarray, start: tuple[int, ...]) -> None:
        out[...] = array[Box(start, out.shape).index((0,) * len(start))]

    return fill


def tiled(tiles: Sequence[Tile]) -> Fill:
    """Returns a function that fills with the tiles, which do not overlap, and leaves alone all that no tile covers."""
    # The experts of one layer of DeepSeek V3 are 512 tiles along the first axis, and are filled in 7,000 pieces.
    along = sorted(tiles, key=lambda tile: tile.box.start[:1])
    firsts = [tile.box.start[:1] for tile in along]
    longest = max((tile.box.shape[0] for tile in tiles if tile.box.shape), default=1)

    def fill(out: np.ndarray, start: tuple[int, ...]) -> None:
        wanted = Box(start, out.shape)
        before = bisect_right(firsts, tuple(first - longest for first in wanted.start[:1])) if wanted.shape else 0
        after = bisect_left(firsts, wanted.stop[:1]) if wanted.shape else len(along)
        for tile in along[before:after]:
            if common := wanted.overlap(tile.box):
                offset = tuple(a - b for a, b in zip(tile.origin, tile.box.start, strict=True))
                tile.fill(out[common.index(start)], common.moved(offset).start)

    return fill


def by_threads(fill: Fill, piece: int) -> Fill:
    """Returns the function that lets threads fill pieces of so many elements, as many as there are cores, 8 at most."""

    def in_pieces(out: np.ndarray, start: tuple[int, ...]) -> None:
        pieces = list(Box(start, out.shape).pieces(piece))
        if len(pieces) == 1:  # starting a thread takes as long as decoding 100,000 numbers
            fill(out, start)
            return
        with ThreadPoolExecutor(min(_MOST_THREADS, num_cores(), len(pieces))) as threads:
            # `list` raises what a thread has raised.
            list(threads.map(lambda box: fill(out[box.index(start)], box.start), pieces))

    return in_pieces


def _added(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Makes zeros that begin at a multiple of 64 bytes: XLA on CPU uses such an array in place and copies others."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.zeros(size + 64, np.uint8)
    first = -buffer.ctypes.data % 64
    return buffer[first : first + size].view(dtype).reshape(shape)
