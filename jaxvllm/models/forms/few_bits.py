"""`FewBits`: the forms of matrices that a checkpoint stores in few bits, whose arrays are made of what it stores."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms.form import Form
from jaxvllm.models.tiling import Box, Fill
from pallas_kernels.quantized_matmul.code import Code

# So many elements are looked at together, to find the scale of each group of them.
_MOST = 1 << 20


@dataclass(frozen=True)
class StoredAs:
    """A way to store a matrix [.., in]: each element is (code - zero) * scale, or code * scale - min.

    group: how many elements in a row of `in` share a scale, and a zero or a minimum, or None: all of them
    has_zeros: whether the matrix says which number stands for 0
    scale_dtype: scales in float8_e4m3fn are multiplied by one in float32, which all elements of a row have (NVFP4)
    rounds_tokens: whether tokens are meant to be rounded to the same code before they are multiplied, with a scale for
        each group of their inputs, or one for all of them
    span: how many elements in a row share a factor in float16, or None: there are no factors. With them, scales are
        integers of eight bits at most, and each is multiplied by its factor. Minima have factors of their own
    has_mins: whether a minimum is subtracted from code * scale, and no zero from the code
    has_input_scale: whether tokens are meant to be rounded to the same code with a scale that is stored, too
    is_sorted: whether groups are those of the inputs in an order that the matrix tells
    """

    code: Code
    group: int | None
    scale_dtype: str
    has_zeros: bool = False
    rounds_tokens: bool = False
    span: int | None = None
    has_mins: bool = False
    has_input_scale: bool = False
    is_sorted: bool = False

    def __post_init__(self) -> None:
        assert not (self.has_zeros and self.has_mins), self

    @property
    def is_by_row(self) -> bool:
        """Whether a row of integers or FP8 and one scale are all that a row of the matrix has."""
        return self.group is None and not self.has_zeros and self.code.bits == 8

    @property
    def is_nested(self) -> bool:
        """Whether it takes more than codes, their scales and zeros, or codes that do not fill bytes."""
        return self.span is not None or self.has_mins or self.code.bits in (5, 6)


@dataclass(frozen=True)
class ByElement:
    """Fills with a value for each element, and finds one for each group without looking at all of its elements.

    `of_groups` is called with the size of groups, and returns the function that fills with one value for each. Where it
    returns None, the elements must be looked at.
    """

    of_elements: Fill
    of_groups: Callable[[int], Fill | None]

    def __call__(self, out: np.ndarray, start: tuple[int, ...]) -> None:
        self.of_elements(out, start)

    def moved(self, by: tuple[int, ...]) -> "ByElement":
        """Returns the function for the elements that begin there. All numbers but that of the last axis may be any."""

        def of_groups(group: int) -> Fill | None:
            found = self.of_groups(group) if not by[-1] else None
            return None if found is None else moved(found, by)

        return ByElement(moved(self.of_elements, by), of_groups)


def moved(fill: Fill, by: tuple[int, ...]) -> Fill:
    """Returns the function that fills with the elements that begin there."""
    if isinstance(fill, ByElement):
        return fill.moved(by)
    return lambda out, start: fill(out, tuple(map(sum, zip(start, by, strict=True))))


def nothing(out: np.ndarray, start: tuple[int, ...]) -> None:
    """Fills nothing."""


@dataclass(frozen=True)
class Elements:
    """Functions that fill parts of a matrix with what is stored of each element: its code, its scale, its zero.

    Scales, zeros, minima and factors fill arrays f32, and codes fill an array with one code in each byte. What is not
    stored leaves arrays as they are. Some checkpoints are read faster by words: `words` and `high_words` fill arrays
    u32 [.., in / as many codes as a word has] with the words of `integer_matmul.CodePanels`. Scales contain
    `tensor_scales`, which are those of whole tensors, or 1. Tokens may have `input_scales`, one for each tensor.
    Where inputs are in an order of their own, `order` fills an array i32[in] with the input that each of them is.
    """

    codes: Fill
    scales: Fill
    zeros: Fill
    factors: Fill = nothing
    mins: Fill = nothing
    min_factors: Fill = nothing
    tensor_scales: Fill = nothing
    input_scales: Fill = nothing
    words: Fill | None = None
    high_words: Fill | None = None
    order: Fill | None = None

    def mapped(self, change: Callable[[Fill], Fill]) -> "Elements":
        """Returns the functions that `change` makes of those for single elements."""
        changed = Elements(*(change(getattr(self, field.name)) for field in fields(self)[:8]))
        return replace(changed, order=self.order)

    def moved(self, by: tuple[int, ...]) -> "Elements":
        """Returns the functions for the elements that begin there, which is 0 along the inputs."""
        words, high_words = (fill and moved(fill, by) for fill in (self.words, self.high_words))
        return replace(self.mapped(partial(moved, by=by)), words=words, high_words=high_words)


class FewBits(Form):
    """A form whose arrays hold the numbers of a checkpoint as they are, so that nothing is decoded to load it."""

    def of_matrix(self, matrix: ParamDecl) -> "FewBits":
        return self

    def of_table(self, table: ParamDecl, dtype: DTypeLike) -> "FewBits | None":
        """Returns the form of a table, of which rows are looked up in `dtype`, if there is one with these arrays."""
        return None

    def takes(self, matrix: ParamDecl) -> bool:
        """Tells whether it is worthwhile for a matrix. Others are decoded."""
        return True

    def saves(self, matrix: ParamDecl, dtype: DTypeLike) -> bool:
        """Tells whether its arrays take fewer bytes than the matrix takes in `dtype`."""
        return _num_bytes(self.declare(matrix).values(), dtype) < _num_bytes([matrix], dtype)

    @abstractmethod
    def fills(self, matrix: ParamDecl, elements: Elements) -> Mapping[str, Fill]:
        """Returns the functions that fill the arrays which `declare` tells for this matrix."""


def _num_bytes(decls: Iterable[ParamDecl], dtype: DTypeLike) -> int:
    return sum(math.prod(decl.shape) * decl.dtype_in(dtype).itemsize for decl in decls)


def largest_of(numbers: jax.Array) -> jax.Array:
    """Returns the largest magnitude along the last axis, which is NaN where one of the numbers is NaN.

    While a model is loaded, XLA:CPU gives maxima of 4,096 numbers and more to YNNPACK, which passes NaN over: a damaged
    checkpoint, whose answers are NaN, would get answers that look sound when it is rounded.
    """
    sizes = jnp.abs(numbers)
    return jnp.where(jnp.isnan(sizes).any(axis=-1), jnp.nan, jnp.max(sizes, axis=-1))


def packed(codes: Fill, per_byte: int, first_bit: int = 0) -> Fill:
    """Returns the function that fills with bytes of `per_byte` codes each, the first in the lowest bits.

    A byte has those bits of each code that begin with `first_bit`, as many as there is room for.
    """
    bits = 8 // per_byte

    def fill(out: np.ndarray, start: tuple[int, ...]) -> None:
        for part, wide, at in _wider(out, start, per_byte, np.dtype(np.uint8)):
            codes(wide, at)
            wide >>= first_bit
            wide &= 2**bits - 1
            np.copyto(part, wide[..., ::per_byte])
            for place in range(1, per_byte):
                part |= wide[..., place::per_byte] << np.uint8(bits * place)

    return codes if per_byte == 1 else fill


def in_words(codes: Fill, per_word: int, words: Callable[[np.ndarray], np.ndarray]) -> Fill:
    """Returns the function that fills with the `words` that some codes become, which are one each in as many bytes."""

    def fill(out: np.ndarray, start: tuple[int, ...]) -> None:
        for part, wide, at in _wider(out, start, per_word, np.dtype(np.uint8)):
            codes(wide, at)
            part[...] = words(wide)

    return fill


def swapped(values: Fill) -> Fill:
    """Returns the function that fills [.., a, b] with what `values` fills [.., b, a] with."""

    def fill(out: np.ndarray, start: tuple[int, ...]) -> None:
        turned = np.zeros(out.shape, out.dtype).swapaxes(-1, -2).copy()
        values(turned, (*start[:-2], start[-1], start[-2]))
        out[...] = turned.swapaxes(-1, -2)

    return fill


def as_dtype(fill: Fill, dtype: DTypeLike) -> Fill:
    """Returns the function that fills arrays of another dtype of the same size with the bits that `dtype` has."""
    return lambda out, start: fill(out.view(jnp.dtype(dtype)), start)


def at_least(fill: Fill, least: float) -> Fill:
    """Returns the function that fills with the values of `fill`, or `least` where they are less: in padding, say."""

    def larger(out: np.ndarray, start: tuple[int, ...]) -> None:
        fill(out, start)
        np.maximum(out, np.float32(least), out=out)

    return larger


def quotient(values: Fill, divisors: Fill) -> Fill:
    """Returns the function that fills with the values of one function, divided by those of another. Zeros stay."""

    def fill(out: np.ndarray, start: tuple[int, ...]) -> None:
        values(out, start)
        by = np.zeros_like(out)
        divisors(by, start)
        np.divide(out, by, out=out, where=by != 0)

    return fill


def of_groups(values: Fill, group: int) -> Fill:
    """Returns the function that fills with one value for each group of so many elements: that of the first."""
    if isinstance(values, ByElement) and (found := values.of_groups(group)) is not None:
        return found

    def fill(out: np.ndarray, start: tuple[int, ...]) -> None:
        for part, wide, at in _wider(out, start, group, np.dtype(np.float32)):
            values(wide, at)
            part[...] = wide[..., ::group]

    return fill


def of_rows(values: Fill) -> Fill:
    """Returns the function that fills with one value for each row of elements: that of the first."""

    def fill(out: np.ndarray, start: tuple[int, ...]) -> None:
        first = np.zeros((*out.shape, 1), np.float32)
        values(first, (*start, 0))
        out[...] = first[..., 0]

    return fill


def largest_of_rows(values: Fill, rows: int) -> Fill:
    """Returns the function that fills [.., 1, 1] with the largest value that `rows` of elements begin with."""

    def fill(out: np.ndarray, start: tuple[int, ...]) -> None:
        first = np.zeros((*out.shape[:-2], rows, 1), np.float32)
        values(first, start)
        out[...] = first.max(axis=-2, keepdims=True)

    return fill


def _wider(
    out: np.ndarray, start: tuple[int, ...], width: int, dtype: np.dtype
) -> Iterator[tuple[np.ndarray, np.ndarray, tuple[int, ...]]]:
    """Yields parts of `out`, and for each an array with `width` times as many elements in a row, and where it begins.

    `out` begins at `start` of an array, and that array has one number for `width` elements of another one.
    """
    for box in Box(start, out.shape).pieces(max(1, _MOST // width)):
        (*rows, first), (*shape, count) = box.start, box.shape
        yield out[box.index(start)], np.zeros((*shape, count * width), dtype), (*rows, first * width)
