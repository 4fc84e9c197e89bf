"""`StoredCodes`: what a checkpoint stores of one of our matrices, whose parts may be several tensors."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from threading import Lock
from typing import Any

import numpy as np

from jaxvllm.models.forms.few_bits import ByElement, Elements, StoredAs
from jaxvllm.models.published.encoded_files import decoded
from jaxvllm.models.published.parts import ByGroup, Part, ScaledCodes
from jaxvllm.models.tiling import Box, Fill, Tile, tiled
from jaxvllm.models.weight_names import Source
from pallas_kernels.integer_matmul.code_panels import UNITS
from pallas_kernels.quantized_matmul.code import E4M3


@dataclass(frozen=True)
class Segments:
    """A matrix that is stored in several ways, one after another along an axis: so many elements in each way."""

    axis: int
    ways: tuple[tuple[int, StoredAs], ...]


@dataclass(frozen=True, eq=False)
class StoredCodes:
    """A matrix [.., in]. Each of its tensors fills the part of it that the source tells."""

    parts: tuple[tuple[Source, ScaledCodes], ...]

    def stored_as(self, inputs: int) -> StoredAs | Segments | None:
        """Returns how all parts of the matrix, which has so many `inputs`, are stored, or None if no form has all.

        The groups are those of our matrix: each has consecutive elements of a row, of which the last may have fewer.
        """
        if (found := self._in_order) is not None:
            _, in_order = found
            way = in_order.stored_as(inputs)
            return replace(way, is_sorted=True) if isinstance(way, StoredAs) else None
        ways = [_stored_as(source, codes, inputs) for source, codes in self.parts]
        return joined(ways, inputs) or _segments([source for source, _ in self.parts], ways, inputs)

    @property
    def _in_order(self) -> "tuple[np.ndarray, StoredCodes] | None":
        """An order of the inputs in which those of a group follow each other, and the parts in that order.

        None where they do so already, and where the parts have no order in common.
        """
        found: list[tuple[np.ndarray, tuple[Source, ScaledCodes]]] = []
        for source, codes in self.parts:
            place = _place_of_inputs(source)
            is_whole = place is not None and source.shape[place.axis] == source.view[-1] and not source.at[-1]
            in_order = codes.sorted_along(place.axis) if place is not None and is_whole else None
            if in_order is None or (found and not np.array_equal(found[0][0], in_order[0])):
                return None
            found.append((in_order[0], (source, in_order[1])))
        return found[0][0], StoredCodes(tuple(part for _, part in found))

    @property
    def elements(self) -> Elements:
        """The functions that fill parts of our matrix with what is stored of its elements."""
        if (found := self._in_order) is not None:
            order, in_order = found

            def of_inputs(out: np.ndarray, start: tuple[int, ...]) -> None:
                out[...] = order[start[0] : start[0] + len(out)]

            return replace(in_order.elements, order=of_inputs)

        def fill(part_of: Callable[[ScaledCodes], Part | None]) -> Fill:
            found = [(source, part) for source, codes in self.parts if (part := part_of(codes)) is not None]

            def of_groups(group: int) -> Fill | None:
                return _if_all(_tile_of_groups(source, part, group) for source, part in found)

            lock = Lock()

            @cache
            def whole() -> Fill:
                return tiled([_tile(source, part) for source, part in found])

            # A layer of 256 experts has 512 tiles, which take 36 us each to make. Few forms look at all elements, and
            # those that do look at one piece after another, in several threads.
            def of_elements(out: np.ndarray, start: tuple[int, ...]) -> None:
                with lock:
                    fill_whole = whole()
                fill_whole(out, start)

            return ByElement(of_elements, of_groups)

        parts = [(source, codes.codes, UNITS[codes.codes.code.bits]) for source, codes in self.parts]
        low = (_tile_of_words(source, codes.words, UNITS[4]) for source, codes, unit in parts if unit >= UNITS[4])
        high = (_tile_of_words(source, codes.high_words, unit) for source, codes, unit in parts if unit > UNITS[4])

        return Elements(
            fill(lambda codes: codes.codes.read),
            fill(lambda codes: codes.scales),
            fill(_zeros),
            fill(lambda codes: codes.factors),
            fill(lambda codes: codes.mins),
            fill(lambda codes: codes.min_factors),
            fill(lambda codes: partial(_filled_with, codes.scales.factor)),
            fill(lambda codes: None if codes.input_scale is None else partial(_filled_with, codes.input_scale)),
            _if_all(low),
            _if_all(high),
        )


def _filled_with(value: np.float32, box: Box) -> np.ndarray:
    return np.full(box.shape, value, np.float32)


def _tile(source: Source, part: Part) -> Tile:
    return Tile(Box(source.at, source.view), decoded(part, source), (0,) * len(source.at))


def _tile_of_groups(source: Source, part: Part, group: int) -> Tile | None:
    """Returns what fills with one value for each group of elements of a row, if groups of `part` consist of those."""
    narrow = _narrowed(source, group)
    if narrow is None or not isinstance(part, ByGroup) or not isinstance(size := part.groups[-1], int) or size % group:
        return None
    return _tile(narrow, replace(part, groups=(*part.groups[:-1], size // group)))


def _tile_of_words(source: Source, words: Part | None, unit: int) -> Tile | None:
    """Returns what fills with one of `words` for so many codes, if there are any and the rows are whole ones."""
    narrow = _narrowed(source, unit)
    return None if narrow is None or words is None else _tile(narrow, words)


def _narrowed(source: Source, group: int) -> Source | None:
    """Returns the source where so many elements of a row are one, if its rows are whole rows of the tensor."""
    sizes = (source.shape[-1], source.at[-1], source.view[-1])
    if source.is_turned or sizes[0] != sizes[2] or any(size % group for size in sizes):
        return None
    shape, at, view = ((*of[:-1], of[-1] // group) for of in (source.shape, source.at, source.view))
    return replace(source, shape=shape, at=at, view=view)


def _if_all(tiles: Iterable[Tile | None]) -> Fill | None:
    """Returns the function that fills with all tiles, or None where one is missing, or there are none."""
    found = list(tiles)
    known = [tile for tile in found if tile is not None]
    return tiled(known) if known and len(known) == len(found) else None


def joined(ways: Iterable[StoredAs | None], inputs: int) -> StoredAs | None:
    """Returns the way in which matrices of so many `inputs` can all be stored, if each is stored in one of `ways`."""
    found = list(ways)
    known = [way for way in found if way is not None]
    if not known or len(known) < len(found):
        return None
    if len({(way.code, way.span is None, way.has_mins, way.is_sorted) for way in known}) > 1:
        return None
    groups, dtypes = {way.group for way in known}, {way.scale_dtype for way in known}
    supers = [way.span for way in known if way.span is not None]
    return StoredAs(
        known[0].code,
        None if groups == {None} else math.gcd(*(inputs if size is None else size for size in groups)),
        dtypes.pop() if len(dtypes) == 1 else "float32",
        any(way.has_zeros for way in known),
        span=math.gcd(*supers) if supers else None,
        has_mins=known[0].has_mins,
        has_input_scale=all(way.has_input_scale for way in known),
        is_sorted=known[0].is_sorted,
    )


def _segments(sources: Sequence[Source], ways: Sequence[StoredAs | None], inputs: int) -> Segments | None:
    """Returns the ways of a matrix whose sources follow each other along one axis, and have all of the others."""
    known = [(source, way) for source, way in zip(sources, ways, strict=True) if way is not None]
    axes = [axis for axis, numbers in enumerate(zip(*(source.at for source in sources), strict=True)) if any(numbers)]
    if len(known) < len(ways) or len(axes) != 1 or axes == [len(sources[0].at) - 1]:
        return None
    [axis] = axes
    found: list[tuple[int, StoredAs]] = []
    for source, way in sorted(known, key=lambda one: one[0].at[axis]):
        if source.at[axis] != sum(size for size, _ in found):
            return None
        if found and (both := joined([found[-1][1], way], inputs)) is not None:
            found[-1] = (found[-1][0] + source.view[axis], both)
        else:
            found.append((source.view[axis], way))
    return Segments(axis, tuple(found))


@dataclass(frozen=True)
class _PlaceOfInputs:
    """The axis of a tensor that our matrix has as its inputs, and what `Source.steps` says of all axes."""

    axis: int
    start: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]


def _place_of_inputs(source: Source) -> _PlaceOfInputs | None:
    """Returns where the inputs of our matrix are in the tensor, or None if they do not follow each other there."""
    start, steps = source.steps()
    along = [axis for axis, step in enumerate(steps) if step[-1]]
    if len(along) != 1 or steps[along[0]][-1] != 1:
        return None
    return _PlaceOfInputs(along[0], start, steps)


def _stored_as(source: Source, codes: ScaledCodes, inputs: int) -> StoredAs | None:
    """Returns how the part of our matrix is stored that `source` tells."""
    code, added = codes.codes.code, codes.codes.added
    has_mins = codes.mins is not None
    has_zeros = not has_mins and (codes.zeros is not None or -added != code.zero)
    if has_zeros and code.name.startswith("float"):
        return None
    if (place := _place_of_inputs(source)) is None:
        return None
    axis, start, steps = place.axis, place.start, place.steps
    if (size := codes.group_along(axis)) is None:
        return None
    options: dict[str, Any] = {"has_zeros": has_zeros, "has_mins": has_mins}
    is_e4m3 = codes.scales.dtype == E4M3.name
    # No form has one minimum for a whole row.
    if size >= source.shape[axis] and source.view[-1] == inputs and not is_e4m3 and not has_mins:
        return StoredAs(code, None, codes.scales.dtype, **options, has_input_scale=codes.input_scale is not None)
    moves = [step for step, count in zip(steps[axis][:-1], source.view[:-1], strict=True) if count > 1]
    # After the last tensor of a row, nothing begins within a group.
    is_last = source.at[-1] + source.view[-1] == inputs
    group = math.gcd(size, start[axis], source.at[-1], 0 if is_last else source.view[-1], *moves)
    if codes.factors is None:
        # A row whose parts are several tensors has no scale of its own.
        is_split = is_e4m3 and source.view[-1] < inputs
        return StoredAs(code, group, "float32" if is_split else codes.scales.dtype, **options)
    if (above := codes.span_along(axis)) is None:
        return None
    span = math.gcd(above, inputs, start[axis], source.at[-1], source.view[-1], *moves)
    return StoredAs(code, group, "int8", span=span, **options)


def _zeros(codes: ScaledCodes) -> ByGroup:
    """Returns the codes that stand for 0."""
    zeros, added = codes.zeros, np.float32(codes.codes.added)
    if zeros is None:
        return replace(codes.scales, part=partial(_filled_with, -added), factor=np.float32(1))
    part, factor = zeros.part, zeros.factor
    return replace(zeros, part=lambda box: part(box) * factor - added, factor=np.float32(1))
