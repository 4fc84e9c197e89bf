"""Plans the work on the GPU: turns the lengths of the rows into equal shares of KV, and into tiles of queries.

This is plain XLA on a few hundred integers that do not depend on the layer, so they are computed once for all layers.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.rows import RaggedRows

# A share of KV smaller than this many blocks is not worth a pipe.
LEAST_BLOCKS = 2
# Rows with up to this many queries count as decoding, if a tile has room for them: one token and the drafts to verify.
DRAFT_QUERIES = 8


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


class AttendPlan(NamedTuple):
    """The plan for the rows that decode and for those that prefill. It is the same for all layers of a step."""

    decode: DecodePlan
    prefill: PrefillPlan | None  # None where no row has more than one query


def plan_attention(
    rows: RaggedRows, *, most: int, queries: int, block: int, heads: int, pipes: int, least: int = LEAST_BLOCKS
) -> AttendPlan:
    """Plans rows with up to `most` queries as `plan_decode`, and the others in tiles of `queries` as `plan_prefill`."""
    kv_lens, query_lens, prefill = rows.kv_lens, jnp.ones_like(rows.kv_lens), None
    if not rows.decode_only:
        decodes = rows.query_lens() <= most
        kv_lens = jnp.where(decodes, rows.kv_lens, 0)
        query_lens = jnp.where(decodes, rows.query_lens(), 0)
        wide = rows.query_lens() - query_lens
        prefill = plan_prefill(rows.kv_lens, wide, rows.query_starts, len(rows.token_rows), queries=queries)
    sizes = {"block": block, "heads": heads, "pipes": pipes, "least": least}
    return AttendPlan(plan_decode(kv_lens, query_lens, rows.query_starts[:-1], **sizes), prefill)


class LatentPlan(NamedTuple):
    """The plan of split KV for all rows, whatever they compute: what is shared out are tiles of neighbouring queries.

    A tile that lies in one share is written at once. Each pipe leaves a piece of a tile that is cut, and these pieces
    are joined afterwards. A cut may be only where a share begins, so there are fewer joins than pipes.
    """

    shares: DecodePlan  # whose rows are tiles
    table_rows: jax.Array  # i32[N]: the row of each tile in the page table
    joins: jax.Array  # i32[P, 3]: first row of the output, rows (0: none), last pipe; the first pipe is the one before


def plan_latent(
    rows: RaggedRows, *, queries: int, block: int, heads: int, group: int, max_pipes: int, page_size: int
) -> LatentPlan:
    """Shares out the KV of tiles of up to `queries` queries, each of `heads` groups of query heads, like `plan_decode`.

    A row of the output is one of the `group` heads of a group, of a token. Padding counts as one block without KV, so
    that its output is written.
    """
    num_rows, max_pages = rows.page_table.shape
    if rows.decode_only:
        table_rows = first_tokens = jnp.arange(num_rows, dtype=jnp.int32)
        query_lens, kv_lens, is_used = jnp.ones_like(rows.kv_lens), rows.kv_lens, jnp.ones(num_rows, jnp.bool_)
    else:
        num_tokens = len(rows.token_rows)
        plan = plan_prefill(rows.kv_lens, rows.query_lens(), rows.query_starts, num_tokens, queries=queries)
        table_rows, first_tokens, query_lens, positions, _ = plan.tiles.T
        # A tile sees nothing after its own queries; those of padding are at negative positions.
        kv_lens = jnp.maximum(positions + query_lens, 0)
        is_used = jnp.arange(len(plan.tiles)) < plan.num_tiles
    most = len(table_rows) * heads * -(-max_pages * page_size // block)
    shares = plan_decode(
        jnp.where(is_used, jnp.maximum(kv_lens, 1), 0),
        query_lens,
        first_tokens,
        block=block,
        heads=heads,
        pipes=min(max_pipes, -(-most // LEAST_BLOCKS)),
        least=LEAST_BLOCKS,
    )
    shares = shares._replace(rows=shares.rows.at[:, 1].set(kv_lens))
    pipes, (share, total) = jnp.arange(len(shares.pipes), dtype=jnp.int32), shares.line
    begin, tile = pipes * share, shares.pipes[:, 0]
    before, blocks = shares.rows[tile, 0] * heads, jnp.maximum((kv_lens[tile] + block - 1) // block, 1)
    head = (begin - before) // blocks
    first = before + head * blocks
    # A tile may be cut several times. It is joined where it is cut for the first time.
    is_cut = (begin < total) & (first < begin) & (first // share == pipes - 1)
    joins = (
        (first_tokens[tile] * heads + head) * group,
        jnp.where(is_cut, query_lens[tile] * group, 0),
        (first + blocks - 1) // share,
    )
    return LatentPlan(shares, table_rows, jnp.stack(joins, axis=1))


def check_plan(
    plan: AttendPlan | LatentPlan, make: Callable[[RaggedRows], AttendPlan | LatentPlan], rows: RaggedRows
) -> None:
    """Raises ValueError where the plan cannot be what `make` returns for these rows."""
    expected = jax.eval_shape(make, rows)
    given = jax.tree.map(lambda leaf: leaf.shape, plan)
    if given != (wanted := jax.tree.map(lambda leaf: leaf.shape, expected)):
        raise ValueError(f"the plan is of other rows, heads or pages: it has shapes {given}, these need {wanted}")
