"""The kernel for rows with few queries. It is bound by memory, so every block of threads reads an equal share of KV.

A multiprocessor has several blocks of one warpgroup, so that one computes while others wait for memory or for each
other's warps. Each walks through the pieces of its share (`gpu.pieces`), and `gpu.combine` joins what they leave.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import CopyUnit, Ref, interpretation
from pallas_kernels.ragged_paged_attention.gpu.pieces import Partials, Piece, slots_of, walk_pieces
from pallas_kernels.ragged_paged_attention.gpu.tile import AttentionBuild, Where, scaled_rows
from pallas_kernels.ragged_paged_attention.gpu.work_plan import DecodePlan
from pallas_kernels.ragged_paged_attention.gpu_mma.copies import BlockCopies, copy_barriers
from pallas_kernels.ragged_paged_attention.gpu_mma.fold import REDUCTION_BYTES, PieceFold, fold_memory


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
    unit: CopyUnit,
    has_float8: bool,
) -> Partials:
    """Attends with q f[K, T * G and M more, D] to kv f[L * P * K, S, 2 * D], piece by piece.

    slopes f32[H] or None, scales f32[L * P * K * 2, S] of tokens or None. A row of the plan has at most as many queries
    as a tile. The rows of the partials are those of a tile. `has_float8` says that the hardware converts float8.
    """

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
        def visit(piece: Piece, nothing: tuple[()]) -> tuple[()]:
            copies = BlockCopies(attention, unit, kv, scales, table, layer[0], piece, memory)
            summed, peak, total = PieceFold(attention, copies, slope_rows, has_float8)(q)
            values[piece.slot] = scaled_rows(summed, attention.inverse(total))
            peaks[piece.slot] = peak + jnp.log2(total)
            return nothing

        walk_pieces(attention, DecodePlan(rows, starts, line), window, lax.axis_index("share"), visit, ())

    slots = slots_of(plan, attention.num_kv_heads)
    return Partials(
        *plgpu.kernel(
            kernel,
            out_type=(
                jax.ShapeDtypeStruct((slots, attention.rows, attention.head_size), jnp.float32),
                jax.ShapeDtypeStruct((slots, attention.rows), jnp.float32),
            ),
            scratch_types={**fold_memory(attention), **copy_barriers(attention, unit)},
            grid=(len(plan.pipes),),
            grid_names=("share",),
            compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=REDUCTION_BYTES),
            interpret=interpretation(attention.interpret),
        )(
            q,
            kv,
            # Without scales no code reads their operand: see `slopes_of`.
            where.layer if scales is None else scales,
            table,
            *plan,
            *where,
            attention.slopes_of(slopes, where),
        )
    )
