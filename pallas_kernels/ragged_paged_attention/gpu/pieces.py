"""The pieces of (row, head)s into which equal shares of KV are cut: how kernels walk them, and what each leaves."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic_gpu import Ref
from pallas_kernels.ragged_paged_attention.gpu.tile import AttentionBuild
from pallas_kernels.ragged_paged_attention.gpu.work_plan import DecodePlan


class Partials(NamedTuple):
    """The pieces' results, in slot row * K + head + pipe. No two pieces share a slot, because they lie on a line."""

    values: jax.Array  # f32[slots, N, D], normalised; the heads of a query are rows of N, which follow each other
    peaks: jax.Array  # f32[slots, 64 or less], log2 of the denominators; row i * G + g for query i and head g


class Piece(NamedTuple):
    """A pipe's part of one (row, head): blocks begin .. end - 1 of its KV."""

    row: jax.Array
    head: jax.Array
    begin: jax.Array
    end: jax.Array
    kv_len: jax.Array
    queries: jax.Array
    token: jax.Array  # of the first query
    window: jax.Array
    seen: jax.Array  # the first position that any query sees
    slot: jax.Array


def slots_of(plan: DecodePlan, num_heads: int) -> int:
    """Returns the number of slots for the pieces of a plan."""
    return len(plan.rows) * num_heads + len(plan.pipes)


def walk_pieces[C](
    attention: AttentionBuild,
    plan: DecodePlan,
    window: Ref,
    number: jax.Array,
    visit: Callable[[Piece, C], C],
    carry: C,
) -> C:
    """Visits the pieces of pipe `number` that any query sees.

    The arrays of the plan, and window i32[1], are references to memory.
    """
    num_heads = attention.num_kv_heads
    share, total = plan.line[0], plan.line[1]
    stop = jnp.minimum((number + 1) * share, total)

    def step(_: jax.Array, state: tuple[jax.Array, jax.Array, C]) -> tuple[jax.Array, jax.Array, C]:
        at, row, carry = state
        before, kv_len, num_queries, token = (plan.rows[row, i] for i in range(4))
        blocks = lax.div(kv_len + (attention.block - 1), attention.block)
        local = at - before * num_heads
        head = lax.div(local, jnp.maximum(blocks, 1))
        first = local - head * blocks
        end = jnp.minimum(blocks, first + stop - at)
        # Read for each piece: a register for all pieces is one that the compiler spills.
        own_window = window[0]
        seen = jnp.maximum(kv_len - num_queries - own_window + 1, 0)
        begin = jnp.maximum(first, lax.div(seen, attention.block))
        slot = row * num_heads + head + number
        piece = Piece(row, head, begin, end, kv_len, num_queries, token, own_window, seen, slot)
        carry = lax.cond(begin < end, visit, lambda _, carry: carry, piece, carry)
        next_row = row + (local + end - first >= blocks * num_heads).astype(jnp.int32)
        return at + end - first, next_row, carry

    return lax.fori_loop(0, plan.pipes[number, 1], step, (number * share, plan.pipes[number, 0], carry))[2]
