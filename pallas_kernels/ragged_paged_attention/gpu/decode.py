"""The GPU kernel for rows with few queries. It is bound by memory, so every multiprocessor reads an equal share of KV.

A CTA has up to two pipes, each a warp that fetches and a warpgroup that computes, each with its own share of the plan
(`gpu.work_plan.DecodePlan`). While one computes, the other's copies are in flight. For every piece of a (row, head),
a pipe leaves the normalised output and the logarithm of the denominator, and `gpu.combine` joins them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

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
from pallas_kernels.ragged_paged_attention.gpu.pieces import Partials, Piece, slots_of, walk_pieces
from pallas_kernels.ragged_paged_attention.gpu.tile import (
    AttentionBuild,
    Softmax,
    Where,
)
from pallas_kernels.ragged_paged_attention.gpu.work_plan import DecodePlan

# Two warpgroups compute and one fetches. There are three even where only one computes, because the compiler then gives
# each thread 168 registers at the start, from which `set_max_registers` can move either way.
THREADS = 3


type _Walk = Callable[..., tuple[jax.Array, ...]]


def decode_memory(attention: AttentionBuild) -> dict[str, Any]:
    """Returns the kernel's shared memory, except for the barriers of its queries."""
    pipes = attention.warpgroups
    return {
        **stage_memory(attention, pipes),
        **matrix_memory(attention),
        "staging": plgpu.SMEM((pipes, TILE, LANES), jnp.float32),
        "staged_peaks": plgpu.SMEM((pipes, TILE), jnp.float32),
    }


def decode(
    q: jax.Array,
    kv: jax.Array,
    table: jax.Array,
    plan: DecodePlan,
    where: Where,
    slopes: jax.Array | None,
    scales: jax.Array | None,
    attention: AttentionBuild,
    *,
    queries: int,
    out_heads: int,
) -> Partials:
    """Attends with q f[T, K, G, D] to kv f[L * P * K, S, 2 * D], piece by piece.

    slopes f32[H] or None, scales f32[L * P * K * 2, S] of tokens or None. A row of the plan has at most `queries`
    queries. The values have `out_heads` >= G heads, of which the first G count. `attention.warpgroups` of the plan's
    pipes share a CTA.
    """
    pipes, slots = attention.warpgroups, slots_of(plan, attention.num_kv_heads)

    def kernel(
        q: Ref,
        kv: Ref,
        scales: Ref,
        table: Ref,
        rows: Ref,
        starts: Ref,
        line: Ref,
        layer: Ref,
        window: Ref,
        slope_rows: Ref,
        values: Ref,
        peaks: Ref,
        **memory: Ref,
    ) -> None:
        cta, thread = lax.axis_index("cta"), lax.axis_index("warpgroup")

        def walk[C](pipe: jax.Array, visit: Callable[[Piece, C], C], carry: C) -> C:
            return walk_pieces(attention, DecodePlan(rows, starts, line), window, cta * pipes + pipe, visit, carry)

        @pl.when(thread < pipes)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            _consume(thread, walk, attention, queries, slope_rows, values, peaks, memory)
            plgpu.wait_smem_to_gmem(0)

        def fetch(warp: jax.Array) -> None:
            _produce(warp, walk, attention, queries, layer[0], q, kv, scales, table, memory)

        fetch_in(thread == THREADS - 1, fetch, warps=pipes, registers=40)

    of_queries, peaks = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((slots * queries, out_heads, attention.head_size), jnp.float32),
            jax.ShapeDtypeStruct((slots, TILE), jnp.float32),
        ),
        scratch_types={
            **decode_memory(attention),
            "q_here": barriers(queries, pipes),
            "q_free": barriers(1, pipes),
        },
        grid=(len(plan.pipes) // pipes,),
        grid_names=("cta",),
        num_threads=THREADS,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
        interpret=interpretation(attention.interpret),
    )(
        q,
        kv,
        # Without scales no code reads their operand: see `slopes_of`.
        where.layer if scales is None else scales,
        table,
        plan.rows,
        plan.pipes,
        plan.line,
        *where,
        attention.slopes_of(slopes, where),
    )
    return Partials(of_queries.reshape(slots, queries * out_heads, attention.head_size), peaks)


def _produce(
    pipe: jax.Array,
    walk: _Walk,
    attention: AttentionBuild,
    queries: int,
    layer: jax.Array,
    q: Ref,
    kv: Ref,
    scales: Ref,
    table: Ref,
    memory: dict[str, Ref],
) -> None:
    """Runs the fetching warp, which is ahead of the computing warpgroup by up to as many blocks as there are stages."""
    into, here, free = (memory[name].at[pipe] for name in ("q_columns", "q_here", "q_free"))
    into = into.at[0]

    def visit(piece: Piece, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        done, parts = carry
        for columns in query_columns(attention):

            @pl.when(parts > 0)
            def _() -> None:
                plgpu.barrier_wait(free)

            fetch_queries(attention, q, columns, piece.token, piece.head, piece.queries, into, here, queries)
            parts = parts + 1
        span = Span(piece.row, piece.head, piece.begin, piece.end, piece.kv_len)
        return fetch_blocks(attention, kv, scales, table, layer, span, memory, (pipe,), done), parts

    done, parts = walk(pipe, visit, (jnp.int32(0), jnp.int32(0)))

    @pl.when(parts > 0)
    def _() -> None:
        plgpu.barrier_wait(free)

    drain(attention, memory, (pipe,), done)


def _consume(
    pipe: jax.Array,
    walk: _Walk,
    attention: AttentionBuild,
    queries: int,
    slope_rows: Ref,
    values: Ref,
    peaks: Ref,
    memory: dict[str, Ref],
) -> None:
    """Runs the computing warpgroup: it folds each block into the online softmax of its piece, and stores the result."""
    matrix = MatrixProducts(attention, {name: memory[name].at[pipe] for name in matrix_memory(attention)})
    staging, staged_peaks = memory["staging"].at[pipe], memory["staged_peaks"].at[pipe]
    group, stages = attention.group, attention.stages

    def visit(piece: Piece, carry: tuple[jax.Array]) -> tuple[jax.Array]:
        (done,) = carry
        tile = matrix.take_queries(memory["q_here"].at[pipe], memory["q_free"].at[pipe], unknown_zero(piece.row))

        def fold_block(block: jax.Array, state: tuple[jax.Array, Softmax]) -> tuple[jax.Array, Softmax]:
            done, softmax = state
            slot, first = lax.rem(done, stages), block * attention.block
            kv, zero = memory["blocks"].at[pipe, slot], unknown_zero(block)
            plgpu.barrier_wait(memory["block_here"].at[pipe, slot])
            products = matrix.multiply_keys(tile, kv, zero)
            products = attention.scale_columns(products, scales_in(attention, memory, (pipe, slot), 0))
            position = piece.kv_len - piece.queries
            logits = attention.lean(attention.logits(products), slope_rows, piece.head, first, position)
            logits = attention.mask(logits, first, position, piece.window)
            weights, softmax = attention.fold(logits, softmax)
            of_values = scales_in(attention, memory, (pipe, slot), 1)
            weights = attention.scale_seen(weights, of_values, first, piece.seen, piece.kv_len)
            block_values = matrix.values(kv, zero)

            @pl.when((first < piece.seen) | (first + attention.block > piece.kv_len))
            def _() -> None:
                zero_unseen(block_values, first, piece.seen, piece.kv_len)

            summed = matrix.multiply_values(softmax[0], weights.astype(attention.dtype), block_values)
            plgpu.barrier_arrive(memory["block_free"].at[pipe, slot])
            return done + 1, (summed, *softmax[1:])

        start = (done, attention.start())
        done, (summed, peak, total) = lax.fori_loop(piece.begin, piece.end, fold_block, start)
        inverse = attention.inverse(total)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged_peaks[...] = peak + jnp.log2(total)
        for column in range(0, attention.head_size, LANES):
            part = summed[:, column : column + LANES]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staging[...] = part * lax.broadcast_in_dim(inverse, part.shape, [0])
            plgpu.commit_smem()
            for index in range(queries):

                @pl.when(index < piece.queries)
                def _(index: int = index, column: int = column) -> None:
                    into = values.at[piece.slot * queries + index, pl.ds(0, group), pl.ds(column, LANES)]
                    plgpu.copy_smem_to_gmem(staging.at[pl.ds(index * group, group)], into)

        plgpu.copy_smem_to_gmem(staged_peaks, peaks.at[piece.slot])
        return (done,)

    walk(pipe, visit, (jnp.int32(0),))
