"""The GPU kernel for rows with many queries. It is bound by the matrix units, so two warpgroups take turns at them.

A CTA computes one tile of the plan (`gpu.work_plan.PrefillPlan`) and KV head after another. A warp fetches; each
warpgroup has half of the tile's queries, and both read the same blocks of KV. While one multiplies, the other computes
its softmax (FlashAttention-3, arXiv 2407.08608, as in jax's own Mosaic GPU attention).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chips import GpuChip
from pallas_kernels.mosaic_gpu import (
    LANES,
    TILE,
    Ref,
    barriers,
    fetch_in,
    interpretation,
)
from pallas_kernels.ragged_paged_attention.gpu.fetch import (
    Span,
    drain,
    fetch_blocks,
    fetch_queries,
    query_columns,
    scales_in,
    stage_memory,
)
from pallas_kernels.ragged_paged_attention.gpu.matrix import MatrixProducts, matrix_memory, unknown_zero, zero_unseen
from pallas_kernels.ragged_paged_attention.gpu.tile import (
    AttentionBuild,
    Softmax,
    Where,
)
from pallas_kernels.ragged_paged_attention.gpu.work_plan import PrefillPlan

HALVES = 2  # warpgroups that compute


class _Unit(NamedTuple):
    """One tile and one KV head: blocks begin .. end - 1 of the row's KV."""

    row: jax.Array
    head: jax.Array
    token: jax.Array  # of the first query
    queries: jax.Array
    position: jax.Array  # of the first query
    kv_len: jax.Array
    window: jax.Array
    seen: jax.Array  # the first position that any query sees
    begin: jax.Array
    end: jax.Array


type _Walk = Callable[..., tuple[jax.Array, ...]]


def prefill_memory(attention: AttentionBuild) -> dict[str, Any]:
    """Returns the kernel's shared memory."""
    return {
        **stage_memory(attention),
        **matrix_memory(attention),
        "staging": plgpu.SMEM((HALVES, TILE, LANES), attention.dtype),
        "q_here": barriers(attention.tile_queries, HALVES),
        "q_free": barriers(1, HALVES),
        "turn": plgpu.Barrier(num_arrivals=HALVES),
    }


def prefill(
    q: jax.Array,
    kv: jax.Array,
    table: jax.Array,
    plan: PrefillPlan,
    where: Where,
    sinks: jax.Array | None,
    slopes: jax.Array | None,
    scales: jax.Array | None,
    out: jax.Ref,
    attention: AttentionBuild,
    *,
    chip: GpuChip,
) -> None:
    """Writes the planned tiles' attention, of q f[T, K, G, D] over kv f[L * P * K, S, 2 * D], into out f[T, K, G, D].

    A tile of a row without KV is written as zeros. sinks and slopes f32[H] or None, scales f32[L * P * K * 2, S] of
    tokens or None. out may have more than G heads for
    each KV head.
    """
    num_heads = attention.num_kv_heads
    assert attention.warpgroups == HALVES
    ctas = min(chip.num_sms, len(plan.tiles) * num_heads)
    # Without sinks, or scales, no code reads their operand: see `slopes_of`.
    sink_rows = None if sinks is None else attention.rows_of(sinks)

    def kernel(
        q: Ref,
        kv: Ref,
        scales: Ref,
        table: Ref,
        tiles: Ref,
        num_tiles: Ref,
        layer: Ref,
        window: Ref,
        sink_rows: Ref,
        slope_rows: Ref,
        out: Ref,
        **memory: Ref,
    ) -> None:
        cta, thread = lax.axis_index("cta"), lax.axis_index("warpgroup")

        def walk[C](visit: Callable[[_Unit, C], C], carry: C) -> C:
            """Visits the CTA's units from left to right, then from right to left, so that long ones are spread."""
            units = num_tiles[0] * num_heads

            def step(wave: jax.Array, carry: C) -> C:
                column = jnp.where(lax.rem(wave, 2) == 0, cta, ctas - 1 - cta)
                number = wave * ctas + column

                def visit_unit(carry: C) -> C:
                    tile, head = lax.div(number, num_heads), lax.rem(number, num_heads)
                    row, token, num_queries, position, kv_len = (tiles[tile, i] for i in range(5))
                    # Read for each unit: a register for all units is one that the compiler spills.
                    own_window = window[0]
                    seen = jnp.maximum(position - own_window + 1, 0)
                    begin = lax.div(seen, attention.block)
                    end = lax.div(position + num_queries + (attention.block - 1), attention.block)
                    unit = _Unit(row, head, token, num_queries, position, kv_len, own_window, seen, begin, end)
                    return visit(unit, carry)

                return lax.cond(number < units, visit_unit, lambda carry: carry, carry)

            return lax.fori_loop(0, lax.div(units + (ctas - 1), ctas), step, carry)

        @pl.when(thread < HALVES)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            of_sinks = None if sinks is None else sink_rows
            _consume(thread, walk, attention, of_sinks, slope_rows, out, memory)
            plgpu.wait_smem_to_gmem(0)

        fetch_in(thread == HALVES, lambda _: _produce(walk, attention, layer[0], q, kv, scales, table, memory))

    plgpu.kernel(
        kernel,
        scratch_types=prefill_memory(attention),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=HALVES + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
        interpret=interpretation(attention.interpret),
    )(
        q,
        kv,
        where.layer if scales is None else scales,
        table,
        plan.tiles,
        plan.num_tiles,
        *where,
        where.layer if sink_rows is None else sink_rows,
        attention.slopes_of(slopes, where),
        out,
    )


def _produce(
    walk: _Walk,
    attention: AttentionBuild,
    layer: jax.Array,
    q: Ref,
    kv: Ref,
    scales: Ref,
    table: Ref,
    memory: dict[str, Ref],
) -> None:
    """Runs the fetching warp: the next unit's queries and blocks are on their way while this unit is computed."""

    def visit(unit: _Unit, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        done, parts = carry
        for columns in query_columns(attention):
            for half in range(HALVES):

                @pl.when(parts > 0)
                def _(half: int = half) -> None:
                    plgpu.barrier_wait(memory["q_free"].at[half + unknown_zero(unit.row)])

                first = half * attention.tile_queries
                count = jnp.clip(unit.queries - first, 0, attention.tile_queries)
                into, here = memory["q_columns"].at[half, 0], memory["q_here"].at[half]
                fetch_queries(
                    attention, q, columns, unit.token + first, unit.head, count, into, here, attention.tile_queries
                )
            parts = parts + 1
        span = Span(unit.row, unit.head, unit.begin, unit.end, unit.kv_len)
        return fetch_blocks(attention, kv, scales, table, layer, span, memory, (), done), parts

    done, parts = walk(visit, (jnp.int32(0), jnp.int32(0)))

    @pl.when(parts > 0)
    def _() -> None:
        for half in range(HALVES):
            plgpu.barrier_wait(memory["q_free"].at[half + unknown_zero(done)])

    drain(attention, memory, (), done)


def _consume(
    half: jax.Array,
    walk: _Walk,
    attention: AttentionBuild,
    sink_rows: Ref | None,
    slope_rows: Ref,
    out: Ref,
    memory: dict[str, Ref],
) -> None:
    """Runs a computing warpgroup, which has half of the tile's queries and all of its blocks."""
    matrix = MatrixProducts(attention, {name: memory[name].at[half] for name in matrix_memory(attention)})
    turn, staging, stages = memory["turn"], memory["staging"].at[half], attention.stages
    first_query = half * attention.tile_queries

    def take_turns() -> None:
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    def visit(unit: _Unit, carry: tuple[jax.Array]) -> tuple[jax.Array]:
        (done,) = carry
        queries = matrix.take_queries(memory["q_here"].at[half], memory["q_free"].at[half], unknown_zero(unit.row))

        @pl.when(unit.begin < unit.end)
        def _() -> None:
            plgpu.barrier_wait(memory["block_here"].at[lax.rem(done, stages)])

        # Warpgroup 1 stays one turn behind warpgroup 0.
        pl.when(half == 1)(take_turns)

        def fold_block(block: jax.Array, state: tuple[jax.Array, Softmax]) -> tuple[jax.Array, Softmax]:
            done, softmax = state
            slot, first = lax.rem(done, stages), block * attention.block
            kv, zero = memory["blocks"].at[slot], unknown_zero(block)
            products = matrix.multiply_keys(queries, kv, zero, meanwhile=take_turns)
            products = attention.scale_columns(products, scales_in(attention, memory, (slot,), 0))
            position = unit.position + first_query
            logits = attention.lean(attention.logits(products), slope_rows, unit.head, first, position)
            logits = attention.mask(logits, first, position, unit.window)
            weights, softmax = attention.fold(logits, softmax)
            of_values = scales_in(attention, memory, (slot,), 1)
            weights = attention.scale_seen(weights, of_values, first, unit.seen, unit.kv_len)
            weights, softmax = lax.optimization_barrier((weights.astype(attention.dtype), softmax))
            plgpu.barrier_arrive(turn)
            values = matrix.values(kv, zero)
            plgpu.barrier_wait(turn)
            edge = (first < unit.seen) | (first + attention.block > unit.kv_len)
            # Both warpgroups read the values, but zeroing once is enough: warpgroup 1 reads them a turn later.
            mine = True if attention.converts else half == 0

            @pl.when(edge & mine)
            def _() -> None:
                zero_unseen(values, first, unit.seen, unit.kv_len)

            def wait_for_next_block() -> None:
                @pl.when(block + 1 < unit.end)
                def _() -> None:
                    plgpu.barrier_wait(memory["block_here"].at[lax.rem(done + 1, stages)])

            summed = matrix.multiply_values(softmax[0], weights, values, meanwhile=wait_for_next_block)
            plgpu.barrier_arrive(memory["block_free"].at[slot])
            return done + 1, (summed, *softmax[1:])

        start = (done, attention.start())
        done, (summed, peak, total) = lax.fori_loop(unit.begin, unit.end, fold_block, start)
        pl.when(half == 0)(take_turns)
        if sink_rows is not None:
            sink = plgpu.load(sink_rows.at[unit.head], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            total = total + jnp.exp2(sink - peak)
        inverse = attention.inverse(jnp.maximum(total, 1e-30))
        for column in range(0, attention.head_size, LANES):
            part = summed[:, column : column + LANES]
            part = part * lax.broadcast_in_dim(inverse, part.shape, [0])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staging[...] = part.astype(attention.dtype)
            plgpu.commit_smem()

            # The outputs are stored query by query, because those after the row's last one belong to another row.
            @pl.loop(0, jnp.clip(unit.queries - first_query, 0, attention.tile_queries))
            def _(index: jax.Array, column: int = column) -> None:
                source = staging.at[pl.ds(index * attention.group, attention.group)]
                query = out.at[unit.token + first_query + index, unit.head]
                plgpu.copy_smem_to_gmem(source, query.at[pl.ds(0, attention.group), pl.ds(column, LANES)])

        return (done,)

    walk(visit, (jnp.int32(0),))
