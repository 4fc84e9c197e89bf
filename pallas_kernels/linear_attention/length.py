"""The length of queries and keys, by which models and kernels divide them alike."""

import jax
import jax.numpy as jnp

_EPS = 1e-6  # added to the squared length


def of_length_one(x: jax.Array) -> jax.Array:
    """Returns queries or keys x [.., D], each divided by its length."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPS)
