"""Attention to a few positions of each context, which an index chooses (DeepSeek V3.2, arXiv 2512.02556, section 2.1).

The key of a token has, before the part that attention reads, one small key for the index. A query scores every position
that it sees by the index alone, and attends to the best ones. All of it is plain XLA, a few queries at a time, so that
the most that exists of a context is its scores.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.ragged_paged_attention.quantize import KVQuantization
from pallas_kernels.ragged_paged_attention.reference import MASKED
from pallas_kernels.ragged_paged_attention.rows import RaggedRows

TILE_QUERIES = 8  # of which 2,048 chosen positions of 576 numbers are 19 MB in bfloat16
CHUNK_TOKENS = 1024  # scored in one step


class IndexQueries(NamedTuple):
    """The queries of a step to the index, each of which chooses `top_k` positions."""

    q: jax.Array  # f[T, heads of the index, D]
    weights: jax.Array  # f32[T, heads of the index]: what the score of each head counts
    top_k: int


class ChosenPositions(NamedTuple):
    """The positions of its own row that each query of a step attends to, whoever has chosen them."""

    positions: jax.Array  # i32[T, k]: -1 stands for none


def scores_of(index: IndexQueries, keys: jax.Array) -> jax.Array:
    """Returns the scores f32[T, N] of positions with the keys f[T, N, D]."""
    q, keys = index.q.astype(jnp.float32), keys.astype(jnp.float32)
    of_heads = jnp.einsum("thd,tnd->thn", q, keys, precision=lax.Precision.HIGHEST)
    return jnp.einsum("thn,th->tn", jax.nn.relu(of_heads), index.weights, precision=lax.Precision.HIGHEST)


def choose(
    index: IndexQueries,
    kv_pages: jax.Array,
    layer: jax.Array | int,
    rows: RaggedRows,
    *,
    head_size: int,
    quantization: KVQuantization | None,
    scales: jax.Array | None,
) -> ChosenPositions:
    """Chooses among the positions that each query sees, over pages that hold this step's keys of `head_size` already.

    The first numbers of a key, as many as those of a query of the index, are its key there. Where keys have `scales`
    of their own, as `ScaledPages` has them, these are multiplied.
    """
    pages = _IndexedPages(kv_pages, layer, index.q.shape[-1], head_size, quantization, scales)
    positions = jnp.where(rows.is_real(), rows.positions, -1)

    def choose_tile(index_q: jax.Array, weights: jax.Array, row: jax.Array, position: jax.Array) -> jax.Array:
        best = IndexQueries(index_q, weights, index.top_k)
        chosen, is_chosen = pages.best(best, rows.page_table[row], position)
        return jnp.where(is_chosen, chosen, -1)

    return ChosenPositions(_over_tiles(choose_tile, index.q, index.weights, rows.token_rows, positions))


def attend(
    q: jax.Array,
    chosen: ChosenPositions,
    kv_pages: jax.Array,
    layer: jax.Array | int,
    rows: RaggedRows,
    *,
    scale: float,
    latent_size: int,
    index_size: int,
    quantization: KVQuantization | None,
    scales: jax.Array | None,
) -> jax.Array:
    """Attends with q f[T, H, D] over pages of one KV head, which hold this step's keys already: f[T, H, latent_size].

    The first `index_size` numbers of q and of a key are not read.
    """
    pages = _IndexedPages(kv_pages, layer, index_size, q.shape[-1], quantization, scales)

    def attend_tile(q: jax.Array, chosen: jax.Array, row: jax.Array) -> jax.Array:
        is_chosen = chosen >= 0
        kv = jnp.where(is_chosen[..., None], pages.rows_at(rows.page_table[row], jnp.maximum(chosen, 0), q.dtype), 0)
        logits = jnp.einsum("thd,tkd->thk", q * jnp.asarray(scale, q.dtype), kv, preferred_element_type=jnp.float32)
        logits = jnp.where(is_chosen[:, None], logits, MASKED)
        shares = jnp.where(is_chosen[:, None], jnp.exp(logits - logits.max(-1, keepdims=True)), 0)
        shares = shares / jnp.maximum(shares.sum(-1, keepdims=True), 1e-30)
        values = kv[..., -latent_size:]
        return jnp.einsum("thk,tkv->thv", shares.astype(kv.dtype), values, preferred_element_type=jnp.float32)

    return _over_tiles(attend_tile, q[..., index_size:], chosen.positions, rows.token_rows).astype(q.dtype)


def _over_tiles(compute: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Returns what `compute` returns for each query, of arrays [T, ..], of which it is given a few queries at a time.

    What it computes for the queries of padding, which are copies of the last one, is left out.
    """
    num_tokens = len(arrays[0])
    tile = min(TILE_QUERIES, num_tokens)

    def tiles(x: jax.Array) -> jax.Array:
        widths = ((0, -num_tokens % tile), *[(0, 0)] * (x.ndim - 1))
        return jnp.pad(x, widths, mode="edge").reshape(-1, tile, *x.shape[1:])

    out = lax.map(lambda given: compute(*given), tuple(map(tiles, arrays)))
    return out.reshape(-1, *out.shape[2:])[:num_tokens]


class _IndexedPages(NamedTuple):
    """The pages of a layer, with what their rows have."""

    kv_pages: jax.Array  # f[L, P, 1, S, W]
    layer: jax.Array | int
    index_size: int
    head_size: int  # the last so many numbers of a row are a key
    quantization: KVQuantization | None  # of all keys, which then are codes
    scales: jax.Array | None  # of keys, as `ScaledPages` has them

    def best(self, index: IndexQueries, table: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the best positions i32[t, k] of each query, and bool[t, k], true for those that it sees.

        `table` i32[t, pages] has the pages of each query's row. A query at position -1 sees nothing.
        """
        page_size = self.kv_pages.shape[3]
        chunk_pages = max(1, min(CHUNK_TOKENS // page_size, table.shape[1]))
        table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % chunk_pages)))
        chunk, longest = chunk_pages * page_size, table.shape[1] * page_size
        begin = self.kv_pages.shape[4] - self.head_size

        def score(number: jax.Array, scores: jax.Array) -> jax.Array:
            pages = lax.dynamic_slice_in_dim(table, number * chunk_pages, chunk_pages, axis=1)
            keys = self.kv_pages[self.layer, pages, 0, :, begin : begin + self.index_size]
            scales = None if self.scales is None else self.scales[self.layer, pages, 0, 0, :page_size]
            found = scores_of(index, self._numbers(keys, jnp.float32, scales).reshape(len(table), chunk, -1))
            return lax.dynamic_update_slice_in_dim(scores, found, number * chunk, axis=1)

        scores = jnp.full((len(table), longest), -jnp.inf, jnp.float32)
        scores = lax.fori_loop(0, positions.max() // chunk + 1, score, scores)
        scores = jnp.where(jnp.arange(longest) <= positions[:, None], scores, -jnp.inf)
        best, chosen = lax.top_k(scores, min(index.top_k, longest))
        return chosen, best > -jnp.inf

    def rows_at(self, table: jax.Array, positions: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Returns what attention reads of the keys at `positions` i32[t, k] of each row: f[t, k, D]."""
        page_size = self.kv_pages.shape[3]
        pages = jnp.take_along_axis(table, positions // page_size, axis=1, mode="clip")
        begin = self.kv_pages.shape[4] - self.head_size + self.index_size
        offsets = positions % page_size
        scales = None if self.scales is None else self.scales[self.layer, pages, 0, 0, offsets]
        return self._numbers(self.kv_pages[self.layer, pages, 0, offsets, begin:], dtype, scales)

    def _numbers(self, part: jax.Array, dtype: DTypeLike, scales: jax.Array | None) -> jax.Array:
        """Returns a part of the pages as numbers: where it has codes, in `dtype` and times the scales of tokens."""
        return part if self.quantization is None else self.quantization.decoded(part, dtype, scales)
