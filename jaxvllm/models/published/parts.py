"""Computes any part of a matrix from the parts of stored tensors that it needs, and from no others."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxvllm.models.tiling import Box

# Returns the values of a box of a matrix: a new array f32 of the shape of the box.
Part = Callable[[Box], np.ndarray]


def stored(array: np.ndarray) -> Part:
    """Returns the values that `array` has."""
    origin = (0,) * array.ndim
    if array.itemsize > 1:
        return lambda box: array[box.index(origin)].astype(np.float32)
    # A cast from FP8 takes three times as long as a look-up (42 ms and 15 for 4 million values).
    table = np.arange(256).astype(np.uint8).view(array.dtype).astype(np.float32)
    return lambda box: table[array[box.index(origin)].view(np.uint8)]


def unpacked(words: np.ndarray, table: np.ndarray, order: Sequence[int] = ()) -> Part:
    """Returns the values that integers of one byte or four stand for, several in each along the last axis.

    table: f32[256, elements in a byte], the values of a byte, whose lowest bits come first
    order: the place in a word of each of its elements, if it is another one
    """
    count = words.itemsize * table.shape[1]

    def values(box: Box) -> np.ndarray:
        (*start, first), (*shape, wanted) = box.start, box.shape
        begin, end = first // count, -(-(first + wanted) // count)
        part = words[Box((*start, begin), (*shape, end - begin)).index((0,) * words.ndim)]
        found = np.take(table, np.ascontiguousarray(part).view(np.uint8), axis=0).reshape(*shape, -1, count)
        if order:
            found = found[..., order]
        skipped = first - begin * count
        return found.reshape(*shape, -1)[..., skipped : skipped + wanted]

    return values


def bit_fields(data: np.ndarray, bits: int) -> Part:
    """Returns the unsigned integers of `bits` bits that u8[.., bytes] has in each row, lowest bits first, without gaps.

    Bits of one integer may lie in two bytes. `bits` is at most 8.
    """
    size = math.lcm(8, bits) // 8  # so many bytes hold a whole number of integers
    count = 8 * size // bits
    shifts = np.arange(count, dtype=np.uint64) * np.uint64(bits)

    def values(box: Box) -> np.ndarray:
        (*start, first), (*shape, wanted) = box.start, box.shape
        begin, end = first // count, -(-(first + wanted) // count)
        part = data[Box((*start, begin * size), (*shape, (end - begin) * size)).index((0,) * data.ndim)]
        parts = part.reshape(*shape, end - begin, size).astype(np.uint64)
        whole = sum((parts[..., i] << np.uint64(8 * i) for i in range(1, size)), parts[..., 0])
        found = ((whole[..., None] >> shifts) & np.uint64(2**bits - 1)).reshape(*shape, -1)
        skipped = first - begin * count
        return found[..., skipped : skipped + wanted].astype(np.float32)

    return values


def integers(bits: int, added: int = 0) -> np.ndarray:
    """Returns the table of bytes that hold integers of 2, 4 or 8 bits, to each of which `added` is added."""
    shifts = np.arange(0, 8, bits)
    return (((np.arange(256)[:, None] >> shifts) & (2**bits - 1)) + added).astype(np.float32)


def turned(part: Part) -> Part:
    """Returns the transpose of each matrix."""

    def swapped(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return (*sizes[:-2], sizes[-1], sizes[-2])

    return lambda box: part(Box(swapped(box.start), swapped(box.shape))).swapaxes(-1, -2)


def in_rows(flat: Part, columns: int) -> Part:
    """Returns the rows of `columns` numbers each that the only row of `flat` has one after another."""

    def values(box: Box) -> np.ndarray:
        (row, first), (rows, wanted) = box.start, box.shape
        found = flat(Box((0, row * columns), (1, rows * columns))).reshape(rows, columns)
        return np.ascontiguousarray(found[:, first : first + wanted])

    return values


def by_group(part: Part, groups: Sequence[int | np.ndarray]) -> Part:
    """Returns the value of the group of each element, of which the last group of an axis may have fewer than others.

    groups: for each axis, how many elements in a row are a group, or the number of the group of each element
    """

    def values(box: Box) -> np.ndarray:
        start, shape, places = list(box.start), list(box.shape), []
        for axis, (first, stop, group) in enumerate(zip(box.start, box.stop, groups, strict=True)):
            if isinstance(group, np.ndarray) or group > 1:
                own = group[first:stop] if isinstance(group, np.ndarray) else np.arange(first, stop) // group
                start[axis] = int(own.min())
                shape[axis] = int(own.max()) - start[axis] + 1
                places.append((axis, own - start[axis]))
        found = part(Box(tuple(start), tuple(shape)))
        # The last axis comes first: then rows are copied whole.
        for axis, own in reversed(places):
            found = np.take(found, own, axis)
        return found

    return values


def scaled(values: Part, scales: Part, zeros: Part | None = None) -> Part:
    """Returns (values - zeros) * scales. Without `zeros`, these are 0."""

    def product(box: Box) -> np.ndarray:
        found = values(box)  # a new array, which may be changed
        if zeros is not None:
            found -= zeros(box)
        found *= scales(box)
        return found

    return product


def added(values: Part, others: Part) -> Part:
    """Returns values + others."""

    def total(box: Box) -> np.ndarray:
        found = values(box)  # a new array, which may be changed
        found += others(box)
        return found

    return total
