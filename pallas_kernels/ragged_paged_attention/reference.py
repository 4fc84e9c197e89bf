"""Ragged paged attention in XLA: the oracle for the kernels, and the implementation on CPU.

Both paths are flash attention (online softmax in float32, arXiv 2205.14135) over chunks of pages, with loop bounds
that come from the data, so the work follows the real context lengths and nothing of shape [rows, max_len] exists:

    decode    a work list of (row, chunk) pairs, as many pairs a loop step as there are rows: one long row among
              short ones takes the steps of its chunks spread over all lanes, not one step for each
    prefill   tiles of one row's queries; loops over tiles, then over the chunks that a tile sees
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ragged_paged_attention.quantize import KVQuantization
from pallas_kernels.ragged_paged_attention.rows import RaggedRows

# Tokens of KV per loop step. XLA CPU pays some 10 us per step for its small ops: 16 rows x 256 tokens x 8 layers
# took 5.1 ms with 256 (one step), 5.7 ms with 64.
CHUNK_TOKENS = 256
# Queries per prefill tile: large enough for the matmul rate, small enough that a short prompt wastes little.
TILE_QUERIES = 64

MASKED = -1e30  # finite, so that a row with nothing to see yields zeros and not NaN


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
) -> jax.Array:
    """Attends with q f[T, H, D] to the pages, which hold this step's KV already: f[T, H, value_size].

    Where pages have a `quantization`, keys and values are their codes, times `scales` f32[L, P, K, N, S] if tokens have
    some.
    """
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads, page_size = kv_pages.shape[2:4]
    grouped = (q * jnp.asarray(scale, q.dtype)).reshape(num_tokens, num_kv_heads, -1, head_size)
    chunk_pages = max(1, min(CHUNK_TOKENS // page_size, rows.page_table.shape[1]))
    padding = -rows.page_table.shape[1] % chunk_pages
    table = jnp.pad(rows.page_table, ((0, 0), (0, padding)))
    sinks, slopes = (
        None if of_heads is None else of_heads.astype(jnp.float32).reshape(num_kv_heads, -1)
        for of_heads in (sinks, slopes)
    )
    context = _Context(
        kv_pages, scales, layer, table, chunk_pages, soft_cap, window, sinks, slopes, value_size, quantization
    )
    shape = num_tokens, num_heads, value_size
    if rows.decode_only:
        return _decode(grouped, rows.kv_lens, context).reshape(shape).astype(q.dtype)
    query_lens = rows.query_lens()
    decodes = query_lens == 1
    firsts = rows.query_starts[:-1]
    out = _prefill(grouped, rows, jnp.where(decodes, 0, query_lens), context)
    decoded = _decode(grouped[firsts], jnp.where(decodes, rows.kv_lens, 0), context)
    out = out.at[jnp.where(decodes, firsts, num_tokens)].set(decoded, mode="drop")
    return out.reshape(shape).astype(q.dtype)


class _Softmax(NamedTuple):
    """The online softmax of queries [N, K, M]: the largest logit so far, the denominator and the weighted values."""

    peak: jax.Array
    total: jax.Array
    values: jax.Array  # f32[N, K, M, D]

    @classmethod
    def start(cls, shape: tuple[int, ...], value_size: int) -> "_Softmax":
        return cls(jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, value_size)))

    def merge(self, parts: "_Softmax", rows: jax.Array, owned: jax.Array) -> "_Softmax":
        """Folds in `parts`, each into its row of `rows` i32[lanes]; `owned` bool[N, lanes] says the same.

        The sums are matmuls and not scatters, so their order is fixed and every device gives the same bits. A part with
        NaN makes its own row NaN and no other, although the matmul multiplies it by the zeros of all the others.
        """
        peak = jnp.maximum(self.peak, jnp.where(owned[:, :, None, None], parts.peak, MASKED).max(axis=1))
        decay, parts_decay = jnp.exp(self.peak - peak), jnp.exp(parts.peak - peak[rows])
        total, values = parts.total * parts_decay, parts.values * parts_decay[..., None]
        sick = ~jnp.isfinite(total + values.sum(axis=-1))
        total, values = jnp.where(sick, 0, total), jnp.where(sick[..., None], 0, values)
        add = partial(jnp.tensordot, owned.astype(jnp.float32), axes=1, precision=lax.Precision.HIGHEST)
        total = jnp.where((owned[:, :, None, None] & sick).any(axis=1), jnp.nan, self.total * decay + add(total))
        return _Softmax(peak, total, self.values * decay[..., None] + add(values))

    def result(self, sinks: jax.Array | None) -> jax.Array:
        """Returns the weighted mean. `sinks` f32[K, G] are logits with weight and without value; M counts G fastest."""
        if sinks is None:
            return self.values / jnp.maximum(self.total, 1e-30)[..., None]
        sinks = jnp.tile(sinks, self.peak.shape[-1] // sinks.shape[-1])
        peak = jnp.maximum(self.peak, sinks)
        decay = jnp.exp(self.peak - peak)
        return self.values * (decay / (self.total * decay + jnp.exp(sinks - peak)))[..., None]


@dataclass(frozen=True)
class _Context:
    """The KV of one layer, read chunk by chunk, and the rules for what a query sees of it."""

    kv_pages: jax.Array
    scales: jax.Array | None  # f32[L, P, K, N, S]: of keys, and of values but for latents
    layer: jax.Array | int
    table: jax.Array  # i32[R, a multiple of chunk_pages]
    chunk_pages: int
    soft_cap: float | None
    window: jax.Array | int
    sinks: jax.Array | None  # f32[K, G]
    slopes: jax.Array | None  # f32[K, G]
    value_size: int
    quantization: KVQuantization | None

    @property
    def chunk(self) -> int:
        """The number of tokens in a chunk."""
        return self.chunk_pages * self.kv_pages.shape[3]

    def start(self, queries: jax.Array) -> _Softmax:
        """Returns the softmax of queries f[N, K, M, D] that have seen nothing yet."""
        return _Softmax.start(queries.shape[:-1], self.value_size)

    def first_chunk(self, position: jax.Array) -> jax.Array:
        """Returns the first chunk that a query at `position` sees any of: pages before its window are not read."""
        return jnp.maximum(position + 1 - self.window, 0) // self.chunk

    def attend(
        self, q: jax.Array, rows: jax.Array, chunks: jax.Array, positions: jax.Array, state: _Softmax
    ) -> _Softmax:
        """Folds a chunk of one row, `rows` and `chunks` i32[N], into each of the N online softmaxes `state` of
        q f[N, K, M, D], whose M queries are at `positions` i32[N, M] (-1: sees nothing)."""
        count, num_kv_heads, _, head_size = q.shape
        columns = chunks[:, None] * self.chunk_pages + jnp.arange(self.chunk_pages, dtype=jnp.int32)
        pages = self.table[rows[:, None], columns]
        kv = self.kv_pages[self.layer, pages]  # [N, pages, K, S, W]
        width = kv.shape[-1]
        kv = kv.transpose(0, 2, 1, 3, 4).reshape(count, num_kv_heads, self.chunk, width)
        k, v = kv[..., :head_size], kv[..., width - self.value_size :]
        if self.quantization is not None:
            of_keys = of_values = None
            if self.scales is not None:
                found = jnp.moveaxis(self.scales[self.layer, pages], 1, 3)  # [N, K, 2, pages, S]
                found = found.reshape(count, num_kv_heads, -1, self.chunk)
                of_keys, of_values = found[:, :, 0], found[:, :, -1]
            k, v = (self.quantization.decoded(x, q.dtype, of) for x, of in ((k, of_keys), (v, of_values)))
        at = (chunks[:, None] * self.chunk + jnp.arange(self.chunk, dtype=jnp.int32))[:, None]
        seen = (at <= positions[:, :, None]) & (at > positions[:, :, None] - self.window)
        logits = jnp.einsum("nkmd,nksd->nkms", q, k, preferred_element_type=jnp.float32)
        if self.soft_cap is not None:
            logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
        if self.slopes is not None:
            slopes = jnp.tile(self.slopes, logits.shape[2] // self.slopes.shape[1])  # M counts G fastest
            logits = logits + slopes[:, :, None] * (at - positions[:, :, None]).astype(jnp.float32)[:, None]
        logits = jnp.where(seen[:, None], logits, MASKED)
        peak = jnp.maximum(state.peak, logits.max(axis=-1))
        weights = jnp.where(seen[:, None], jnp.exp(logits - peak[..., None]), 0.0)
        decay = jnp.exp(state.peak - peak)
        # A page past the context or before the window may hold anything, NaN included, and 0 * NaN is NaN.
        first, last = positions.min(axis=1)[:, None] - self.window, positions.max(axis=1)[:, None]
        v = jnp.where(((at[:, 0] > first) & (at[:, 0] <= last))[:, None, :, None], v, 0)
        values = jnp.einsum("nkms,nksd->nkmd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return _Softmax(peak, state.total * decay + weights.sum(axis=-1), state.values * decay[..., None] + values)


def _decode(q: jax.Array, kv_lens: jax.Array, context: _Context) -> jax.Array:
    """Attends with q f[R, K, G, D], one query a row at the end of `kv_lens` i32[R] positions (0: no row)."""
    num_rows, _, group, _ = q.shape
    last = kv_lens - 1
    first_chunks = context.first_chunk(last)
    counts = jnp.where(kv_lens > 0, last // context.chunk + 1 - first_chunks, 0)
    ends = jnp.cumsum(counts)
    lanes = jnp.arange(num_rows, dtype=jnp.int32)

    def fold(step: jax.Array, state: _Softmax) -> _Softmax:
        pairs = step * num_rows + lanes
        rows = jnp.searchsorted(ends, pairs, side="right", method="compare_all").astype(jnp.int32)
        owned = rows == lanes[:, None]  # bool[R, lanes]; a lane after the end of the list belongs to no row
        rows = jnp.minimum(rows, num_rows - 1)
        chunks = first_chunks[rows] + pairs - (ends[rows] - counts[rows])
        positions = jnp.where(pairs < ends[-1], last[rows], -1)
        queries = q[rows]
        part = context.attend(
            queries, rows, chunks, jnp.repeat(positions[:, None], group, axis=1), context.start(queries)
        )
        return state.merge(part, rows, owned)

    return lax.fori_loop(0, -(-ends[-1] // num_rows), fold, context.start(q)).result(context.sinks)


def _prefill(q: jax.Array, rows: RaggedRows, query_lens: jax.Array, context: _Context) -> jax.Array:
    """Attends with q f[T, K, G, D] for the rows with `query_lens` > 0. Other tokens get arbitrary finite values."""
    num_tokens, num_kv_heads, group, head_size = q.shape
    tile = min(TILE_QUERIES, num_tokens)
    tile_ends = jnp.cumsum(-(-query_lens // tile))
    q = jnp.pad(q, ((0, tile), (0, 0), (0, 0), (0, 0)))

    def attend_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.searchsorted(tile_ends, index, side="right", method="compare_all").astype(jnp.int32)
        done = (index - tile_ends[row]) * tile + -(-query_lens[row] // tile) * tile  # queries of this row before
        first = rows.query_starts[row] + done
        queries = lax.dynamic_slice_in_dim(q, first, tile)
        queries = queries.transpose(1, 0, 2, 3).reshape(1, num_kv_heads, tile * group, head_size)
        start = rows.kv_lens[row] - query_lens[row] + done
        last = jnp.minimum(start + tile, rows.kv_lens[row]) - 1
        positions = jnp.minimum(start + jnp.repeat(jnp.arange(tile, dtype=jnp.int32), group), last)

        def fold(chunk: jax.Array, state: _Softmax) -> _Softmax:
            return context.attend(queries, row[None], chunk[None], positions[None], state)

        state = lax.fori_loop(context.first_chunk(start), last // context.chunk + 1, fold, context.start(queries))
        values = state.result(context.sinks).reshape(num_kv_heads, tile, group, -1).transpose(1, 0, 2, 3)
        # The tile may reach beyond the row's end. The next row is written later and overwrites that part.
        return lax.dynamic_update_slice_in_dim(out, values, first, 0)

    out = jnp.zeros((num_tokens + tile, num_kv_heads, group, context.value_size), jnp.float32)
    return lax.fori_loop(0, tile_ends[-1], attend_tile, out)[:num_tokens]
