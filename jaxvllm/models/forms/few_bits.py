"""`FewBits`: the forms of matrices that a checkpoint stores in few bits, whose arrays are made of what it stores."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

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
    """A way to store a matrix [.., in]: each element is (code - zero) * scale.

    group: how many elements in a row of `in` share a scale and a zero, or None: all of them
    has_zeros: whether the matrix says which number stands for 0
    scale_dtype: scales in float8_e4m3fn are multiplied by one in float32, which all elements of a row have (NVFP4)
    rounds_tokens: whether tokens are meant to be rounded to the same code before they are multiplied
    """

    code: Code
    group: int | None
    scale_dtype: str
    has_zeros: bool = False
    rounds_tokens: bool = False

    @property
    def is_by_row(self) -> bool:
        """Whether a row of integers or FP8 and one scale are all that a row of the matrix has."""
        return self.group is None and not self.has_zeros and self.code.per_byte == 1


@dataclass(frozen=True)
class Elements:
    """Functions that fill parts of a matrix with what is stored of each element: its code, its scale, its zero.

    Scales and zeros fill arrays f32, and codes fill an array with one code in each byte. Scales contain factors, which
    are those of whole tensors, or 1.
    """

    codes: Fill
    scales: Fill
    zeros: Fill
    factors: Fill

    def mapped(self, change: Callable[[Fill], Fill]) -> "Elements":
        """Returns the functions that `change` makes of these."""
        return Elements(*map(change, (self.codes, self.scales, self.zeros, self.factors)))


class FewBits(Form):
    """A form whose arrays hold the numbers of a checkpoint as they are, so that nothing is decoded to load it."""

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


def packed(codes: Fill, per_byte: int) -> Fill:
    """Returns the function that fills with bytes of `per_byte` codes each, the first in the lowest bits."""

    def fill(out: np.ndarray, start: tuple[int, ...]) -> None:
        for part, wide, at in _wider(out, start, per_byte, np.dtype(np.uint8)):
            codes(wide, at)
            np.bitwise_or(wide[..., ::2], wide[..., 1::2] << 4, out=part)

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


def _wider(
    out: np.ndarray, start: tuple[int, ...], width: int, dtype: np.dtype
) -> Iterator[tuple[np.ndarray, np.ndarray, tuple[int, ...]]]:
    """Yields parts of `out`, and for each an array with `width` times as many elements in a row, and where it begins.

    `out` begins at `start` of an array, and that array has one number for `width` elements of another one.
    """
    for box in Box(start, out.shape).pieces(max(1, _MOST // width)):
        (*rows, first), (*shape, count) = box.start, box.shape
        yield out[box.index(start)], np.zeros((*shape, count * width), dtype), (*rows, first * width)
