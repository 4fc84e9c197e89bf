"""The mean of squares that norms divide by, which is added up by halves on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models.norm import mean_square
from jaxvllm.runtime.recipe import COMPILER_OPTIONS


@pytest.mark.parametrize("size", [1, 5, 16, 84, 96, 1024, 5120])
def test_the_mean_is_near_float64_and_a_row_has_the_same_bits_alone(size: int) -> None:
    x = np.random.default_rng(size).standard_normal((40, size), np.float32)
    compiled = jax.jit(mean_square, compiler_options=COMPILER_OPTIONS["cpu"])
    means = np.asarray(compiled(jnp.asarray(x)))
    np.testing.assert_allclose(means, np.square(x.astype(np.float64)).mean(-1, keepdims=True), rtol=1e-6)
    np.testing.assert_array_equal(compiled(jnp.asarray(x[7:8])), means[7:8])
