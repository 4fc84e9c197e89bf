"""Ragged paged attention: checks the arguments, writes the new KV, attends."""

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention import reference
from pallas_kernels.ragged_paged_attention.rows import RaggedRows

# f[L, P, 2 (k, v), K, S, D]: head-major inside a page, so that one head's tokens are contiguous to read.
type KVPages = jax.Array


def kv_pages_struct(
    num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_size: int, dtype: jnp.dtype
) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the pages of a whole model. Page 0 is the trash page that padding tokens write to."""
    return jax.ShapeDtypeStruct((num_layers, num_pages, 2, num_kv_heads, page_size, head_size), dtype)


def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_pages: KVPages,
    layer: jax.Array | int,
    rows: RaggedRows,
    *,
    scale: float,
    soft_cap: float | None = None,
    window: jax.Array | int,
) -> tuple[jax.Array, KVPages]:
    """Causal attention of every token to its row's KV up to itself, after this step's KV is in the pages.

    q f[T, H, D], k and v f[T, K, D] with H a multiple of K; query head h reads KV head h // (H // K).
    A query sees the `window` positions that end at its own (`NO_WINDOW`: all). `soft_cap` c bends the scaled logits
    to c * tanh(logits / c) (Gemma 2, arXiv 2408.00118). Returns f[T, H, D], with arbitrary finite values for padding
    tokens, and the pages; donate `kv_pages` for the write to be in place.

    Raises ValueError for shapes and dtypes that do not agree.
    """
    num_tokens, num_heads, head_size = q.shape
    _, _, two, num_kv_heads, _, page_head_size = kv_pages.shape
    if k.shape != (num_tokens, num_kv_heads, head_size) or v.shape != k.shape or page_head_size != head_size:
        raise ValueError(
            f"q {q.shape}, k {k.shape}, v {v.shape} do not fit pages of {num_kv_heads} heads of size {page_head_size}"
        )
    if two != 2:
        raise ValueError(f"pages must hold keys and values, 2 along axis 2, not {two}")
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    if not q.dtype == k.dtype == v.dtype == kv_pages.dtype:
        raise ValueError(f"dtypes differ: q {q.dtype}, k {k.dtype}, v {v.dtype}, pages {kv_pages.dtype}")
    if rows.token_rows.shape != (num_tokens,):
        raise ValueError(f"rows describe {rows.token_rows.shape[0]} tokens, q has {num_tokens}")
    kv_pages = reference.write_kv(k, v, kv_pages, layer, rows)
    return reference.attend(q, kv_pages, layer, rows, scale=scale, soft_cap=soft_cap, window=window), kv_pages
