"""Makes the arrays of a case: random, with the sizes of a serving engine, and the same for every paged contender."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.bench.kernels.counts import Work
from jaxvllm.bench.kernels.device import cache_bytes, memory_bytes
from pallas_kernels.backend import Backend
from pallas_kernels.chips import GIB
from pallas_kernels.ragged_paged_attention import KVPages, RaggedRows, RowLayout, ScaledPages, codes_of, kv_pages_struct
from pallas_kernels.ragged_paged_attention.cases import RaggedCase

# Random pages are made once and repeated through the pool, which may have tens of gigabytes. Their number is prime, so
# that every layer and row has them in another order.
RANDOM_PAGES = 61
MAX_LAYERS = 128
LAYERS_BYTES = {"cpu": 0, "gpu": 2 * GIB, "tpu": 2 * GIB}  # half a millisecond or more of work a dispatch
MEMORY_SHARE = 0.4  # of the device for pages: peers need room for a copy of them
QUANTIZED_SCALE = 0.02  # keys and values of int8 and float8 pages then have about the size of others


def layers_of(case: RaggedCase, dtype: jnp.dtype, device: jax.Device) -> int:
    """Returns how many layers' KV to go through in turn, so that none is in a cache when its turn comes.

    Together they are several times the cache, as far as the device's memory goes.
    """
    layer_bytes = Work.of(case, dtype).bytes
    wanted = max(4 * cache_bytes(device), LAYERS_BYTES[device.platform])
    possible = int(MEMORY_SHARE * memory_bytes(device)) // layer_bytes
    return max(1, min(math.ceil(wanted / layer_bytes), possible, MAX_LAYERS))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["q", "k", "v", "page_table", "starts", "query_lens", "sinks", "slopes", "kv_scales", "plan"],
    meta_fields=["case"],
)
@dataclass(frozen=True)
class Inputs:
    """The arguments of a layer of `case`, beside its pages."""

    case: RaggedCase
    q: jax.Array  # f[T, H, D]
    k: jax.Array  # f[T, K, D]
    v: jax.Array | None  # f[T, K, D]; None: the end of k
    page_table: jax.Array  # i32[R, max_pages]
    starts: jax.Array  # i32[R]
    query_lens: jax.Array  # i32[R]
    sinks: jax.Array | None  # f32[H]
    slopes: jax.Array | None  # f32[H]
    kv_scales: jax.Array | None  # f32[2, K]
    plan: Any = None  # of the rows, made once for all layers

    @classmethod
    def random(cls, case: RaggedCase, dtype: jnp.dtype) -> Self:
        """Makes normal values. Rows own pages from anywhere in the pool."""
        T, H, K, D = case.num_tokens, case.num_heads, case.num_kv_heads, case.head_size
        keys = jax.random.split(jax.random.key(2), 4)
        pages = np.random.default_rng(3).permutation(np.arange(1, case.num_pages, dtype=np.int32))
        table = np.zeros((len(case.rows), case.max_pages), np.int32)
        for row, entries in zip(case.rows, table, strict=True):
            owned = -(-row.kv_len // case.page_size)
            entries[:owned], pages = pages[:owned], pages[owned:]
        return cls(
            case=case,
            q=jax.random.normal(keys[0], (T, H, D), dtype),
            k=jax.random.normal(keys[1], (T, K, D), dtype),
            v=None if case.latent_size else jax.random.normal(keys[2], (T, K, D), dtype),
            page_table=jnp.asarray(table),
            starts=jnp.asarray([row.kv_len - row.query_len for row in case.rows], jnp.int32),
            query_lens=jnp.asarray([row.query_len for row in case.rows], jnp.int32),
            sinks=jax.random.normal(keys[3], (H,), jnp.float32) if case.sinks else None,
            slopes=jnp.geomspace(0.5, 2**-8, H, dtype=jnp.float32) if case.slopes else None,
            kv_scales=jnp.full((2, K), QUANTIZED_SCALE, jnp.float32) if case.kv_dtype and not case.by_token else None,
        )

    def rows(self) -> RaggedRows:
        return RaggedRows.build(self.page_table, self.starts, self.query_lens, self.case.num_tokens)

    def in_float32(self) -> Self:
        """Returns exactly the same values in float32."""
        q, k = self.q.astype(jnp.float32), self.k.astype(jnp.float32)
        return replace(self, q=q, k=k, v=None if self.v is None else self.v.astype(jnp.float32))


def random_pages(case: RaggedCase, dtype: jnp.dtype, layers: int, backend: Backend) -> KVPages:
    """Makes pages [L, P, K, S, W], with the same keys and values however `backend` pads them."""
    stored = jnp.dtype(case.kv_dtype or dtype)
    sizes = layers, case.num_pages, case.page_size, case.num_kv_heads, case.head_size
    struct = kv_pages_struct(*sizes, stored, backend, case.latent_size, case.quantization)
    layout, codes = RowLayout.of(case.head_size, case.latent_size, backend), codes_of(struct)
    page = _random_page_values(codes.shape[2:4], case.head_size, layout, stored).view(codes.dtype)
    pages: jax.Array = _repeat(page, *codes.shape[:2])
    if not isinstance(struct, ScaledPages):
        return pages
    return ScaledPages(pages, jnp.full(struct.scales.shape, QUANTIZED_SCALE, jnp.float32))


# This is apart from the pool, whose shape differs in every case, because the generator takes the longest to compile.
@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _random_page_values(page: tuple[int, ...], head_size: int, layout: RowLayout, dtype: jnp.dtype) -> jax.Array:
    """Makes the values of RANDOM_PAGES pages, [.., K, S, W], with zeros where a head is padded."""
    values = jax.random.normal(jax.random.key(4), (RANDOM_PAGES, *page, 2, head_size), jnp.float32)
    if dtype.itemsize == 1:
        values = values / QUANTIZED_SCALE
    if dtype == jnp.int8:
        values = jnp.clip(jnp.round(values), -127, 127)
    k, v = values[..., 0, :].astype(dtype), values[..., 1, :].astype(dtype)
    return layout.row(k, None if layout.is_latent else v)


@partial(jax.jit, static_argnums=(1, 2))
def _repeat(values: jax.Array, layers: int, pages: int) -> jax.Array:
    return values[jnp.arange(layers * pages) % RANDOM_PAGES].reshape(layers, pages, *values.shape[1:])
