"""Attention of whole sequences that are side by side in an array, for training: without a cache, with derivatives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp

from jaxvllm.models.forms.differentiable import with_derivatives_of
from jaxvllm.models.layer_input import LayerInput
from jaxvllm.models.layer_memory import KeysAndValues
from jaxvllm.models.spec import ModelSpec
from pallas_kernels.backend import Backend
from pallas_kernels.ragged_paged_attention import NO_WINDOW, IndexQueries, RaggedRows

# Tokens of a page that a kernel reads. The order of its sums does not depend on it.
PAGE_SIZE = 16
# Queries whose scores are in memory at once, for each head: as many as give a matrix unit enough to do.
BLOCK_QUERIES = 512
MASKED = -1e30  # finite, so that a query that sees nothing has no NaN in its derivatives

type Attending = Callable[..., jax.Array]
# The keys and values of the layers that others read, by the memory of the layer.
type ReadLater = Mapping[str, tuple[jax.Array, jax.Array | None]]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["positions", "segments", "rows", "order", "places"],
    meta_fields=["backend"],
)
@dataclass(frozen=True, eq=False)
class SequenceAttention:
    """The attention of B rows of S tokens. A token sees the tokens before it that have its row and its segment."""

    positions: jax.Array  # i32[B, S]; within a segment they go up by one
    segments: jax.Array  # i32[B, S]; 0 is padding
    # The rows as kernels take them, which have pages 1, 2, and so on; the tokens i32[B * S], padding last; and the
    # place of each token in this order. None: XLA attends.
    rows: RaggedRows | None
    order: jax.Array | None
    places: jax.Array | None
    backend: Backend

    @classmethod
    def of(cls, positions: jax.Array, segments: jax.Array, is_one_each: bool, backend: Backend) -> Self:
        """Returns the attention of these tokens.

        is_one_each: whether each row has one segment, which may begin and end anywhere. Then the kernels of `backend`
        attend, as in the engine, and only the derivatives are XLA's. Otherwise XLA does all of it.
        """
        if not is_one_each or backend.kind == "reference":
            return cls(positions, segments, None, None, None, backend)
        B, S = segments.shape
        each = -(-S // PAGE_SIZE)
        table = 1 + jnp.arange(B * each, dtype=jnp.int32).reshape(B, each)
        lengths = (segments > 0).sum(1, dtype=jnp.int32)
        rows = RaggedRows.build(table, jnp.zeros(B, jnp.int32), lengths, B * S)
        order = jnp.argsort((segments == 0).reshape(-1), stable=True)
        return cls(positions, segments, rows, order, jnp.argsort(order, stable=True), backend)

    @staticmethod
    def begin(spec: ModelSpec, num_tokens: int, dtype: Any) -> ReadLater:
        """Returns what the first layer is given: zeros in the place of keys and values that layers read later."""
        read = [spec.layers[layer.reads].memory for layer in spec.layers if layer.reads is not None]
        zeros: dict[str, tuple[jax.Array, jax.Array | None]] = {}
        for memory in read:
            assert isinstance(memory, KeysAndValues), "only keys and values are read by other layers"
            one = jnp.zeros((num_tokens, memory.num_kv_heads, memory.head_size), dtype)
            zeros[repr(memory)] = one, None if memory.latent_size is not None else one
        return zeros

    def attend(
        self,
        kv: ReadLater,
        given: LayerInput,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        *,
        scale: float,
        soft_cap: float | None,
        sinks: jax.Array | None = None,
        slopes: jax.Array | None = None,
        kv_scales: jax.Array | None = None,
        index: IndexQueries | Literal["last"] | None = None,
    ) -> tuple[jax.Array, ReadLater]:
        """Is the layers' `Attend`. Keys and values are not rounded, whatever the engine's pages hold."""
        assert index is None and isinstance(given.memory, KeysAndValues), "a model that is trained has neither"
        if k is None:
            k, v = kv[repr(given.memory)]
        elif repr(given.memory) in kv:
            kv = {**kv, repr(given.memory): (k, v)}
        options: dict[str, Any] = {"memory": given.memory, "scale": scale, "soft_cap": soft_cap}
        window = None
        if isinstance(given.window, int):
            options["known_window"] = given.window
        else:
            window = given.window
        # What is traced is an argument: the derivatives are made when the trace of a layer is over.
        arguments: tuple[Any, ...] = self, q, k, v, sinks, slopes, window
        by_xla: Attending = partial(SequenceAttention._by_xla, **options)
        if self.rows is None:
            return by_xla(*arguments), kv
        return with_derivatives_of(partial(SequenceAttention._by_kernel, **options), by_xla)(*arguments), kv

    def _by_xla(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        sinks: jax.Array | None,
        slopes: jax.Array | None,
        window: jax.Array | None,
        *,
        memory: KeysAndValues,
        scale: float,
        soft_cap: float | None,
        known_window: int = NO_WINDOW,
    ) -> jax.Array:
        """Attends with q [T, H, D] to k [T, K, D]: [T, H, size of a value]. Padding gets zeros."""
        if v is None:
            assert memory.latent_size is not None, "only latents have no values of their own"
            v = k[..., -memory.latent_size :]
        B, S = self.positions.shape
        K = k.shape[1]
        k, v = (x.reshape(B, S, K, -1) for x in (k, v))
        queries = q.reshape(B, S, K, -1, q.shape[-1])

        def of_block(q: jax.Array, positions: jax.Array, segments: jax.Array) -> jax.Array:
            scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k, preferred_element_type=jnp.float32) * scale
            if soft_cap is not None:
                scores = jnp.tanh(scores / soft_cap) * soft_cap
            behind = positions[:, :, None] - self.positions[:, None]
            if slopes is not None:
                of_heads = slopes.astype(jnp.float32).reshape(K, -1, 1, 1)
                scores = scores - of_heads * behind.astype(jnp.float32)[:, None, None]
            seen = (
                (segments[:, :, None] == self.segments[:, None])
                & (behind >= 0)
                & (behind < (known_window if window is None else window))
            )
            if memory.chunk is not None:
                seen &= positions[:, :, None] // memory.chunk == self.positions[:, None] // memory.chunk
            scores = jnp.where(seen[:, None, None], scores, MASKED)
            if sinks is not None:
                own = sinks.astype(jnp.float32).reshape(1, K, -1, 1, 1)
                scores = jnp.concatenate([scores, jnp.broadcast_to(own, (*scores.shape[:-1], 1))], axis=-1)
            weights = jax.nn.softmax(scores, axis=-1)[..., :S].astype(v.dtype)
            return jnp.einsum("bkgqs,bskd->bqkgd", weights, v, preferred_element_type=jnp.float32).astype(q.dtype)

        count = max(1, S // BLOCK_QUERIES)
        if S % count:
            count = 1
        given = queries, self.positions, self.segments
        if count == 1:
            out = of_block(*given)
        else:
            blocks = [jnp.moveaxis(x.reshape(B, count, -1, *x.shape[2:]), 1, 0) for x in given]
            parts = jax.lax.map(lambda block: jax.checkpoint(of_block)(*block), tuple(blocks))
            out = jnp.moveaxis(parts, 0, 1).reshape(B, S, *parts.shape[3:])
        out = jnp.where((self.segments > 0)[..., None, None, None], out, 0)
        return out.reshape(B * S, q.shape[1], -1)

    def _by_kernel(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        sinks: jax.Array | None,
        slopes: jax.Array | None,
        window: jax.Array | None,
        *,
        memory: KeysAndValues,
        scale: float,
        soft_cap: float | None,
        known_window: int = NO_WINDOW,
    ) -> jax.Array:
        """Attends as an engine does: over pages, which are written first."""
        assert self.rows is not None and self.order is not None and self.places is not None
        rows = memory.seen_by(self.rows, PAGE_SIZE)
        num_pages = 1 + self.rows.page_table.size  # page 0 is the trash
        abstract = memory.pages(1, num_pages, PAGE_SIZE, q.dtype, self.backend)
        pages = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)
        out, _ = memory.attend(
            pages,
            0,
            rows,
            q[self.order],
            k[self.order],
            None if v is None else v[self.order],
            known_window if window is None else window,
            self.backend,
            scale=scale,
            soft_cap=soft_cap,
            sinks=sinks,
            slopes=slopes,
            plan=memory.plan(rows, pages, q.shape[1], q.dtype, self.backend),
        )
        is_real = (self.segments > 0).reshape(-1)
        return jnp.where(is_real[:, None, None], out[self.places], 0)
