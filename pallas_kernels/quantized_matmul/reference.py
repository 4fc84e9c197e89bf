"""The product with a matrix of few bits in plain XLA, which decodes the whole matrix: the oracle of the kernels."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.quantized_matmul.code import Code


def decoded(code: Code, codes: jax.Array, scales: jax.Array, zeros: jax.Array | None = None) -> jax.Array:
    """Returns the matrix that is stored so: element i of a row is (code i - zero of its group) * scale of its group.

    codes  # [.., in], or [.., in / 2] where a byte has two, in the dtype of `code`
    scales  # [.., groups], of any float dtype: each is that of in / groups elements that follow each other
    zeros  # [.., groups], integers; None: the number that stands for 0 where a matrix does not say another one

    The result is f32[.., in]. Nothing is rounded but each product, once.
    """
    numbers = code.numbers(codes)
    exact = scales.astype(jnp.float32)[..., None]
    by_group = numbers.reshape(*scales.shape, -1)
    minus = code.zero if zeros is None else zeros.astype(jnp.float32)[..., None]
    return ((by_group - minus) * exact).reshape(numbers.shape)


def quantized_matmul(
    x: jax.Array,
    code: Code,
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None = None,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Multiplies x [T, in] by a matrix [out, in] that is stored as `decoded` says: [T, out] in `dtype` (None: x's).

    The elements of the matrix are rounded to the dtype of x, and sums are in float32.
    """
    matrix = decoded(code, codes, scales, zeros).astype(x.dtype)
    y = jax.lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return y.astype(x.dtype if dtype is None else dtype)
