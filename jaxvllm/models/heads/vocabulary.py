"""Translates between the vocabulary of a draft head and that of its model."""

import jax
import jax.numpy as jnp

from jaxvllm.models.spec import ModelSpec
from sharding.axis import ModelAxis


def share_of(logits: jax.Array, spec: ModelSpec, shard: ModelSpec, axis: ModelAxis) -> jax.Array:
    """Returns a device's share f32[R, V] of whole logits f32[R, V'], where tokens that are missing are impossible."""
    missing = max(shard.vocab_size * axis.size - logits.shape[1], 0)
    whole = jnp.pad(logits[:, : spec.vocab_size], ((0, 0), (0, missing)), constant_values=-jnp.inf)
    if axis.size == 1:
        return whole[:, : shard.vocab_size]
    return jax.lax.dynamic_slice_in_dim(whole, axis.first(shard.vocab_size), shard.vocab_size, axis=1)


def in_columns(logits: jax.Array, columns: jax.Array) -> jax.Array:
    """Returns the `columns` i32[N] of logits f32[R, V'] as f32[R, N]. Columns past the last are -inf."""
    return jnp.pad(logits, ((0, 0), (0, 1)), constant_values=-jnp.inf)[:, columns]
