"""The plain form: one array as checkpoints store it, which XLA multiplies. The array itself stands in the tree."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms.form import Arrays, Form

MATRIX = "matrix"


@dataclass(frozen=True)
class Plain(Form):
    def declare(self, matrix: ParamDecl) -> dict[str, ParamDecl]:
        return {MATRIX: matrix}

    def keep(self, matrix: jax.Array, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        return {MATRIX: matrix}

    def plain(self, arrays: Arrays) -> jax.Array:
        return arrays[MATRIX]

    def product(self, x: jax.Array, arrays: Arrays, dtype: DTypeLike | None, is_slice: bool = False) -> jax.Array:
        return xla_product(x, arrays[MATRIX], dtype, is_slice)

    def look_up(self, arrays: Arrays, numbers: jax.Array) -> jax.Array:
        return jnp.take(arrays[MATRIX], numbers, axis=0, mode="clip")

    def wrapped(self, arrays: Mapping[str, Any]) -> Any:
        return arrays[MATRIX]


PLAIN = Plain()


def xla_product(
    x: jax.Array,
    matrix: jax.Array,
    dtype: DTypeLike | None,
    is_slice: bool = False,
    scales: jax.Array | None = None,
    sizes: jax.Array | None = None,
) -> jax.Array:
    """Lets XLA multiply x [T, in] by a matrix [.., in], and each of its rows by one of `scales` [..]: [T, ..].

    Rows of x may have `sizes` [T] by which they are multiplied, too: then they are in few bits, as the matrix is.

    XLA:TPU reads a slice of a stack in place only if neither the slice nor the output is reshaped within the matmul.
    Otherwise it copies Llama 3 70B's 160 MiB of qkv in each layer (compiled HLO, v5e and v7x).
    """
    *out_shape, size = matrix.shape
    # XLA CPU's fast matmul takes two dimensions only: 23 ms a step with three, 6 ms with two.
    flat = matrix if is_slice else matrix.reshape(-1, size)
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)
    wanted = dtype if scales is None else jnp.int32 if is_integer else jnp.float32

    def multiply(x: jax.Array, flat: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, flat, (((1,), (flat.ndim - 1,)), ((), ())), preferred_element_type=wanted)

    def multiply_two(x: jax.Array, flat: jax.Array) -> jax.Array:
        return multiply(jnp.concatenate([x, x]), flat)[:1]

    # XLA:GPU multiplies one row to a wider result by a product of vectors in float32, for which it converts the whole
    # matrix: the head of Qwen3-0.6B took 522 us of an H100 in each step, where 64 rows take 122.
    if len(x) == 1 and wanted is not None and not is_integer and jnp.dtype(wanted).itemsize > x.dtype.itemsize:
        y = jax.lax.platform_dependent(x, flat, cuda=multiply_two, default=multiply)
    else:
        y = multiply(x, flat)
    if scales is not None:
        # A part of the matmul: 2,048 rows of an FFN of 28,672 in float32 would be 235 MB.
        y = y.astype(jnp.float32) * scales.reshape(flat.shape[:-1])
        if sizes is not None:
            y *= sizes.reshape(-1, *(1,) * (y.ndim - 1))
        y = y.astype(x.dtype if dtype is None else dtype)
    y = jax.lax.optimization_barrier(y) if is_slice else y
    return y.reshape(x.shape[0], *out_shape)
