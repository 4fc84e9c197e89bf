"""The call of the CPU's kernel: what it is given."""

from math import e, log2

import jax
import jax.numpy as jnp

from pallas_kernels.chips import CpuChip
from pallas_kernels.cpu.handlers import Handler
from pallas_kernels.ragged_paged_attention.cpu.kernel import attention
from pallas_kernels.ragged_paged_attention.quantize import KVQuantization
from pallas_kernels.ragged_paged_attention.rows import RaggedRows

LOG2_E = log2(e)


def attend(
    q: jax.Array,
    kv_pages: jax.Array,
    layer: jax.Array | int,
    rows: RaggedRows,
    *,
    scale: float,
    soft_cap: float | None,
    window: jax.Array | int,
    sinks: jax.Array | None,
    slopes: jax.Array | None,
    value_size: int,
    quantization: KVQuantization | None,
    scales: jax.Array | None,
    chip: CpuChip,
) -> jax.Array:
    """Attends with q f[T, H, D] to the pages, which hold this step's KV already: f[T, H, value_size].

    All sizes must be multiples of 16. Where pages have a `quantization`, keys and values are their codes, times
    `scales` f32[L, P, K, N, S] if tokens have some.

    Each row gives the same bits whatever other rows there are, however many threads compute them, and wherever its
    pages lie. Where no token of a tile is needed, its output is zeros.
    """
    if (quantization is None and q.dtype != kv_pages.dtype) or q.shape[-1] % 16 or value_size % 16:
        raise ValueError(f"the cpu kernel needs pages of q's dtype and heads of 16s, got {q} and pages {kv_pages}")
    integers = jnp.stack([jnp.asarray(layer, jnp.int32), jnp.asarray(window, jnp.int32)])
    # The kernel's softmax is of powers of two.
    floats = jnp.asarray([scale * LOG2_E, (soft_cap or 0.0) * LOG2_E], jnp.float32)
    sinks, slopes, scales = (
        jnp.zeros(0, jnp.float32) if x is None else x.astype(jnp.float32) * factor
        for x, factor in ((sinks, LOG2_E), (slopes, LOG2_E), (scales, 1))
    )
    is_needed = jnp.zeros(0, jnp.int32) if rows.is_needed is None else rows.is_needed.astype(jnp.int32)
    kv_dtype = q.dtype.name if quantization is None else quantization.codes
    scaled = "by-token" if scales.ndim == 5 else "by-head"
    handler = Handler(attention, (q.dtype.name, kv_dtype, scaled), chip)
    result: jax.Array = handler(
        jax.ShapeDtypeStruct((*q.shape[:-1], value_size), q.dtype),
        q, kv_pages, rows.page_table, rows.query_starts, rows.kv_lens, integers, floats, sinks, slopes, is_needed,
        scales,
    )  # fmt: skip
    return result
