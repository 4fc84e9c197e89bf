"""`ShapedPart`: the values of a tensor with their shape, and the tensors that can be made of such values.

Whatever is made, only those parts of the stored tensors are read that a box of it needs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from jaxvllm.models.published.parts import Part, turned
from jaxvllm.models.tiling import Box


@dataclass(frozen=True, eq=False)
class ShapedPart:
    """The values of a tensor of this shape."""

    part: Part
    shape: tuple[int, ...]

    @property
    def turned(self) -> "ShapedPart":
        """The transpose of each matrix."""
        return ShapedPart(turned(self.part), (*self.shape[:-2], self.shape[-1], self.shape[-2]))

    def mapped(self, function: Callable[[np.ndarray], np.ndarray]) -> "ShapedPart":
        """Returns what `function` makes of each value."""
        return ShapedPart(lambda box: function(self.part(box)), self.shape)

    def ordered(self, axis: int, places: np.ndarray) -> "ShapedPart":
        """Returns a tensor whose element i along an axis is that at `places[i]` here. Neighbours are read together.

        Raises ValueError unless there are as many places as elements.
        """
        if self.shape[axis] != len(places):
            raise ValueError(f"a tensor of shape {self.shape} should have {len(places)} elements along axis {axis}")

        def values(box: Box) -> np.ndarray:
            own = places[box.start[axis] : box.stop[axis]]
            first, stop = int(own.min()), int(own.max()) + 1
            if stop - first <= 2 * len(own):
                return np.take(self.part(_cut(box, axis, first, stop)), own - first, axis)
            runs = np.split(own, np.flatnonzero(np.diff(own) != 1) + 1)
            found = [self.part(_cut(box, axis, int(run[0]), int(run[-1]) + 1)) for run in runs]
            return np.concatenate(found, axis)

        return ShapedPart(values, self.shape)

    @property
    def merged(self) -> "ShapedPart":
        """The same values with the first two of three axes as one."""
        count, rows, columns = self.shape

        def values(box: Box) -> np.ndarray:
            found = []
            for number in range(box.start[0] // rows, -(-box.stop[0] // rows)):
                first, stop = max(box.start[0] - number * rows, 0), min(box.stop[0] - number * rows, rows)
                own = Box((number, first, box.start[1]), (1, stop - first, box.shape[1]))
                found.append(self.part(own)[0])
            return np.concatenate(found)

        return ShapedPart(values, (count * rows, columns))

    @property
    def flat(self) -> "ShapedPart":
        """The same values as a vector. They are read whole."""

        def values(box: Box) -> np.ndarray:
            return self.part(Box.whole(self.shape)).reshape(-1)[box.index((0,))]

        return ShapedPart(values, (math.prod(self.shape),))

    def reshaped(self, shape: tuple[int, ...]) -> "ShapedPart | None":
        """Returns the same values in another shape that differs in axes of one element alone, or None."""
        here, there = ([axis for axis, size in enumerate(one) if size != 1] for one in (self.shape, shape))
        if [self.shape[axis] for axis in here] != [shape[axis] for axis in there]:
            return None

        def values(box: Box) -> np.ndarray:
            start, size = [0] * len(self.shape), [1] * len(self.shape)
            for ours, theirs in zip(here, there, strict=True):
                start[ours], size[ours] = box.start[theirs], box.shape[theirs]
            return self.part(Box(tuple(start), tuple(size))).reshape(box.shape)

        return ShapedPart(values, shape)


def concatenated(parts: Sequence[ShapedPart], axis: int) -> ShapedPart:
    """Returns the values of all parts, one after another along an axis. Raises ValueError if they do not fit."""
    shapes = [list(part.shape) for part in parts]
    if any(len(shape) <= axis for shape in shapes):
        raise ValueError(f"tensors of the shapes {' and '.join(str(part.shape) for part in parts)} lack an axis")
    ends = list(accumulate(shape.pop(axis) for shape in shapes))
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"tensors of the shapes {' and '.join(str(part.shape) for part in parts)} are no one tensor")

    def values(box: Box) -> np.ndarray:
        found = []
        for part, end in zip(parts, ends, strict=True):
            begin = end - part.shape[axis]
            first, stop = max(box.start[axis] - begin, 0), min(box.stop[axis] - begin, part.shape[axis])
            if first < stop:
                found.append(part.part(_cut(box, axis, first, stop)))
        return np.concatenate(found, axis)

    shape = parts[0].shape
    return ShapedPart(values, (*shape[:axis], ends[-1], *shape[axis + 1 :]))


def _cut(box: Box, axis: int, first: int, stop: int) -> Box:
    """Returns the box with another range along an axis."""
    start, shape = list(box.start), list(box.shape)
    start[axis], shape[axis] = first, stop - first
    return Box(tuple(start), tuple(shape))
