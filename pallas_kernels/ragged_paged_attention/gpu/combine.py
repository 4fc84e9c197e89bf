"""Joins the partial results of split KV, with a CTA for each (row, head), always in the order of the positions."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention.gpu.decode import Partials
from pallas_kernels.ragged_paged_attention.gpu.tile import LOG2E, MASKED, AttentionBuild, Ref, interpretation
from pallas_kernels.ragged_paged_attention.gpu.work_plan import DecodePlan

WARPGROUP_THREADS = 128

# Weighted values f32[G, D], then the largest logarithm and the sum of the weights, with a scalar for each head.
type _Joined = tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]


def combine(
    partials: Partials,
    plan: DecodePlan,
    where: jax.Array,
    sinks: jax.Array | None,
    out: jax.Ref,
    attention: AttentionBuild,
    *,
    queries: int,
) -> None:
    """Writes the rows' outputs into out f[T, K, G or more, D], zeros where a row has no KV. sinks f32[H] or None.

    where i32[2]: layer and window. The heads after the first G hold arbitrary values afterwards.
    """
    num_heads, group, out_heads = attention.num_kv_heads, attention.group, out.shape[2]
    first_peaks = np.full((num_heads, group), MASKED, np.float32) if sinks is None else sinks.reshape(num_heads, group)
    shape = (out_heads, attention.head_size)
    elements = out_heads * attention.head_size // WARPGROUP_THREADS
    layout = plgpu.Layout.WG_STRIDED(shape, next(size for size in (4, 2, 1) if elements % size == 0))

    def kernel(values: Ref, peaks: Ref, rows: Ref, line: Ref, where: Ref, first_peaks: Ref, out: Ref) -> None:
        row, head = lax.axis_index("row"), lax.axis_index("head")
        share, window = line[0], where[1]
        before, kv_len, num_queries, token = (rows[row, i] for i in range(4))
        blocks = lax.div(kv_len + (attention.block - 1), attention.block)
        first = before * num_heads + head * blocks
        seen = jnp.maximum(kv_len - num_queries - window + 1, 0)
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
                part = plgpu.load(values.at[slot * queries + query], layout=layout)
                return joined * spread(decay) + part * spread(weight), top, total

            highest = tuple(first_peaks[head, g] * LOG2E for g in range(group))
            total = (jnp.float32(0.0 if sinks is None else 1.0),) * group
            start = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
            joined, _, total = lax.fori_loop(begin, end, add, (start, highest, total))
            inverse = tuple(1.0 / jnp.maximum(t, 1e-30) for t in total)
            out[token + query, head] = (joined * spread(inverse)).astype(out.dtype)

    plgpu.kernel(
        kernel,
        grid=(len(plan.rows), num_heads),
        grid_names=("row", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpretation(attention),
    )(*partials, plan.rows, plan.line, where, first_peaks, out)
