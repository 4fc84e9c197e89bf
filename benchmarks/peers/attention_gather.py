"""The simplest paged attention in plain JAX: it gathers pages into dense keys and values, and then attends."""

import jax
import jax.numpy as jnp

from benchmarks.kernels.dense import require_plain
from jaxvllm.bench.kernels.inputs import Inputs
from pallas_kernels.ragged_paged_attention import KVPages, RaggedRows
from pallas_kernels.ragged_paged_attention.write import write_kv


def attend(inputs: Inputs, kv_pages: KVPages, layer: jax.Array | int, rows: RaggedRows) -> tuple[jax.Array, KVPages]:
    """Runs one layer for decode rows or one whole prompt, and writes this step's KV as ours does.

    Raises NotImplementedError for other rows, and for more than causal attention.
    """
    case = inputs.case
    require_plain(case)
    num_rows, row = len(case.rows), case.rows[0]
    if not case.is_decode and (num_rows > 1 or not case.num_tokens == row.query_len == row.kv_len):
        raise NotImplementedError("rows of one query, or one row of a whole prompt")
    assert inputs.v is not None and isinstance(kv_pages, jax.Array), "pages in the dtype of queries"
    kv_pages = write_kv(jnp.concatenate([inputs.k, inputs.v], axis=-1), kv_pages, layer, rows)
    longest = max(row.kv_len for row in case.rows)
    pages = kv_pages[layer, rows.page_table[:, : -(-longest // case.page_size)]]  # [R, pages, K, S, 2 D]
    kv = pages.swapaxes(2, 3).reshape(num_rows, -1, case.num_kv_heads, 2 * case.head_size)[:, :longest]
    out = jax.nn.dot_product_attention(
        inputs.q.reshape(num_rows, -1, case.num_heads, case.head_size),
        kv[..., : case.head_size],
        kv[..., case.head_size :],
        scale=case.scale,
        is_causal=not case.is_decode,
        key_value_seq_lengths=rows.kv_lens if case.is_decode else None,
        implementation="xla",
    )
    return out.reshape(inputs.q.shape), kv_pages
