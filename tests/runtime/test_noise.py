"""The noise is that of jax.random, bit for bit, so a seed means the same whoever computes it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.runtime.noise import gumbel


@pytest.mark.parametrize("size", [1, 7, 2048, 5000])
def test_is_that_of_jax_for_the_seed_and_the_position(size: int) -> None:
    seeds = np.random.default_rng(size).integers(0, 2**32, (6, 2), dtype=np.uint32)
    positions = jnp.array([0, 1, 2, 1023, 131_071, 2**31 - 1], jnp.int32)

    def of_jax(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (size,), jnp.float32)

    expected = jax.jit(jax.vmap(of_jax))(jnp.asarray(seeds), positions)
    noise = jax.jit(gumbel, static_argnums=2)(jnp.asarray(seeds), positions, size)
    chex.assert_trees_all_equal(noise, expected)
    assert np.isfinite(noise).all() and len(np.unique(np.asarray(noise)[:, 0])) == 6
