"""`StateMemory`: a state that takes in one token after the other, and of which each page holds all.

Layers of linear attention and state-space layers keep such states. The page in the column of a token has the state
after it, in float32. Pages have the shape of all others, [L, P, K, S, W], and are found, copied, moved and given back
like them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from pallas_kernels.backend import Backend
from pallas_kernels.ragged_paged_attention import KVQuantization, RaggedRows

# The arrays of a state, f32[.., K, *part] each.
type State = tuple[jax.Array, ...]
# What a layer computed of a token for its state: arrays [.., K, ..] by name.
type Token = Mapping[str, jax.Array]

# The gated delta rule costs a product of N x N for a run of N tokens, beside products with the state.
_LONGEST_RUN = 64
_LONGEST_ROW = 128


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

    def take_run(
        self, weights: Mapping[str, jax.Array], state: State, tokens: Token, count: jax.Array
    ) -> tuple[State, jax.Array]:
        """Returns the state after the first `count` of `tokens` [N, .., K, ..], and what is read after each, [N, ..].

        It is what `take` makes of them one after the other, but for rounding, and what is read after more is anything.
        """

    def retake(self, state: State, taken: Token) -> State:
        """Returns the state after a token that `take` took in before, after the same state, bit by bit the same."""


def longest_run(page_size: int) -> int:
    """Returns the most tokens that a state takes in together. They are those between two multiples of it."""
    return _LONGEST_RUN if page_size % _LONGEST_RUN == 0 else page_size


@dataclass(frozen=True)
class Columns:
    """The pages of a group of layers, as the rows of a step find them."""

    rows: RaggedRows
    page_size: int

    def page(self, row: jax.Array, position: jax.Array) -> jax.Array:
        """Returns the page of the column in which `row` has `position`, or the first one before there is any."""
        return self.rows.page_table[row, jnp.maximum(position, 0) // self.page_size]

    @property
    def run(self) -> int:
        """The most tokens of a column that are taken in together."""
        return longest_run(self.page_size)


@dataclass(frozen=True)
class StateMemory:
    """One state for each of `num_kv_heads` heads."""

    num_kv_heads: int
    rule: StateRule

    window: ClassVar[int | None] = None  # a token sees what the one before it left, and no position
    keeps_state: ClassVar[bool] = True

    @property
    def width(self) -> int:
        """The numbers in a row of a page: those of the first array of the state, whose rows then need no padding.

        They are no more than a row that TPUs tile has, so that a small state takes little more than its own bytes.
        """
        return min(self.rule.parts[0][-1], _LONGEST_ROW)

    @property
    def num_rows(self) -> int:
        """The rows of a page of one head, a multiple of 8.

        With others XLA:TPU turns pages round, and copies all of them in each step (compiled HLO for v6e).
        """
        return -(-sum(map(math.prod, self.rule.parts)) // (8 * self.width)) * 8

    def backend(self, backend: Backend) -> Backend:
        return backend

    def pages(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        dtype: DTypeLike,
        backend: Backend,
        quantization: KVQuantization | None = None,
    ) -> jax.ShapeDtypeStruct:
        shape = (num_layers, num_pages, self.num_kv_heads, self.num_rows, self.width)
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def page_bytes(self, page_size: int, dtype: DTypeLike, quantization: KVQuantization | None = None) -> int:
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

        The pages of every column that a row computes get the state after its last token there. Tokens of one column are
        taken in together. A token that comes alone is taken in as in a step in which all tokens do.
        """
        rows, num_tokens = columns.rows, len(columns.rows.token_rows)
        longest, is_real = 1 if rows.decode_only else columns.run, rows.is_real()

        def one(state: State, first: jax.Array, count: jax.Array) -> tuple[State, jax.Array]:
            state, read, _ = self.rule.take(weights, state, _tokens(tokens, first))
            return state, jnp.pad(read[None], [(0, longest - 1), *[(0, 0)] * read.ndim])

        def many(state: State, first: jax.Array, count: jax.Array) -> tuple[State, jax.Array]:
            return self.rule.take_run(weights, state, _tokens(tokens, first + jnp.arange(longest)), count)

        def take(state: State, first: jax.Array, count: jax.Array) -> tuple[State, jax.Array]:
            return one(state, first, count) if longest == 1 else lax.cond(count == 1, one, many, state, first, count)

        def one_run(
            carry: tuple[jax.Array, State, jax.Array, jax.Array],
        ) -> tuple[jax.Array, State, jax.Array, jax.Array]:
            first, state, out, pages = carry
            row, position = rows.token_rows[first], rows.positions[first]
            begins = first == rows.query_starts[row]
            state = _where(begins, self._before(pages, place, columns, row, position), state)
            count = jnp.minimum(longest - position % longest, rows.query_starts[row + 1] - first)
            state, read = take(state, first, count)
            out = lax.dynamic_update_slice_in_dim(out, read, first, axis=0)  # the next run overwrites what is too much
            at = jnp.where(is_real[first], columns.page(row, position), 0)
            return first + count, state, out, self._written(pages, place, at, state)

        empty = self.unpack(jnp.zeros(pages.shape[2:], pages.dtype))
        read = jax.eval_shape(one, empty, jnp.int32(0), jnp.int32(1))[1]
        out = jnp.zeros((num_tokens + longest, *read.shape[1:]), read.dtype)
        _, _, out, pages = lax.while_loop(
            lambda carry: carry[0] < rows.query_starts[-1], one_run, (jnp.int32(0), empty, out, pages)
        )
        return out[:num_tokens], pages

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

        The second result is for `commit`, [R, most, K, ..].
        """
        rows, starts = columns.rows, columns.rows.starts()
        at = rows.query_starts[:-1, None] + jnp.arange(most)
        at = jnp.where(jnp.arange(most) < rows.query_lens()[:, None], at, len(rows.token_rows))  # past all

        def one_token(state: State, at: jax.Array) -> tuple[State, tuple[jax.Array, Token]]:
            state, read, taken = self.rule.take(weights, state, _tokens(tokens, at))
            return state, (read, taken)

        def one_row(row: jax.Array) -> tuple[jax.Array, Token]:
            begin = self._before(pages, place, columns, row, starts[row])
            reads: tuple[jax.Array, Token] = lax.scan(one_token, begin, at[row])[1]
            return reads

        read, taken = lax.map(one_row, jnp.arange(len(starts)))
        out = jnp.zeros((len(rows.token_rows), *read.shape[2:]), read.dtype)
        return out.at[at].set(read, mode="drop"), taken

    def commit(
        self, pages: jax.Array, place: jax.Array | int, columns: Columns, taken: Token, counts: jax.Array
    ) -> jax.Array:
        """Takes in the first `counts` i32[R] tokens of each row, as `look_ahead` saw them, and returns the pages."""
        starts = columns.rows.starts()

        def one_row(row: jax.Array, pages: jax.Array) -> jax.Array:
            def one_token(i: jax.Array, carry: tuple[State, jax.Array]) -> tuple[State, jax.Array]:
                state, pages = carry
                state = self.rule.retake(state, jax.tree.map(lambda x: x[row, i], taken))
                return state, self._written(pages, place, columns.page(row, starts[row] + i), state)

            begin = self._before(pages, place, columns, row, starts[row])
            return lax.fori_loop(0, counts[row], one_token, (begin, pages))[1]

        return lax.fori_loop(0, len(starts), one_row, pages)

    def _before(
        self, pages: jax.Array, place: jax.Array | int, columns: Columns, row: jax.Array, position: jax.Array
    ) -> State:
        """Returns the state of `row` before the token at `position`.

        Rows are read one after the other, also where that is one gather: XLA:TPU copies all pages for it, 6.5 GiB of
        temporaries beside a pool of 6.5 (compiled HLO for v6e, libtpu 0.0.48.1).
        """
        begin: tuple[jax.Array | int, ...] = place, columns.page(row, position - 1), *[0] * (pages.ndim - 2)
        # Without the barrier XLA:CPU would read and write in one operation, and copy all pages for it.
        page = lax.optimization_barrier(lax.dynamic_slice(pages, begin, (1, 1, *pages.shape[2:])))
        found = self.unpack(_in_rows(page)[0, 0])
        return _where(position > 0, found, jax.tree.map(jnp.zeros_like, found))

    def _written(self, pages: jax.Array, place: jax.Array | int, at: jax.Array, state: State) -> jax.Array:
        """Writes `state` to page `at`."""
        begin: tuple[jax.Array | int, ...] = place, at, *[0] * (pages.ndim - 2)
        return lax.dynamic_update_slice(pages, _in_rows(self.pack(state)[None, None]), begin)


def _in_rows(page: jax.Array) -> jax.Array:
    """Has XLA turn one page round where it likes another layout, and not all pages in each step.

    For v6e, pages of 8 heads of 8 rows were turned round: 1.7 GiB of temporaries for a pool of 1.7 (LFM2).
    """
    return with_layout_constraint(page, Layout(tuple(range(page.ndim))))


def _tokens(tokens: Token, at: jax.Array) -> Token:
    return jax.tree.map(lambda x: jnp.take(x, at, axis=0, mode="clip"), tokens)


def _where(condition: jax.Array, then: State, otherwise: State) -> State:
    return jax.tree.map(partial(jnp.where, condition), then, otherwise)
