"""Stores keys and values in eight bits."""

import jax
import jax.numpy as jnp

QUANTIZED = tuple(jnp.dtype(dtype) for dtype in (jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2))


def quantize(x: jax.Array, scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Divides x f[T, K, D] by its head's scale f32[K], and rounds to the nearest value of `dtype`, saturating.

    `float8_e4m3fn` has no infinity, so without saturation one outlier would become a NaN in the cache.
    """
    limit = 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    y = jnp.clip(x.astype(jnp.float32) / scales[:, None], -limit, limit)
    return (jnp.round(y) if dtype == jnp.int8 else y).astype(dtype)
