"""Writes a step's keys and values into their pages, for backends whose kernel does not, and reads them back."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ragged_paged_attention.rows import RaggedRows


def write_kv(new: jax.Array, kv_pages: jax.Array, layer: jax.Array | int, rows: RaggedRows) -> jax.Array:
    """Writes `new` f[T, K, W] at the tokens' positions, and padding to page 0. This is in place when donated."""
    page_size = kv_pages.shape[3]
    pages = _pages_of(rows, page_size)
    new = new.astype(kv_pages.dtype)
    # For windows of several heads XLA:TPU transposes all the pages: 3 GiB of copies for 1 GiB of pages (compiled HLO,
    # v5e). Elsewhere such windows make fewer and larger writes: a layer of 512 tokens x 8 heads took 538 us on CPU and
    # not 1184.
    return lax.platform_dependent(
        kv_pages, new, pages, rows.positions % page_size, jnp.int32(layer), tpu=_write_heads, default=_write_tokens
    )


def write_scales(new: jax.Array, scales: jax.Array, layer: jax.Array | int, rows: RaggedRows) -> jax.Array:
    """Writes the scales `new` f32[T, K, N] of the tokens into `scales` f32[L, P, K, N, S], as `write_kv` does keys."""
    page_size = scales.shape[4]
    return scales.at[layer, _pages_of(rows, page_size), :, :, rows.positions % page_size].set(new)


def read_kv(kv_pages: jax.Array, layer: jax.Array | int, rows: RaggedRows) -> jax.Array:
    """Returns the keys and values f[T, K, W] that the pages hold of this step's tokens."""
    page_size = kv_pages.shape[3]
    return kv_pages[layer, _pages_of(rows, page_size), :, rows.positions % page_size]


def _pages_of(rows: RaggedRows, page_size: int) -> jax.Array:
    """Returns the page of each token, and the trash page for padding."""
    pages = rows.page_table[rows.token_rows, rows.positions // page_size]
    return jnp.where(rows.is_real(), pages, 0)


def _write_tokens(
    kv_pages: jax.Array, new: jax.Array, pages: jax.Array, offsets: jax.Array, layer: jax.Array
) -> jax.Array:
    return kv_pages.at[layer, pages, :, offsets].set(new)


def _write_heads(
    kv_pages: jax.Array, new: jax.Array, pages: jax.Array, offsets: jax.Array, layer: jax.Array
) -> jax.Array:
    heads = jnp.arange(kv_pages.shape[2])
    return kv_pages.at[layer, pages[:, None], heads, offsets[:, None]].set(new)
