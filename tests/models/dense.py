"""Attention of one sequence over itself, dense: the plainest `attend` there is, to check the decoder with."""

from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.models.decoder import forward, project_logits
from jaxvllm.models.layer_input import LayerInput
from jaxvllm.models.layer_memory import KeysAndValues
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.state_memory import StateMemory
from pallas_kernels.ragged_paged_attention import IndexQueries
from sharding.axis import ALONE, ModelAxis

_CHOICE = "what the last index has chosen"


def dense_attend(
    kv: Any,
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
) -> Any:
    """An `attend` for one whole sequence at positions 0, 1, ... Its cache is `dense_cache`, or any where all layers
    have keys and values of their own."""
    if k is None:
        k, v = kv[_key(given)]
    elif v is None:
        v = k[..., -given.memory.latent_size :]
    elif isinstance(kv, dict) and _key(given) in kv:
        kv = kv | {_key(given): (k, v)}
    index_keys = k[:, 0, : index.q.shape[-1] if isinstance(index, IndexQueries) else 0]
    G = q.shape[1] // k.shape[1]
    dtype = q.dtype
    q, k, v = (x.astype(jnp.float32) for x in (q, jnp.repeat(k, G, axis=1), jnp.repeat(v, G, axis=1)))
    scores = jnp.einsum("qhd,khd->hqk", q, k) * scale
    if soft_cap is not None:
        scores = jnp.tanh(scores / soft_cap) * soft_cap
    behind = jnp.arange(len(q))[:, None] - jnp.arange(len(q))[None]
    if slopes is not None:
        scores = scores - slopes[:, None, None] * behind.astype(jnp.float32)
    seen = (behind >= 0) & (behind < given.window)
    if isinstance(given.memory, KeysAndValues) and given.memory.chunk is not None:
        chunk = jnp.arange(len(q)) // given.memory.chunk
        seen &= chunk[:, None] == chunk[None]
    if isinstance(index, IndexQueries):
        keys = index_keys.astype(jnp.float32)
        of_heads = jax.nn.relu(jnp.einsum("thd,nd->thn", index.q.astype(jnp.float32), keys))
        counts = jnp.where(seen, (of_heads * index.weights[..., None]).sum(1), -jnp.inf)
        least = jnp.sort(counts, axis=-1)[:, -min(index.top_k, len(keys))]
        seen &= counts >= least[:, None]
        if isinstance(kv, dict) and _CHOICE in kv:
            kv = kv | {_CHOICE: seen}
    elif index == "last":
        seen = kv[_CHOICE]
    scores = jnp.where(seen, scores, -jnp.inf)
    if sinks is not None:
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : len(k)]
    return jnp.einsum("hqk,khd->qhd", weights, v).astype(dtype), kv


def dense_recur(kv: Any, given: LayerInput, weights: Any, tokens: Any) -> Any:
    """A `recur` for one whole sequence, whose state begins empty and is kept nowhere."""
    memory = given.memory
    assert isinstance(memory, StateMemory)
    empty = tuple(jnp.zeros((memory.num_kv_heads, *part)) for part in memory.rule.parts)
    _, read = jax.lax.scan(lambda state, token: memory.rule.take(weights, state, token)[:2], empty, tokens)
    return read, kv


def dense_cache(spec: ModelSpec, num_tokens: int) -> dict[str, tuple[jax.Array, jax.Array]]:
    """The keys and values of the last layer of each kind that others read. The layers between have another kind."""
    read = [spec.layers[layer.reads].memory for layer in spec.layers if layer.reads is not None]
    choice = {} if spec.shared_choice is None else {_CHOICE: jnp.zeros((num_tokens, num_tokens), bool)}
    zeros = {repr(of): jnp.zeros((num_tokens, of.num_kv_heads, of.head_size)) for of in read}
    return {key: (array, array) for key, array in zeros.items()} | choice


def _key(given: LayerInput) -> str:
    return repr(given.memory)


def dense_logits(params: Any, spec: ModelSpec, tokens: list[int] | jax.Array, axis: ModelAxis = ALONE) -> jax.Array:
    """f32[T, V]: the logits at every position of one sequence; inside shard_map, a device's share of both."""
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    ids = jnp.asarray(tokens, jnp.int32)
    cache = dense_cache(spec, len(tokens))
    hidden, _ = forward(params, spec, ids, positions, cache, dense_attend, axis, dense_recur)
    return project_logits(params, spec, hidden)


def exact_logits(params: Any, spec: ModelSpec, tokens: list[int]) -> jax.Array:
    """f64[T, V]: the logits of parameters in float32 without rounding, because what names float32 gets float64.

    Two programs in float32 are up to twice as far from each other as each is from these. Constants stay in float32.
    """
    widened = mock.patch.object(jnp, "float32", jnp.float64)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), widened:
        wide = jax.tree.map(lambda x: x.astype(jnp.float64) if x.dtype == np.float32 else x, params)
        return dense_logits(wide, spec, tokens)
