"""Turns queries and keys by their positions, with the cos and sin of a rope (RoFormer, arXiv 2104.09864)."""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxvllm.models.layer_input import Rotation

# The dimensions that rope turns together: i and i + rotary_dim / 2 (halves: Llama), or 2 i and 2 i + 1 (neighbours:
# Cohere, GLM-4).
RopePairs = Literal["halves", "neighbours"]


def rotated(x: jax.Array, rotation: Rotation | None, pairs: RopePairs) -> jax.Array:
    """Returns queries or keys x [T, heads.., D], of which the first rotary_dim dimensions are turned in pairs.

    A layer without rope has no rotation, and turns nothing.
    """
    if rotation is None:
        return x
    return _halves(x, *rotation) if pairs == "halves" else _neighbours(x, *rotation)


def _halves(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns dimension i of the first rotary_dim with i + rotary_dim / 2."""
    half = cos.shape[-1]
    cos, sin = (_over_heads(table, x.ndim) for table in (cos, sin))
    a, b, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1).astype(x.dtype)


def _neighbours(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns dimensions 2 i and 2 i + 1 of the first rotary_dim together.

    Neighbours come by moving all dimensions by one: to take every second one would give TPUs a last dimension of 2.
    """
    cos, sin = (_over_heads(jnp.repeat(table, 2, axis=-1), x.ndim) for table in (cos, sin))
    turned, rest = jnp.split(x.astype(jnp.float32), (cos.shape[-1],), axis=-1)
    is_first = jnp.arange(cos.shape[-1]) % 2 == 0
    other = jnp.where(is_first, -jnp.roll(turned, -1, axis=-1), jnp.roll(turned, 1, axis=-1))
    return jnp.concatenate([turned * cos + other * sin, rest], axis=-1).astype(x.dtype)


def _over_heads(table: jax.Array, num_axes: int) -> jax.Array:
    """Returns a table [T, D] as [T, 1.., D], with as many axes as the queries that it turns."""
    return table.reshape(table.shape[0], *[1] * (num_axes - 2), table.shape[1])
