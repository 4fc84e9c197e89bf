"""Takes tokens into states one after the other (Mosaic GPU): a state is read and written once.

A state has a matrix for each head, with a line for each channel of a value. Lines know nothing of each other, so a CTA
has some lines of one head of one row. It keeps them in the registers of a warpgroup, and takes in the row's tokens one
after the other, whatever their number. Each warp has lines of its own and the lanes of a warp share their keys, so a
sum over keys needs no other warp and no shared memory. The next token is fetched while one is taken in.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import Ref, interpretation
from pallas_kernels.ragged_paged_attention.rows import RaggedRows

WARPS, LANES_OF_WARP = 4, 32
# The float32 that a thread moves together, 16 bytes.
VECTOR = 4
# The numbers of a state that a CTA has: 64 in each thread, beside a token and the next one.
MOST_NUMBERS = 8192


class StateTokens(NamedTuple):
    """The T tokens that the states of K groups of r heads take in, f32. The heads of a group share keys and queries."""

    queries: jax.Array  # [T, K, Dk]
    keys: jax.Array  # [T, K, Dk]
    values: jax.Array  # [T, K, r, Dv]
    logs: jax.Array  # [T, K, r, Dk or 1], the logarithm of what a token leaves of each channel of keys, or of all
    betas: jax.Array  # [T, K, r], how much of a value is added


class StatePlan(NamedTuple):
    """The plan of `take_tokens`. It depends on the rows, and is the same for all layers of a step."""

    rows: jax.Array  # i32[R, 4]: first token, first column and number of columns; page of the state before, or -1
    columns: jax.Array  # i32[columns, 2]: end of its tokens, and page of the state after them, or 0 for none

    def windows_end(self) -> jax.Array:
        """Returns the last token of each column, i32[columns]. Columns after the last one have any."""
        return jnp.maximum(self.columns[:, 0] - 1, 0)


@dataclass(frozen=True)
class StateTile:
    """The part of a head's matrix that a CTA has: all `keys` of so many `lines`.

    In memory, a line is a column of the matrix [keys, values], or with `keys_last` a row of [values, keys].
    """

    keys: int
    lines: int
    keys_last: bool

    @property
    def shape(self) -> tuple[int, int]:
        return (self.lines, self.keys) if self.keys_last else (self.keys, self.lines)

    @property
    def key_axis(self) -> int:
        return int(self.keys_last)

    @property
    def layout(self) -> Any:
        """Returns which thread has which numbers.

        A thread has `VECTOR` neighbours in memory. A warp reads 128 bytes of four lines or, of keys that come first, 64
        bytes of eight keys (with 32 lines 32 bytes of 16).
        """
        if self.keys_last:
            across = 8
            down = LANES_OF_WARP // across
            tiles = (WARPS * down, across * VECTOR), (down, across * VECTOR), (VECTOR,)
            warp = -5
        else:
            across = self.lines // (WARPS * VECTOR)
            down = LANES_OF_WARP // across
            tiles = (down, self.lines), (down, self.lines // WARPS), (VECTOR,)
            warp = -4
        return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=(warp,), lane_dims=(-3, -2), vector_dim=-1)

    def load_keys(self, ref: Ref) -> jax.Array:
        """Loads a number for each key, f32[keys]."""
        return plgpu.load(ref, layout=self.layout.reduce(1 - self.key_axis), optimized=False)

    def load_lines(self, ref: Ref) -> jax.Array:
        """Loads a number for each line, f32[lines]."""
        return plgpu.load(ref, layout=self.layout.reduce(self.key_axis), optimized=False)

    def of_keys(self, x: jax.Array) -> jax.Array:
        """Repeats f32[keys] for all lines."""
        return plgpu.layout_cast(lax.broadcast_in_dim(x, self.shape, (self.key_axis,)), self.layout)

    def of_lines(self, x: jax.Array) -> jax.Array:
        """Repeats f32[lines] for all keys."""
        return plgpu.layout_cast(lax.broadcast_in_dim(x, self.shape, (1 - self.key_axis,)), self.layout)


def choose_tile(matrix: tuple[int, int], *, keys_last: bool, decode_only: bool) -> StateTile | None:
    """Returns the tile of `take_tokens` for matrices of such a shape, or None where it does not take them.

    Keys must be a multiple of 32, and values of 32 or, with `keys_last`, of 16.
    """
    values, keys = matrix if keys_last else matrix[::-1]
    if keys % LANES_OF_WARP:
        return None
    # A row that decodes is bound by memory, and reads longer pieces of it. A prompt is bound by the latency of a token,
    # and has more CTAs.
    widths = (64, 32) if decode_only else (32,)
    if keys_last:
        widths = (*widths, 16)
    lines = next((lines for lines in widths if values % lines == 0 and lines * keys <= MOST_NUMBERS), None)
    return None if lines is None else StateTile(keys, lines, keys_last)


def plan_states(rows: RaggedRows, page_size: int, is_taken: jax.Array | bool = True) -> StatePlan:
    """Makes the plan of `take_tokens` for these rows, whose states have a page for every `page_size` tokens.

    is_taken  # bool[R]: others are left to another kernel
    """
    starts, lens = rows.starts(), rows.query_lens()
    before = jnp.take_along_axis(rows.page_table, (jnp.maximum(starts - 1, 0) // page_size)[:, None], axis=1)[:, 0]
    before = jnp.where((lens > 0) & (starts > 0), before, -1)
    first_tokens, columns = rows.query_starts[:-1], rows.parts(page_size)
    row, column = columns.rows, columns.numbers
    end = first_tokens[row] + jnp.minimum((column + 1) * page_size, (starts + lens)[row]) - starts[row]
    pages = rows.page_table.at[row, column].get(mode="clip")
    counts = jnp.where(is_taken, columns.counts, 0)
    of_rows = jnp.stack([first_tokens, columns.firsts, counts, before], axis=1)
    return StatePlan(of_rows.astype(jnp.int32), jnp.stack([end, pages], axis=1).astype(jnp.int32))


def take_tokens(
    pages: jax.Array,
    place: jax.Array | int,
    plan: StatePlan,
    tokens: StateTokens,
    rest: jax.Array,
    *,
    tile: StateTile,
    corrects: bool,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Takes the tokens of all rows into the states of layer `place`, and returns what is read and the pages.

    pages  # f32[L, P, K, S, W]: the rows of r matrices, of W numbers each, and then the rest of a state
    rest  # f32[columns, K, the other rows, W]: what pages get beside the matrices

    A token makes a matrix S forget, S <- exp(logs) S, and adds to it: S <- S + k (beta v)^T. With `corrects` it adds
    what S says wrong of the key, v - S^T k, in the place of v (the delta rule). What is read is S^T q,
    f32[T, K, r, Dv], and anything for tokens that are not taken. Rows are taken in any order, so none may write a page
    from which another one begins. The pages are updated in place when donated. `tile` is that of `choose_tile`.
    """
    num_tokens, groups, heads, size = tokens.values.shape
    tiles, lines = size // tile.lines, tile.lines
    rows_of_head = pages.shape[3] - rest.shape[2]
    assert rows_of_head % heads == 0 and size % lines == 0, (pages.shape, tokens.values.shape, rest.shape)
    rows_of_head //= heads
    forgets_as_whole, decode_only = tokens.logs.shape[-1] == 1, num_tokens == len(plan.rows)
    each = prod(rest.shape[2:]) // (WARPS * LANES_OF_WARP)
    rest_layout = plgpu.Layout.WG_STRIDED(rest.shape[2:], next(size for size in (4, 2, 1) if each % size == 0))

    def kernel(
        where: Ref,
        rows: Ref,
        columns: Ref,
        queries: Ref,
        keys: Ref,
        values: Ref,
        kept: Ref,
        betas: Ref,
        rest: Ref,
        pages: Ref,
        read: Ref,
    ) -> None:
        row, group, head, part = (lax.axis_index(name) for name in ("row", "group", "head", "part"))
        first, first_column, num_columns, before = (rows[row, i] for i in range(4))
        own = pl.ds(part * lines, lines)

        def matrix(page: jax.Array) -> Ref:
            begin = head * rows_of_head
            if tile.keys_last:
                return pages.at[where[0], page, group, pl.ds(begin + part * lines, lines)]
            return pages.at[where[0], page, group, pl.ds(begin, tile.keys), own]

        def fetch(token: jax.Array) -> tuple[jax.Array, ...]:
            query, key = (tile.load_keys(x.at[token, group]) for x in (queries, keys))
            left = kept[token, group, head, 0] if forgets_as_whole else tile.load_keys(kept.at[token, group, head])
            value = tile.load_lines(values.at[token, group, head, own])
            return query, key, left, value, betas[token, group, head]

        @pl.when(num_columns > 0)
        def _() -> None:
            last = columns[first_column + num_columns - 1, 0] - 1
            state = plgpu.load(matrix(jnp.maximum(before, 0)), layout=tile.layout, optimized=False)
            state = jnp.where(jnp.broadcast_to(before >= 0, tile.shape), state, 0.0)

            def take(token: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                state, query, key, left, value, beta = carry
                following = carry[1:] if decode_only else fetch(jnp.minimum(token + 1, last))
                state = state * (left if forgets_as_whole else tile.of_keys(left))
                key = tile.of_keys(key)
                if corrects:
                    value = value - jnp.sum(state * key, axis=tile.key_axis)
                state = state + key * tile.of_lines(value * beta)
                read[token, group, head, own] = jnp.sum(state * tile.of_keys(query), axis=tile.key_axis)
                return state, *following

            def take_column(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                begin, *taken = carry
                column = first_column + index
                end, page = columns[column, 0], columns[column, 1]
                state, *following = lax.fori_loop(begin, end, take, tuple(taken))

                @pl.when(page > 0)
                def _() -> None:
                    matrix(page)[...] = state

                @pl.when((page > 0) & (head == 0) & (part == 0))
                def _() -> None:
                    into = pages.at[where[0], page, group, pl.ds(heads * rows_of_head, rest.shape[2])]
                    into[...] = plgpu.load(rest.at[column, group], layout=rest_layout)

                return end, state, *following

            lax.fori_loop(0, num_columns, take_column, (first, state, *fetch(first)))

    kept_pages = jax.new_ref(pages)
    out: jax.Array = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_tokens, groups, heads, size), jnp.float32),
        grid=(len(plan.rows), groups, heads, tiles),
        grid_names=("row", "group", "head", "part"),
        # Between a read and a write of the same numbers by the same thread, which is all that there is, no warp waits.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpretation(interpret),
        kernel_name="take_tokens",
    )(jnp.asarray(place, jnp.int32)[None], *plan, *tokens._replace(logs=jnp.exp(tokens.logs)), rest, kept_pages)
    return out, jax.freeze(kept_pages)
