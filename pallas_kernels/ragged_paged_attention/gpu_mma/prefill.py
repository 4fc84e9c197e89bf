"""The kernel for rows with many queries: a block of threads computes one tile of queries for one KV head.

The hardware starts blocks in the order of their numbers, as soon as there is room, so the long tiles come first.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import CopyUnit, Ref, interpretation
from pallas_kernels.ragged_paged_attention.gpu.combine import WARPGROUP_THREADS
from pallas_kernels.ragged_paged_attention.gpu.pieces import Piece
from pallas_kernels.ragged_paged_attention.gpu.tile import AttentionBuild, Softmax, Where, scaled_rows
from pallas_kernels.ragged_paged_attention.gpu.work_plan import PrefillPlan
from pallas_kernels.ragged_paged_attention.gpu_mma.copies import BlockCopies, copy_barriers
from pallas_kernels.ragged_paged_attention.gpu_mma.fold import REDUCTION_BYTES, PieceFold, fold_memory


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
    unit: CopyUnit,
    has_float8: bool,
) -> None:
    """Writes the planned tiles' attention, of q f[K, T * G and M more, D] over kv f[L * P * K, S, 2 * D], into out
    f[T, K, G or more, D].

    A tile of a row without KV is written as zeros. sinks and slopes f32[H] or None, scales f32[L * P * K * 2, S] of
    tokens or None. `has_float8` says that the hardware converts float8.
    """
    num_heads, out_heads = attention.num_kv_heads, out.shape[2]
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
        **barriers: Ref,
    ) -> None:
        number = lax.axis_index("unit")
        tile, head = lax.div(number, num_heads), lax.rem(number, num_heads)

        @pl.when(tile < num_tiles[0])
        def _() -> None:
            row, token, queries, position, _ = (tiles[tile, i] for i in range(5))
            # The tile's last query sees nothing after itself. Padding is at negative positions, and sees nothing.
            seen, seen_end = jnp.maximum(position - window[0] + 1, 0), jnp.maximum(position + queries, 0)
            begin, end = lax.div(seen, attention.block), lax.div(seen_end + (attention.block - 1), attention.block)
            piece = Piece(row, head, begin, end, seen_end, queries, token, window[0], seen, tile)

            def fold(**memory: Ref) -> Softmax:
                copies = BlockCopies(attention, unit, kv, scales, table, layer[0], piece, memory | barriers)
                return PieceFold(attention, copies, slope_rows, has_float8)(q)

            summed, peak, total = pl.run_scoped(fold, **fold_memory(attention))
            if sinks is not None:
                sink = plgpu.load(sink_rows.at[head], layout=attention.layout.reduce(1), optimized=False)
                total = total + jnp.exp2(sink - peak)
            result = scaled_rows(summed, attention.inverse(jnp.maximum(total, 1e-30)))
            store = partial(_store, attention, result.astype(attention.dtype), piece, out)
            # It takes the place of the blocks.
            staging = plgpu.SMEM((attention.rows + out_heads - attention.group, attention.head_size), attention.dtype)
            pl.run_scoped(store, staging=staging)

    plgpu.kernel(
        kernel,
        scratch_types=copy_barriers(attention, unit),
        grid=(len(plan.tiles) * num_heads,),
        grid_names=("unit",),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=REDUCTION_BYTES),
        interpret=interpretation(attention.interpret),
    )(
        q,
        kv,
        where.layer if scales is None else scales,
        table,
        *plan,
        *where,
        where.layer if sink_rows is None else sink_rows,
        attention.slopes_of(slopes, where),
        out,
    )


def _store(attention: AttentionBuild, result: jax.Array, piece: Piece, out: Ref, staging: Ref) -> None:
    """Writes a tile's result f[M, D] query by query, because rows after the piece's last query are another row's."""
    shape = (out.shape[2], attention.head_size)
    elements = shape[0] * shape[1] // WARPGROUP_THREADS
    layout = plgpu.Layout.WG_STRIDED(shape, next(size for size in (8, 4, 2, 1) if elements % size == 0))
    staging[pl.ds(0, attention.rows)] = result

    @pl.loop(0, piece.queries)
    def _(index: jax.Array) -> None:
        heads = staging.at[pl.ds(index * attention.group, shape[0])]
        out[piece.token + index, piece.head] = plgpu.load(heads, layout=layout)
