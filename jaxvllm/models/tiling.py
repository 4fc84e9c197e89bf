"""An array described by where each part of it comes from, so that any part can be read without the rest."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

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
        """All of an array of this shape."""
        return cls((0,) * len(shape), shape)

    @classmethod
    def of_index(cls, index: tuple[slice, ...], shape: tuple[int, ...]) -> "Box":
        """What `index`, a slice for each dimension, picks from an array of this shape."""
        ranges = [part.indices(size) for part, size in zip(index, shape, strict=True)]
        return cls(tuple(start for start, _, _ in ranges), tuple(stop - start for start, stop, _ in ranges))

    @property
    def stop(self) -> tuple[int, ...]:
        return _added(self.start, self.shape)

    def moved(self, offset: tuple[int, ...]) -> "Box":
        """This box, further up by `offset`."""
        return Box(_added(self.start, offset), self.shape)

    def overlap(self, other: "Box") -> "Box | None":
        """What lies in both boxes; None when nothing does."""
        start = tuple(map(max, self.start, other.start))
        stop = map(min, self.stop, other.stop)
        shape = tuple(b - a for a, b in zip(start, stop, strict=True))
        return Box(start, shape) if all(size > 0 for size in shape) else None

    def index(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """This box as an index into the array that begins at `origin`."""
        ranges = zip(self.start, origin, self.shape, strict=True)
        return tuple(slice(start - first, start - first + size) for start, first, size in ranges)


@dataclass(frozen=True)
class Tile:
    """A part of an array that is, element by element, the part of another array that begins at `origin`."""

    box: Box
    fill: Fill  # of the other array
    origin: tuple[int, ...]


def copied(array: np.ndarray) -> Fill:
    """Fills with the values of `array`, cast to the dtype of what is filled."""

    def fill(out: np.ndarray, start: tuple[int, ...]) -> None:
        out[...] = array[Box(start, out.shape).index((0,) * len(start))]

    return fill


def tiled(tiles: Sequence[Tile]) -> Fill:
    """Fills with the tiles, which do not overlap, and leaves alone what no tile covers."""

    def fill(out: np.ndarray, start: tuple[int, ...]) -> None:
        wanted = Box(start, out.shape)
        for tile in tiles:
            if common := wanted.overlap(tile.box):
                offset = tuple(a - b for a, b in zip(tile.origin, tile.box.start, strict=True))
                tile.fill(out[common.index(start)], common.moved(offset).start)

    return fill


def _added(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros that begin at a multiple of 64 bytes: XLA on CPU takes such an array as it is, any other it copies."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.zeros(size + 64, np.uint8)
    first = -buffer.ctypes.data % 64
    return buffer[first : first + size].view(dtype).reshape(shape)
