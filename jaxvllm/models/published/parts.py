"""Computes any part of a matrix from the parts of stored tensors that it needs, and from no others.

Where a part is made of codes of few bits and of scales by group, it says so: forms keep these as they are.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxvllm.models.tiling import Box
from pallas_kernels.quantized_matmul.code import BYTES, E4M3, FLOAT4, FP4, INT8, NF4, UINT4, UINT5, UINT6, Code

# Returns the values of a box of a matrix: a new array f32 of the shape of the box.
Part = Callable[[Box], np.ndarray]
# For each axis, how many elements in a row are a group, or the number of the group of each element.
Sized = tuple[int | np.ndarray, ...]


@dataclass(frozen=True, eq=False)
class Stored:
    """The values that an array has."""

    array: np.ndarray

    def __call__(self, box: Box) -> np.ndarray:
        part = self.array[box.index((0,) * self.array.ndim)]
        return _looked_up(part, _bytes_of(self.array.dtype)) if self.array.itemsize == 1 else part.astype(np.float32)


@dataclass(frozen=True, eq=False)
class Typed:
    """Values that `dtype` holds as they are, as if an array of it had them."""

    part: Part
    dtype: str

    def __call__(self, box: Box) -> np.ndarray:
        return self.part(box)


@dataclass(frozen=True, eq=False)
class Codes:
    """The values of codes, to each of which `added` is added.

    read: returns the codes of a box, one in each byte
    words, high_words: return the lower and the upper bits of several codes as a word u32, as `CodePanels` has them, for
        a box of a matrix with one number for these codes
    """

    code: Code
    read: Part
    added: int = 0
    words: Part | None = None
    high_words: Part | None = None

    def __call__(self, box: Box) -> np.ndarray:
        return _looked_up(self.read(box), self.code.table + np.float32(self.added))


@dataclass(frozen=True, eq=False)
class ByGroup:
    """The value of the group of each element, of which the last group of an axis may have fewer than others.

    groups: for each axis, how many elements in a row are a group, or the number of the group of each element
    factor: by which the values of `part` are multiplied
    """

    part: Part
    groups: Sized
    factor: np.float32 = np.float32(1)

    @property
    def dtype(self) -> str:
        """The dtype that holds all values of `part`."""
        return _dtype_of(self.part)

    def __call__(self, box: Box) -> np.ndarray:
        start, shape, places = list(box.start), list(box.shape), []
        for axis, (first, stop, group) in enumerate(zip(box.start, box.stop, self.groups, strict=True)):
            if isinstance(group, np.ndarray) or group > 1:
                own = group[first:stop] if isinstance(group, np.ndarray) else np.arange(first, stop) // group
                start[axis] = int(own.min())
                shape[axis] = int(own.max()) - start[axis] + 1
                places.append((axis, own - start[axis]))
        found = self.part(Box(tuple(start), tuple(shape)))
        found = found if self.factor == 1 else found * self.factor
        # The last axis comes first: then rows are copied whole.
        for axis, own in reversed(places):
            found = np.take(found, own, axis)
        return found


@dataclass(frozen=True, eq=False)
class ScaledCodes:
    """The values (codes - zeros) * scales - mins. Without `zeros` and `mins`, these are 0.

    Scales may be multiplied by `factors` before, and mins by `min_factors`.

    input_scale: what stands for the code 1 where tokens are rounded to the same code; None: nothing says it
    """

    codes: Codes
    scales: ByGroup
    zeros: ByGroup | None
    factors: ByGroup | None = None
    mins: ByGroup | None = None
    min_factors: ByGroup | None = None
    input_scale: np.float32 | None = field(default=None, kw_only=True)

    def __call__(self, box: Box) -> np.ndarray:
        scales = self.scales if self.factors is None else _product(self.scales, self.factors)
        found = _scaled(self.codes, scales, self.zeros, box)
        if self.mins is not None:
            mins = self.mins if self.min_factors is None else _product(self.mins, self.min_factors)
            found -= mins(box)
        return found

    def group_along(self, axis: int) -> int | None:
        """Returns how many elements in a row have one scale and one zero or minimum, or None if that differs."""
        return self._size_along(axis, self.scales, self.zeros, self.mins)

    def span_along(self, axis: int) -> int | None:
        """Returns how many elements in a row have one factor, or None if that differs, or there are no factors."""
        return None if self.factors is None else self._size_along(axis, self.factors, self.min_factors)

    def sorted_along(self, axis: int) -> "tuple[np.ndarray, ScaledCodes] | None":
        """Returns an order of the elements in which those of a group follow each other, and the matrix in that order.

        Returns None where groups are not told element by element, or have several sizes. The last may be smaller.
        """
        groups = self.scales.groups[axis]
        zeros = groups if self.zeros is None else self.zeros.groups[axis]
        has_others = any(one is not None for one in (self.factors, self.mins))
        if isinstance(groups, int) or has_others or not np.array_equal(zeros, groups):
            return None
        order, size = np.argsort(groups, stable=True), int(np.count_nonzero(groups == 0))
        if not size or not np.array_equal(groups[order], np.arange(len(order)) // size):
            return None

        def along(values: Sequence[int | np.ndarray], of_axis: int | np.ndarray) -> Sized:
            return *values[:axis], of_axis, *values[axis + 1 :]

        read = by_group(self.codes.read, along([1] * len(self.scales.groups), order))
        codes = Codes(self.codes.code, read, self.codes.added)
        return order, self._mapped(codes, lambda values: replace(values, groups=along(values.groups, size)))

    def with_rows(self, rows: np.ndarray) -> "ScaledCodes":
        """Returns the matrix whose rows are these rows of this one."""

        def change(part: Part) -> Part:
            return by_group(part, (rows, 1))

        codes, words = self.codes, (self.codes.words, self.codes.high_words)
        changed = Codes(codes.code, change(codes.read), codes.added, *(one and change(one) for one in words))
        return self._mapped(changed, lambda values: replace(values, part=change(values.part)))

    @property
    def turned(self) -> "ScaledCodes":
        """The transpose."""
        codes = Codes(self.codes.code, turned(self.codes.read), self.codes.added)

        def changed(values: ByGroup) -> ByGroup:
            return replace(values, part=turned(values.part), groups=_swapped(values.groups))

        return self._mapped(codes, changed)

    def _mapped(self, codes: Codes, change: Callable[[ByGroup], ByGroup]) -> "ScaledCodes":
        others = (self.zeros, self.factors, self.mins, self.min_factors)
        changed = ScaledCodes(codes, change(self.scales), *(one and change(one) for one in others))
        return replace(changed, input_scale=self.input_scale)

    @staticmethod
    def _size_along(axis: int, *values: ByGroup | None) -> int | None:
        sizes = [value.groups[axis] for value in values if value is not None]
        alike = all(np.array_equal(sizes[0], size) for size in sizes)
        return sizes[0] if alike and isinstance(sizes[0], int) else None


def stored(array: np.ndarray) -> Part:
    """Returns the values that `array` has."""
    if (code := BYTES.get(array.dtype)) is None:
        return Stored(array)
    origin = (0,) * array.ndim
    return Codes(code, lambda box: array[box.index(origin)])


def unpacked(words: np.ndarray, table: np.ndarray, order: Sequence[int] = ()) -> Part:
    """Returns the values that integers of one byte or four stand for, several in each along the last axis.

    table: f32[256, elements in a byte], the values of a byte, whose lowest bits come first
    order: the place in a word of each of its elements, if it is another one
    """
    bits = 8 // table.shape[1]
    first = float(table[0, 0])
    bytes_ = np.arange(256)[:, None] >> np.arange(0, 8, bits) & 2**bits - 1
    if first.is_integer() and abs(first) < 256 and np.array_equal(table, integers(bits, int(first))):
        added = int(first)
        if bits == 8:
            return Codes(INT8, _elements(words, (bytes_ - 128).astype(np.int8), order), added + 128)
        return Codes(UINT4, _elements(words, bytes_.astype(np.uint8), order), added)
    for code in (FLOAT4, NF4, FP4) if bits == 4 else ():
        for halves in (bytes_, bytes_[:, ::-1]):
            if np.array_equal(table, code.table[halves]):
                return Codes(code, _elements(words, halves.astype(np.uint8), order))
    return _elements(words, table, order)


def _elements(words: np.ndarray, table: np.ndarray, order: Sequence[int]) -> Part:
    """Returns the elements of `unpacked`, in the dtype of `table`."""
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


def bit_fields(data: np.ndarray, bits: int) -> Codes:
    """Returns the unsigned integers of `bits` bits that u8[.., bytes] has in each row, lowest bits first, without gaps.

    Bits of one integer may lie in two bytes. `bits` is at most 6.
    """
    code = UINT4 if bits <= UINT4.bits else {5: UINT5, 6: UINT6}[bits]
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
        return found[..., skipped : skipped + wanted].astype(np.uint8)

    return Codes(code, values)


def integers(bits: int, added: int = 0) -> np.ndarray:
    """Returns the table of bytes that hold integers of 2, 4 or 8 bits, to each of which `added` is added."""
    shifts = np.arange(0, 8, bits)
    return (((np.arange(256)[:, None] >> shifts) & (2**bits - 1)) + added).astype(np.float32)


def turned(part: Part) -> Part:
    """Returns the transpose of each matrix."""
    if isinstance(part, ScaledCodes):
        return part.turned
    if isinstance(part, Stored):
        return Stored(part.array.swapaxes(-1, -2))
    if isinstance(part, Typed):
        return Typed(turned(part.part), part.dtype)
    return lambda box: part(Box(_swapped(box.start), _swapped(box.shape))).swapaxes(-1, -2)


def in_rows(flat: Part, columns: int) -> Part:
    """Returns the rows of `columns` numbers each that the only row of `flat` has one after another."""

    def values(box: Box) -> np.ndarray:
        (row, first), (rows, wanted) = box.start, box.shape
        found = flat(Box((0, row * columns), (1, rows * columns))).reshape(rows, columns)
        return np.ascontiguousarray(found[:, first : first + wanted])

    return values


def alternating(parts: Sequence[Part], axis: int) -> Part:
    """Returns values of which each part has every so many along an axis, in turn."""
    return _in_turn(parts, axis, np.dtype(np.float32))


def alternating_codes(parts: Sequence[ScaledCodes], axis: int) -> ScaledCodes | None:
    """Returns the same of codes and scales, or None if parts have them in different ways, or more than these."""
    first = parts[0]
    if any((one.factors, one.mins, one.zeros, one.input_scale) != (None,) * 4 for one in parts):
        return None
    kinds = {(one.codes.code, one.codes.added, one.scales.dtype, one.scales.factor, one.scales.groups) for one in parts}
    if len(kinds) > 1 or first.scales.groups[axis] != 1:
        return None
    code, scales = first.codes.code, first.scales
    codes = _in_turn([one.codes.read for one in parts], axis, np.dtype(code.dtype))
    of_groups = _in_turn([one.scales.part for one in parts], axis, np.dtype(np.float32))
    return ScaledCodes(
        Codes(code, codes, first.codes.added), replace(scales, part=Typed(of_groups, scales.dtype)), None
    )


def _in_turn(parts: Sequence[Part], axis: int, dtype: np.dtype) -> Part:
    count = len(parts)

    def values(box: Box) -> np.ndarray:
        out = np.empty(box.shape, dtype)
        for number, part in enumerate(parts):
            # The elements of this part that the box has.
            first, stop = (-(-(end - number) // count) for end in (box.start[axis], box.stop[axis]))
            if first < stop:
                start, shape, index = list(box.start), list(box.shape), [slice(None)] * len(box.shape)
                start[axis], shape[axis] = first, stop - first
                index[axis] = slice(first * count + number - box.start[axis], None, count)
                out[tuple(index)] = part(Box(tuple(start), tuple(shape)))
        return out

    return values


def by_group(part: Part, groups: Sequence[int | np.ndarray], factor: float = 1) -> ByGroup:
    """Returns the value of the group of each element times a factor, for groups as `ByGroup` has them."""
    return ByGroup(part, tuple(groups), np.float32(factor))


def scaled(values: Part, scales: Part, zeros: Part | None = None) -> Part:
    """Returns (values - zeros) * scales. Without `zeros`, these are 0."""
    if isinstance(values, Codes) and isinstance(scales, ByGroup) and (zeros is None or isinstance(zeros, ByGroup)):
        return ScaledCodes(values, scales, zeros)
    return lambda box: _scaled(values, scales, zeros, box)


def added(values: Part, others: Part) -> Part:
    """Returns values + others."""

    def total(box: Box) -> np.ndarray:
        found = values(box)  # a new array, which may be changed
        found += others(box)
        return found

    return total


def _scaled(values: Part, scales: Part, zeros: Part | None, box: Box) -> np.ndarray:
    found = values(box)  # a new array, which may be changed
    if zeros is not None:
        found -= zeros(box)
    found *= scales(box)
    return found


def _dtype_of(part: Part) -> str:
    if isinstance(part, Typed):
        return part.dtype
    if isinstance(part, Codes) and part.code == E4M3 and not part.added:
        return E4M3.name
    if isinstance(part, ByGroup) and part.factor == 1:
        return _dtype_of(part.part)
    return part.array.dtype.name if isinstance(part, Stored) else "float32"


def _bytes_of(dtype: np.dtype) -> np.ndarray:
    """Returns the values of all bytes, f32[256]."""
    return np.arange(256).astype(np.uint8).view(dtype).astype(np.float32)


def _looked_up(array: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Returns the values of an array of bytes, by a table f32[256]."""
    # A cast from FP8 takes three times as long as a look-up (42 ms and 15 for 4 million values).
    return table[array.view(np.uint8)]


def _product(one: Part, other: Part) -> Part:
    return lambda box: one(box) * other(box)


def _swapped[Size](sizes: tuple[Size, ...]) -> tuple[Size, ...]:
    return (*sizes[:-2], sizes[-1], sizes[-2])
