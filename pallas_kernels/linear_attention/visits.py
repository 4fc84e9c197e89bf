"""The visits of kernels that let the states of rows take in tokens: which state is read, which tokens, what is written.

A page has the state after the last token that its row has in the page's column. Page 0 takes what nobody needs. Rows
with one token are visited once each. A row with more is visited once for each tile of tokens that it has a part of, and
once more for each of its columns that has a page and ends within. Visits are in the order of tokens.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention import RaggedRows

TILE = 64  # tokens that are taken in together, at most


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["count", "tokens", "sources", "targets", "begins"],
    meta_fields=[],
)
@dataclass(frozen=True)
class SingleVisits:
    """The visits of the rows with one token. Where there are none, one visit reads and writes page 0."""

    count: jax.Array  # i32 scalar, at least 1
    tokens: jax.Array  # i32[R]
    sources: jax.Array  # i32[R]: the page with the state before the token
    targets: jax.Array  # i32[R]: the page for the state after it
    begins: jax.Array  # i32[R]: 1 where the token is the first one of its text, so that the state before is zero


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["count", "tiles", "lows", "highs", "sources", "targets", "firsts", "begins"],
    meta_fields=[],
)
@dataclass(frozen=True)
class ChunkVisits:
    """The visits of the rows with several tokens. Where there are none, one visit takes in nothing, for page 0."""

    count: jax.Array  # i32 scalar, at least 1
    tiles: jax.Array  # i32[V]
    lows: jax.Array  # i32[V]: the visit's tokens are those of the tile from this one
    highs: jax.Array  # i32[V]: to this one
    sources: jax.Array  # i32[V]: the page with the state before the row's tokens
    targets: jax.Array  # i32[V]: the page for the state after the visit's, or 0
    firsts: jax.Array  # i32[V]: 1 where the visit is the first one of its row
    begins: jax.Array  # i32[V]: 1 where the row begins its text, so that the state before it is zero


@partial(jax.tree_util.register_dataclass, data_fields=["singles", "chunks", "is_single", "is_real"], meta_fields=[])
@dataclass(frozen=True)
class Visits:
    """All visits of a step. They are the same for all layers whose states are in the same pages."""

    singles: SingleVisits
    chunks: ChunkVisits | None  # None: the shapes tell that every row has one token at most
    is_single: jax.Array  # bool[T]: the token is its row's only one
    is_real: jax.Array  # bool[T]: the token is not padding


def plan_visits(rows: RaggedRows, page_size: int) -> Visits:
    """Returns the visits of `rows`, whose page table is that of the states."""
    is_real = rows.is_real()
    is_single = is_real & (rows.query_lens()[rows.token_rows] == 1)
    chunks = None if rows.decode_only else chunk_visits(rows, page_size, is_real & ~is_single)
    return Visits(_singles(rows, page_size), chunks, is_single, is_real)


def _singles(rows: RaggedRows, page_size: int) -> SingleVisits:
    number, of_rows = _numbered(rows.query_lens() == 1, len(rows.kv_lens))
    row = jnp.minimum(of_rows, len(rows.kv_lens) - 1)
    is_visit, position = of_rows < len(rows.kv_lens), rows.starts()[row]
    target = jnp.where(is_visit, rows.page_table[row, jnp.maximum(position, 0) // page_size], 0)
    # A row that begins reads the page that it will write: nobody else writes it at that time.
    before = rows.page_table[row, jnp.maximum(position - 1, 0) // page_size]
    source = jnp.where(is_visit & (position > 0), before, target)
    token = jnp.where(is_visit, rows.query_starts[row], 0)
    return SingleVisits(number, token, source, target, (position <= 0).astype(jnp.int32))


def chunk_visits(rows: RaggedRows, page_size: int, in_chunk: jax.Array) -> ChunkVisits:
    """Returns the visits of the tokens `in_chunk` bool[T], which are all of some rows with several tokens."""
    num_tokens, row, position = len(in_chunk), rows.token_rows, rows.positions
    tile, token = min(TILE, num_tokens), jnp.arange(num_tokens, dtype=jnp.int32)
    page = rows.page_table[row, position // page_size]
    is_last = token + 1 == rows.query_starts[row + 1]
    is_kept = is_last | ((position + 1) % page_size == 0) & (page != 0)
    # A row has its last token, and ends a column more than the multiples of the page's size among its tokens, at most.
    num_rows = min(len(rows.kv_lens), num_tokens // 2)
    most = min(num_tokens, -(-num_tokens // tile) + 2 * num_rows + num_tokens // page_size)
    count, ends = _numbered(in_chunk & (is_kept | ((token + 1) % tile == 0)), most)
    is_visit, end = ends < num_tokens, jnp.minimum(ends, num_tokens - 1)
    row = row[end]
    first = rows.query_starts[row]
    low = jnp.maximum(first, end // tile * tile)
    low = jnp.maximum(low, jnp.concatenate([jnp.zeros(1, jnp.int32), end[:-1] + 1]))
    start = rows.starts()[row]
    # A row that begins reads the page that it will write last: nobody else writes it at that time.
    source = jnp.where(start > 0, start - 1, rows.kv_lens[row] - 1)
    source = rows.page_table[row, jnp.maximum(source, 0) // page_size]
    begins = ~is_visit | (start <= 0)
    return ChunkVisits(
        count,
        jnp.where(is_visit, end // tile, 0),
        jnp.where(is_visit, low % tile, 0),
        jnp.where(is_visit, end % tile + 1, 0),
        jnp.where(is_visit, source, 0),
        jnp.where(is_visit & is_kept[end], page[end], 0),
        (~is_visit | (low == first)).astype(jnp.int32),
        begins.astype(jnp.int32),
    )


def _numbered(flags: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Returns how many of `flags` are true, but at least 1, and the places of these, then len(flags): i32[most]."""
    so_far = jnp.cumsum(flags, dtype=jnp.int32)
    places = jnp.searchsorted(so_far, jnp.arange(most, dtype=jnp.int32), side="right", method="compare_all")
    return jnp.maximum(so_far[-1], 1), places.astype(jnp.int32)
