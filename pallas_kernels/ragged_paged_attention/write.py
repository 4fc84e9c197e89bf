"""Writing a step's keys and values into their pages: for backends whose kernel does not write them itself."""

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.rows import RaggedRows


def write_kv(k: jax.Array, v: jax.Array, kv_pages: jax.Array, layer: jax.Array | int, rows: RaggedRows) -> jax.Array:
    """The pages with k and v f[T, K, D] at the tokens' positions; padding goes to page 0. In place when donated."""
    page_size = kv_pages.shape[3]
    pages = rows.page_table[rows.token_rows, rows.positions // page_size]
    pages = jnp.where(rows.is_real(), pages, 0)
    new = jnp.concatenate([k, v], axis=-1).astype(kv_pages.dtype)
    return kv_pages.at[layer, pages, :, rows.positions % page_size].set(new)
