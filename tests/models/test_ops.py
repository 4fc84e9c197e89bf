"""Products of the shapes that a compiler does not multiply well, or at all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models.ops import OneOf, project, project_heads
from jaxvllm.runtime.recipe import COMPILER_OPTIONS

pytestmark = pytest.mark.usefixtures("quick_fusions")


@pytest.mark.parametrize("equation", ["thc,hcl->thl", "thl,hcl->thc"])
def test_heads_in_16_bits_on_a_cpu(equation: str) -> None:
    """As the latents of DeepSeek are: whichever dimension of a head's matrix is summed over."""
    rng = np.random.default_rng(0)
    matrices = [jnp.asarray(rng.standard_normal((4, 1, 32, 64)), jnp.bfloat16) for _ in range(2)]
    x = jnp.asarray(rng.standard_normal((2, 4, 32 if equation.startswith("thc") else 64)), jnp.bfloat16)

    def multiply(x: jax.Array, matrices: list[jax.Array], index: jax.Array) -> jax.Array:
        return project_heads(equation, x, OneOf(tuple(matrices), index))

    compiled = jax.jit(multiply, compiler_options=COMPILER_OPTIONS["cpu"])
    products = [line for line in compiled.lower(x, matrices, 1).as_text().splitlines() if "dot_general" in line]
    # In float32 a copy of all matrices would be made in each step, and most CPUs would multiply slowly in this order.
    assert products and all(
        f": (tensor<{'x'.join(map(str, x.shape))}xbf16>, tensor<4x32x64xbf16>)" in line for line in products
    )
    y = compiled(x, matrices, jnp.int32(1))
    expected = np.einsum(equation, np.asarray(x, np.float64), np.asarray(matrices[1][:, 0], np.float64))
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, atol=0.06, rtol=2**-7)


@pytest.mark.parametrize(
    ("platform", "num_rows", "dtype", "multiplied"),
    [("cuda", 1, "float32", 2), ("cuda", 1, "bfloat16", 1), ("cuda", 3, "float32", 3), ("cpu", 1, "float32", 1)],
)
def test_one_row_to_wider_numbers_is_two_on_nvidia_gpus(
    platform: str, num_rows: int, dtype: str, multiplied: int
) -> None:
    shapes = (num_rows, 64), (128, 64)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    traced = jax.jit(lambda x, w: project(x, w, dtype=dtype)).trace(*arguments)
    [product] = [
        line for line in traced.lower(lowering_platforms=(platform,)).as_text().splitlines() if "dot_general" in line
    ]
    assert f"tensor<{multiplied}x64xbf16>" in product


def test_one_row_to_wider_numbers() -> None:
    x, w = jnp.arange(4, dtype=jnp.bfloat16)[None], jnp.ones((3, 4), jnp.bfloat16)
    np.testing.assert_array_equal(project(x, w, dtype=jnp.float32), np.full((1, 3), 6, np.float32))
