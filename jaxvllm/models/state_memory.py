"""`StateMemory`: a state that takes in one token after the other, and of which each page holds all.

Layers of linear attention and state-space layers keep such states. The page in the column of a token has the state
after it, in float32. Pages have the shape of all others, [L, P, K, S, W], and are found, copied, moved and given back
like them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.backend import Backend
from pallas_kernels.ragged_paged_attention import RaggedRows

# The arrays of a state, f32[.., K, *part] each.
type State = tuple[jax.Array, ...]
# What a layer computed of a token for its state: arrays [.., K, ..] by name.
type Token = Mapping[str, jax.Array]


class StateRule(Protocol):
    """The rule by which a state takes in a token. It is frozen and hashable, and knows no weights."""

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the arrays of a state, for one head."""

    @property
    def taken_parts(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of what `retake` needs of a token, f32, for one head."""

    def take(self, weights: Mapping[str, jax.Array], state: State, token: Token) -> tuple[State, jax.Array, Token]:
        """Returns the state after a token, what the layer reads from it, and all that `retake` needs of the token."""

    def retake(self, state: State, taken: Token) -> State:
        """Returns the state after a token that `take` took in before, after the same state, bit by bit the same."""


@dataclass(frozen=True)
class Columns:
    """The pages of a group of layers, as the rows of a step find them."""

    rows: RaggedRows
    page_size: int

    def page(self, row: jax.Array, position: jax.Array) -> jax.Array:
        """Returns the page of the column in which `row` has `position`, or the first one before there is any."""
        return self.rows.page_table[row, jnp.maximum(position, 0) // self.page_size]

    @property
    def starts(self) -> jax.Array:
        """The positions of the rows' first tokens in this step, i32[R]."""
        return self.rows.kv_lens - self.rows.query_lens()


@dataclass(frozen=True)
class StateMemory:
    """One state for each of `num_kv_heads` heads."""

    num_kv_heads: int
    rule: StateRule

    # A token sees what the one before it left.
    window: ClassVar[int | None] = 2
    keeps_state: ClassVar[bool] = True

    @property
    def width(self) -> int:
        """The numbers in a row of a page: those of the first array of the state, whose rows then need no padding."""
        return self.rule.parts[0][-1]

    @property
    def num_rows(self) -> int:
        """The rows of a page of one head."""
        return -(-sum(map(math.prod, self.rule.parts)) // self.width)

    def pages(
        self, num_layers: int, num_pages: int, page_size: int, dtype: DTypeLike, backend: Backend
    ) -> jax.ShapeDtypeStruct:
        shape = (num_layers, num_pages, self.num_kv_heads, self.num_rows, self.width)
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def page_bytes(self, page_size: int, dtype: DTypeLike) -> int:
        return self.num_kv_heads * self.num_rows * self.width * jnp.dtype(jnp.float32).itemsize

    def seeing(self, window: int | None) -> Self:
        return self

    def pack(self, state: State) -> jax.Array:
        """Returns the page of a state, f32[.., K, S, W]."""
        flat = jnp.concatenate(
            [x.reshape(*x.shape[: -len(part)], -1) for x, part in zip(state, self.rule.parts, strict=True)], axis=-1
        )
        missing = self.num_rows * self.width - flat.shape[-1]
        padded = jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, missing)])
        return padded.reshape(*flat.shape[:-1], self.num_rows, self.width)

    def unpack(self, page: jax.Array) -> State:
        """Returns the state that a page has."""
        flat = page.reshape(*page.shape[:-2], -1)
        state, first = [], 0
        for part in self.rule.parts:
            state.append(flat[..., first : first + math.prod(part)].reshape(*flat.shape[:-1], *part))
            first += math.prod(part)
        return tuple(state)

    def advance(
        self,
        pages: jax.Array,
        place: jax.Array | int,
        columns: Columns,
        weights: Mapping[str, jax.Array],
        tokens: Token,
    ) -> tuple[jax.Array, jax.Array]:
        """Takes in all tokens [T, K, ..] of the rows, and returns what the layer reads, [T, K, ..], and the pages.

        The pages of every column that a row computes get the state after its last token there. Where each row has one
        token, all rows are computed at once, and elsewhere one token after the other.
        """
        if columns.rows.decode_only:
            out, _, states = self._take_few(pages, place, columns, weights, tokens, 1)
            is_real = columns.rows.is_real()
            at = jnp.where(is_real, columns.page(jnp.arange(len(is_real)), columns.rows.positions), 0)
            return out, pages.at[place, at].set(self.pack(states))
        rows, page_size = columns.rows, columns.page_size

        def of(t: jax.Array) -> Token:
            return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, t, keepdims=False), tokens)

        def one_column(
            carry: tuple[jax.Array, State, jax.Array, jax.Array],
        ) -> tuple[jax.Array, State, jax.Array, jax.Array]:
            first, state, out, pages = carry
            row, position = rows.token_rows[first], rows.positions[first]
            found = self.unpack(pages[place, columns.page(row, position - 1)])
            begins = first == rows.query_starts[row]
            state = jax.tree.map(
                lambda old, now: jnp.where(position == 0, 0, jnp.where(begins, old, now)), found, state
            )
            count = jnp.minimum(page_size - position % page_size, rows.query_starts[row + 1] - first)

            def one_token(i: jax.Array, carry: tuple[State, jax.Array]) -> tuple[State, jax.Array]:
                state, read, _ = self.rule.take(weights, carry[0], of(first + i))
                return state, lax.dynamic_update_index_in_dim(carry[1], read, first + i, axis=0)

            state, out = lax.fori_loop(0, count, one_token, (state, out))
            return first + count, state, out, pages.at[place, columns.page(row, position)].set(self.pack(state))

        begin = self.unpack(jnp.zeros(pages.shape[2:], pages.dtype))
        read = jax.eval_shape(lambda: self.rule.take(weights, begin, of(jnp.int32(0)))[1])
        out = jnp.zeros((len(rows.token_rows), *read.shape), read.dtype)
        _, _, out, pages = lax.while_loop(
            lambda carry: carry[0] < rows.query_starts[-1], one_column, (jnp.int32(0), begin, out, pages)
        )
        return out, pages

    def look_ahead(
        self,
        pages: jax.Array,
        place: jax.Array | int,
        columns: Columns,
        weights: Mapping[str, jax.Array],
        tokens: Token,
        most: int,
    ) -> tuple[jax.Array, Token]:
        """Reads as `advance` does, of rows with `most` tokens at most, and changes no page.

        The second result is for `commit`, [most, R, K, ..].
        """
        out, taken, _ = self._take_few(pages, place, columns, weights, tokens, most)
        return out, taken

    def commit(
        self, pages: jax.Array, place: jax.Array | int, columns: Columns, taken: Token, counts: jax.Array
    ) -> jax.Array:
        """Takes in the first `counts` i32[R] tokens of each row, as `look_ahead` saw them, and returns the pages."""
        state, starts = self._before(pages, place, columns), columns.starts
        every = jnp.arange(len(starts))
        for index in range(len(jax.tree.leaves(taken)[0])):
            is_taken = index < counts
            now = self.rule.retake(state, jax.tree.map(lambda x, index=index: x[index], taken))
            state = _chosen(is_taken, now, state)
            at = jnp.where(is_taken, columns.page(every, starts + index), 0)
            pages = pages.at[place, at].set(self.pack(state))
        return pages

    def _before(self, pages: jax.Array, place: jax.Array | int, columns: Columns) -> State:
        """Returns the states before the rows' first tokens, [R, K, ..]."""
        starts = columns.starts
        found = self.unpack(pages[place, columns.page(jnp.arange(len(starts)), starts - 1)])
        return _chosen(starts > 0, found, jax.tree.map(jnp.zeros_like, found))

    def _take_few(
        self,
        pages: jax.Array,
        place: jax.Array | int,
        columns: Columns,
        weights: Mapping[str, jax.Array],
        tokens: Token,
        most: int,
    ) -> tuple[jax.Array, Token, State]:
        """Returns what the layer reads, [T, K, ..], what was taken in, [most, R, K, ..], and the states after it."""
        rows = columns.rows
        index = rows.query_starts[:-1, None] + jnp.arange(most)
        is_real = jnp.arange(most) < rows.query_lens()[:, None]
        index = jnp.where(is_real, index, len(rows.token_rows))  # past all

        def one(state: State, at: jax.Array) -> tuple[State, tuple[jax.Array, Token]]:
            token = jax.tree.map(lambda x: jnp.take(x, at, axis=0, mode="clip"), tokens)
            now, read, taken = self.rule.take(weights, state, token)
            return _chosen(at < len(rows.token_rows), now, state), (read, taken)

        state, (read, taken) = lax.scan(one, self._before(pages, place, columns), index.T)
        out = jnp.zeros((len(rows.token_rows), *read.shape[2:]), read.dtype)
        return out.at[index.T].set(read, mode="drop"), taken, state


def _chosen(condition: jax.Array, then: State, otherwise: State) -> State:
    """Returns for each row the state of the one or of the other, by `condition` bool[R]."""

    def choose(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(condition.reshape(-1, *(1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(choose, then, otherwise)
