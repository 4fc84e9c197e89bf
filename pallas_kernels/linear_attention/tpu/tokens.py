"""The tokens of a step, before the convolution, as the kernels for states take them in."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
from jax.experimental import pallas as pl

LANES = 128


class DeltaTokens(NamedTuple):
    """The tokens of the delta rule, and what takes them in.

    taps  # f32[K, W, C]: of the convolution, whose results go through SiLU
    channels  # [T, K, C]: of a query, a key and r values of 128 each
    g  # f32[T, K, r, G]: the logarithm of what a token leaves of a matrix (G is 1), or of each of its rows (128)
    beta  # f32[T, K, r]: how much of an error it corrects
    """

    taps: jax.Array
    channels: jax.Array
    g: jax.Array
    beta: jax.Array


class ScanTokens(NamedTuple):
    """The tokens of Mamba-2, and what takes them in. There are H heads of P values in a group.

    taps  # f32[K, W, C]: of the convolution, whose results go through SiLU
    bias  # f32[K, C]: of the convolution
    skip  # f32[K, H]: D, by which values are multiplied and added to what is read
    channels  # [T, K, C]: of H * P values, and of B and C
    g  # f32[T, K, H]: the logarithm of what a token leaves of the state of a head
    dt  # f32[T, K, H]: by which its values are multiplied where they come in
    """

    taps: jax.Array
    bias: jax.Array
    skip: jax.Array
    channels: jax.Array
    g: jax.Array
    dt: jax.Array


@dataclass(frozen=True)
class ScanShape:
    """A group of heads of Mamba-2, which share B and C.

    Its state has `lines` rows of 128 for each value, one after the other.
    """

    num_heads: int
    head_size: int
    state_size: int

    @property
    def values(self) -> int:
        return self.num_heads * self.head_size

    @property
    def channels(self) -> int:
        """The channels of the values, of B and of C."""
        return self.values + 2 * self.state_size

    @property
    def parts(self) -> int:
        """The registers' rows of values, each 128 of them, where the last one is full."""
        return self.values // LANES

    @property
    def lines(self) -> int:
        """The rows of the state of a value."""
        return self.state_size // LANES

    @property
    def rows(self) -> int:
        """The rows of the state of a group."""
        return self.values * self.lines

    def heads(self, part: int) -> Iterator[tuple[int, slice]]:
        """Yields each head that has values among the 128 of a part, and which of these are its own."""
        begin, size = part * LANES, self.head_size
        for head in range(begin // size, -(-(begin + LANES) // size)):
            yield head, slice(max(head * size - begin, 0), min((head + 1) * size - begin, LANES))

    def rows_of(self, part: int, values: slice, line: int) -> pl.Slice:
        """Returns where a line of the state has such values of a part."""
        begin = (part * LANES + values.start) * self.lines + line
        return pl.ds(begin, values.stop - values.start, self.lines if self.lines > 1 else None)
