"""Plans the work on the GPU: turns the lengths of the rows into equal shares of KV, and into tiles of queries.

This is plain XLA on a few hundred integers that do not depend on the layer, so they are computed once for all layers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class DecodePlan(NamedTuple):
    """The plan of split KV: equal shares of the KV of all rows with few queries, one share for each pipe.

    The blocks of KV lie on a line, row by row, and within a row KV head by KV head. Pipe p takes the blocks from
    p * share on, so it meets the end of one (row, head), some whole ones, and the beginning of another. However ragged
    the rows are, every pipe reads the same amount, and there are at most P more pieces than (row, head)s.
    """

    rows: jax.Array  # i32[R, 4]: blocks before this row (of one head), KV length, queries, first token
    pipes: jax.Array  # i32[P, 2]: the row that a pipe begins in, and its (row, head)s; a row without KV counts as one
    line: jax.Array  # i32[2]: blocks in a share, blocks in all


def plan_decode(
    kv_lens: jax.Array,
    query_lens: jax.Array,
    first_tokens: jax.Array,
    *,
    block: int,
    heads: int,
    pipes: int,
    least: int,
) -> DecodePlan:
    """Shares out the rows' KV among `pipes`, in blocks of `block` tokens, with at least `least` blocks in a share.

    kv_lens, query_lens, first_tokens i32[R]. A row with KV length 0 has no share. The plan is exact for up to 2**31
    blocks x heads.
    """
    blocks = (kv_lens + block - 1) // block
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    before = ends - blocks
    total = ends[-1] * heads
    share = jnp.maximum((total + pipes - 1) // pipes, least)
    visits = jnp.where(blocks > 0, heads, 1)
    visits_before = jnp.cumsum(visits, dtype=jnp.int32) - visits

    def locate(at: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the row of a block of the line, and how many (row, head)s come before that of the block."""
        row = jnp.searchsorted(ends * heads, at, side="right", method="compare_all").astype(jnp.int32)
        row = jnp.minimum(row, len(kv_lens) - 1)
        head = (at - before[row] * heads) // jnp.maximum(blocks[row], 1)
        return row, visits_before[row] + head

    starts = jnp.arange(pipes, dtype=jnp.int32) * share
    row, visit = locate(starts)
    _, last_visit = locate(jnp.minimum(starts + share, total) - 1)
    pieces = jnp.where(starts < total, last_visit - visit + 1, 0)
    return DecodePlan(
        rows=jnp.stack([before, kv_lens, query_lens, first_tokens], axis=1),
        pipes=jnp.stack([row, pieces], axis=1),
        line=jnp.stack([share, total]),
    )


class PrefillPlan(NamedTuple):
    """Tiles of neighbouring queries of one row. Later tiles of a row come first, because they see more."""

    tiles: jax.Array  # i32[N, 5]: row, first token, queries, position of the first query, KV length
    num_tiles: jax.Array  # i32[1], those in use


def plan_prefill(
    kv_lens: jax.Array, query_lens: jax.Array, query_starts: jax.Array, num_tokens: int, *, queries: int
) -> PrefillPlan:
    """Makes tiles of up to `queries` queries for rows with `query_lens` > 0.

    query_lens, kv_lens i32[R], query_starts i32[R + 1]. Tokens after the last row make tiles of KV length 0, so that
    old values in their output are overwritten.
    """
    num_rows = len(kv_lens)
    kv_lens = jnp.append(kv_lens, 0)
    query_lens = jnp.append(query_lens, num_tokens - query_starts[-1])
    tiles = (query_lens + queries - 1) // queries
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    num_tiles = ends[-1]
    most = num_tokens // queries + min(num_rows + 1, num_tokens)  # a full tile for every `queries`, a partial one a row
    index = jnp.maximum(num_tiles - 1 - jnp.arange(most, dtype=jnp.int32), 0)
    row = jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, num_rows)
    done = (index - (ends - tiles)[row]) * queries
    columns = (
        jnp.minimum(row, num_rows - 1),
        query_starts[row] + done,
        jnp.clip(query_lens[row] - done, 0, queries),
        kv_lens[row] - query_lens[row] + done,
        kv_lens[row],
    )
    return PrefillPlan(jnp.stack(columns, axis=1), num_tiles[None])
