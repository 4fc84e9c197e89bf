"""Walks over the rows of one kind. The page table of each row is in scalar memory before it is needed."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

type Scalar = jax.Array | int
type Ref = Any

LANES = 128


def div(a: Scalar, b: int) -> jax.Array:
    """Computes a // b for a >= 0, without the sign corrections of Python's `//` and of `lax.div`.

    For the first the compiler asks on which TPU it runs. The second was ten of the forty instructions that started one
    page.
    """
    return jnp.int32(a) >> (b.bit_length() - 1) if _is_power_of_two(b) else lax.div(jnp.int32(a), jnp.int32(b))


def rem(a: Scalar, b: int) -> jax.Array:
    """Computes a % b for a >= 0."""
    return jnp.int32(a) & (b - 1) if _is_power_of_two(b) else lax.rem(jnp.int32(a), jnp.int32(b))


def cdiv(a: Scalar, b: int) -> jax.Array:
    """Computes a / b for a >= 0, rounded up."""
    return div(jnp.int32(a) + (b - 1), b)


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


@dataclass(frozen=True)
class CoreRows:
    """The rows of this core with `least` to `most` queries, out of every `stride`-th row from `first` on."""

    query_starts: Ref  # SMEM i32[R + 1]
    kv_lens: Ref  # SMEM i32[R]
    decode_only: bool
    least: int
    most: int
    first: Scalar
    stride: int

    @property
    def count(self) -> int:
        """The number of rows R. As a row number it means that no row is left."""
        return self.kv_lens.shape[0]

    def query_len(self, row: Scalar) -> jax.Array:
        if self.decode_only:
            return jnp.minimum(self.kv_lens[row], 1)
        return self.query_starts[row + 1] - self.query_starts[row]

    def first_token(self, row: Scalar) -> Scalar:
        return row if self.decode_only else self.query_starts[row]

    def next(self, row: Scalar) -> jax.Array:
        """Returns the first row of this kind from `row` on."""

        def is_other(row: jax.Array) -> jax.Array:
            length = self.query_len(jnp.minimum(row, self.count - 1))
            return (row < self.count) & ((length < self.least) | (length > self.most))

        return jnp.minimum(lax.while_loop(is_other, lambda row: row + self.stride, jnp.int32(row)), self.count)


class RowPlace(NamedTuple):
    """A row, and where its page table is."""

    row: jax.Array  # `CoreRows.count`: past the last
    following: jax.Array  # the row after it, whose table is on its way
    slot: jax.Array  # of the row's table


@dataclass(frozen=True)
class Walk:
    """Goes from row to row, because the tables of all rows (megabytes with long contexts) do not fit scalar memory."""

    rows: CoreRows
    tables: Ref  # HBM i32[R, N, 128]
    table: Ref  # SMEM i32[2, N, 128]
    arrived: Ref  # DMA semaphores [2]

    @staticmethod
    def scratch(tables_shape: tuple[int, ...]) -> dict[str, Any]:
        return dict(
            table=pltpu.SMEM((2, *tables_shape[1:]), jnp.int32),
            arrived=pltpu.SemaphoreType.DMA((2,)),
        )

    def start(self) -> RowPlace:
        row = self.rows.next(self.rows.first)
        self._fetch(row, jnp.int32(0))
        return self._enter(row, jnp.int32(0))

    def step(self, place: RowPlace, is_done: jax.Array) -> RowPlace:
        """Returns the next place if the row is done, else the same."""
        return lax.cond(is_done, lambda: self._enter(place.following, 1 - place.slot), lambda: place)

    def page(self, place: RowPlace, index: Scalar) -> jax.Array:
        """Returns the `index`-th page of the row."""
        return self.table[place.slot, div(index, LANES), rem(index, LANES)]

    def _enter(self, row: jax.Array, slot: jax.Array) -> RowPlace:
        @pl.when(row < self.rows.count)
        def _() -> None:
            self._copy(row, slot).wait()

        following = self.rows.next(row + self.rows.stride)
        self._fetch(following, 1 - slot)
        return RowPlace(row, following, slot)

    def _fetch(self, row: jax.Array, slot: jax.Array) -> None:
        @pl.when(row < self.rows.count)
        def _() -> None:
            self._copy(row, slot).start()

    def _copy(self, row: jax.Array, slot: jax.Array) -> Any:
        return pltpu.make_async_copy(self.tables.at[row], self.table.at[slot], self.arrived.at[slot])
