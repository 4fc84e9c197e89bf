"""Joins the partial results of split KV, always in the order of the positions: with a CTA for each (row, head)."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import (
    TILE,
    Ref,
    interpretation,
)
from pallas_kernels.ragged_paged_attention.gpu.pieces import Partials
from pallas_kernels.ragged_paged_attention.gpu.tile import (
    LOG2E,
    MASKED,
    AttentionBuild,
    Softmax,
    Where,
)
from pallas_kernels.ragged_paged_attention.gpu.work_plan import DecodePlan, LatentPlan

WARPGROUP_THREADS = 128
# The pieces that `join_pieces` reads at a time: one after the other, each would cost the latency of memory.
JOINED_PIECES = 8

# Weighted values f32[G, D], then the largest logarithm and the sum of the weights, with a scalar for each head.
type _Joined = tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]


def empty_out(q: jax.Array, attention: AttentionBuild) -> jax.Ref:
    """Returns memory for the outputs of q f[T, H, D], [T, K, G or more, D], which `combine` fills.

    The threads of a warpgroup share the heads of a group evenly.
    """
    group, head_size = attention.group, attention.head_size
    out_heads = next(heads for heads in (group, group + 1) if heads * head_size % WARPGROUP_THREADS == 0)
    shape = len(q), attention.num_kv_heads, out_heads, head_size
    return jax.empty_ref(jax.ShapeDtypeStruct(shape, q.dtype))


def combine(
    partials: Partials,
    plan: DecodePlan,
    where: Where,
    sinks: jax.Array | None,
    out: jax.Ref,
    attention: AttentionBuild,
    *,
    query_rows: int,
) -> None:
    """Writes the rows' outputs into out f[T, K, G or more, D], zeros where a row has no KV. sinks f32[H] or None.

    The heads of a query begin `query_rows` rows after those of the query before in a slot of the partials. The heads
    after the first G hold arbitrary values afterwards.
    """
    num_heads, group, out_heads = attention.num_kv_heads, attention.group, out.shape[2]
    # Without sinks no code reads their operand: see `slopes_of`.
    first_peaks = where.layer if sinks is None else sinks.reshape(num_heads, group)
    shape = (out_heads, attention.head_size)
    elements = out_heads * attention.head_size // WARPGROUP_THREADS
    layout = plgpu.Layout.WG_STRIDED(shape, next(size for size in (4, 2, 1) if elements % size == 0))

    def kernel(values: Ref, peaks: Ref, rows: Ref, line: Ref, window: Ref, first_peaks: Ref, out: Ref) -> None:
        row, head = lax.axis_index("row"), lax.axis_index("head")
        share = line[0]
        before, kv_len, num_queries, token = (rows[row, i] for i in range(4))
        blocks = lax.div(kv_len + (attention.block - 1), attention.block)
        first = before * num_heads + head * blocks
        seen = jnp.maximum(kv_len - num_queries - window[0] + 1, 0)
        begin = lax.div(first + lax.div(seen, attention.block), share)
        end = jnp.where(blocks > 0, lax.div(first + blocks - 1, share) + 1, begin)
        head_of = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 0), layout)

        def spread(scalars: tuple[jax.Array, ...]) -> jax.Array:
            """Spreads each head's scalar over the head's elements."""
            spread = jnp.full(shape, scalars[0], jnp.float32)
            for index, scalar in enumerate(scalars[1:], 1):
                spread = jnp.where(head_of >= index, scalar, spread)
            return spread

        @pl.loop(0, num_queries)
        def _query(query: jax.Array) -> None:
            def add(pipe: jax.Array, state: _Joined) -> _Joined:
                joined, highest, total = state
                slot = row * num_heads + head + pipe
                peak = tuple(peaks[slot, query * group + g] for g in range(group))
                top = tuple(jnp.maximum(a, b) for a, b in zip(highest, peak, strict=True))
                decay = tuple(jnp.exp2(a - b) for a, b in zip(highest, top, strict=True))
                weight = tuple(jnp.exp2(a - b) for a, b in zip(peak, top, strict=True))
                total = tuple(t * d + w for t, d, w in zip(total, decay, weight, strict=True))
                part = plgpu.load(values.at[slot, pl.ds(query * query_rows, out_heads)], layout=layout)
                return joined * spread(decay) + part * spread(weight), top, total

            if sinks is None:
                highest, total = (jnp.float32(MASKED),) * group, (jnp.float32(0),) * group
            else:
                highest = tuple(first_peaks[head, g] * LOG2E for g in range(group))
                total = (jnp.float32(1),) * group
            start = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
            joined, _, total = lax.fori_loop(begin, end, add, (start, highest, total))
            inverse = tuple(1.0 / jnp.maximum(t, 1e-30) for t in total)
            out[token + query, head] = (joined * spread(inverse)).astype(out.dtype)

    plgpu.kernel(
        kernel,
        grid=(len(plan.rows), num_heads),
        grid_names=("row", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpretation(attention.interpret),
    )(*partials, plan.rows, plan.line, where.window, first_peaks, out)


def join_pieces(pieces: jax.Ref, peaks: jax.Ref, plan: LatentPlan, out: jax.Ref, attention: AttentionBuild) -> None:
    """Writes the rows of out f[rows, V] whose tiles `gpu.latent` has cut, always in the order of the positions.

    pieces f[slots * 64, V] are normalised, and peaks f32[slots, 64] are log2 of their denominators.
    """
    size, group = out.shape[1], attention.group
    elements = size // WARPGROUP_THREADS
    layout = plgpu.Layout.WG_STRIDED((size,), next(count for count in (4, 2, 1) if elements % count == 0))

    def kernel(pieces: Ref, peaks: Ref, joins: Ref, out: Ref) -> None:
        pipe, head = lax.axis_index("pipe"), lax.axis_index("head")
        first_row, rows, last = (joins[pipe, i] for i in range(3))
        count = last - pipe + 2  # the first one is of the pipe before

        @pl.loop(0, lax.div(rows, group))
        def _query(query: jax.Array) -> None:
            row = query * group + head

            def add(step: jax.Array, state: Softmax) -> Softmax:
                joined, highest, total = state
                numbers = [step * JOINED_PIECES + i for i in range(JOINED_PIECES)]
                taken = [jnp.minimum(number, count - 1) for number in numbers]
                slots = [2 * (pipe - 1 + number) + (number == 0).astype(jnp.int32) for number in taken]
                peak = [
                    jnp.where(number < count, peaks[slot, row], MASKED)
                    for number, slot in zip(numbers, slots, strict=True)
                ]
                parts = [plgpu.load(pieces.at[slot * TILE + row], layout=layout) for slot in slots]
                top = highest
                for logarithm in peak:
                    top = jnp.maximum(top, logarithm)
                decay = jnp.exp2(highest - top)
                joined, total = joined * decay, total * decay
                for logarithm, part in zip(peak, parts, strict=True):
                    weight = jnp.exp2(logarithm - top)
                    joined, total = joined + part.astype(jnp.float32) * weight, total + weight
                return joined, top, total

            start = plgpu.layout_cast(jnp.zeros((size,), jnp.float32), layout)
            state = (start, jnp.float32(MASKED), jnp.float32(0.0))
            steps = lax.div(count + (JOINED_PIECES - 1), JOINED_PIECES)
            joined, _, total = lax.fori_loop(0, steps, add, state)
            out[first_row + row] = (joined * (1.0 / total)).astype(out.dtype)

    plgpu.kernel(
        kernel,
        grid=(len(plan.joins), group),
        grid_names=("pipe", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpretation(attention.interpret),
    )(pieces, peaks, plan.joins, out)
