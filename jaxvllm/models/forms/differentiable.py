"""The form of matrices that are trained: it multiplies as another form does, and has derivatives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms.form import Arrays, Experts, Form, Gating
from jaxvllm.models.forms.plain import xla_product
from jaxvllm.models.ops import gated


def with_derivatives_of(computed: Callable[..., Any], like: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that returns what `computed` does, and has the derivatives of `like`."""
    run = jax.custom_vjp(computed)

    def forward(*args: Any) -> tuple[Any, tuple[Any, ...]]:
        return computed(*args), args

    def backward(args: tuple[Any, ...], cotangent: Any) -> Any:
        return jax.vjp(like, *args)[1](cotangent)

    run.defvjp(forward, backward)
    return run


@dataclass(frozen=True)
class Differentiable(Form):
    """Multiplies by the arrays of `form`, in its way and to the same bits. Only the derivatives are XLA's.

    Kernels have no derivatives. The derivatives of an array have the order that the form gives the numbers of a matrix,
    and are zero for zeros that fill it up. So an optimizer that treats each number alike may change the arrays where
    they are. A matrix is that of one layer, and none is chosen while the program runs.
    """

    form: Form

    def declare(self, matrix: ParamDecl) -> dict[str, ParamDecl]:
        return self.form.declare(matrix)

    def keep(self, matrix: jax.Array, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        return self.form.keep(matrix, shardings)

    def plain(self, arrays: Arrays) -> jax.Array:
        return self.form.plain(arrays)

    def product(self, x: jax.Array, arrays: Arrays, dtype: DTypeLike | None, is_slice: bool = False) -> jax.Array:
        def like(x: jax.Array, arrays: Arrays) -> jax.Array:
            return xla_product(x, self.plain(arrays), dtype, is_slice)

        own = partial(self.form.product, dtype=dtype, is_slice=is_slice)
        return with_derivatives_of(own, like)(x, arrays)

    def gated_product(
        self, x: jax.Array, matrices: Sequence[Arrays], index: jax.Array | int, gating: Gating
    ) -> jax.Array | None:
        [arrays] = matrices

        def own(x: jax.Array, arrays: Arrays) -> jax.Array | None:
            return self.form.gated_product(x, [arrays], 0, gating)

        def like(x: jax.Array, arrays: Arrays) -> jax.Array:
            return gated(xla_product(x, self.plain(arrays), None), gating)

        return _if_any(own, like, x, arrays)

    def grouped_product(
        self, x: jax.Array, experts: Experts, starts: jax.Array, dtype: DTypeLike | None = None
    ) -> jax.Array:
        assert dtype is None, "what is trained has no adapters of ours"

        def own(x: jax.Array, arrays: Arrays, starts: jax.Array) -> jax.Array:
            return self.form.grouped_product(x, Experts([arrays]), starts)

        return with_derivatives_of(own, self._by_group)(x, _only(experts), starts)

    def grouped_gated_product(
        self, x: jax.Array, experts: Experts, starts: jax.Array, gating: Gating
    ) -> jax.Array | None:
        def own(x: jax.Array, arrays: Arrays, starts: jax.Array) -> jax.Array | None:
            return self.form.grouped_gated_product(x, Experts([arrays]), starts, gating)

        def like(x: jax.Array, arrays: Arrays, starts: jax.Array) -> jax.Array:
            return gated(self._by_group(x, arrays, starts), gating)

        return _if_any(own, like, x, _only(experts), starts)

    def look_up(self, arrays: Arrays, numbers: jax.Array) -> jax.Array:
        return self.form.look_up(arrays, numbers)

    def row_dtype(self, arrays: Arrays) -> DTypeLike:
        return self.form.row_dtype(arrays)

    def _by_group(self, x: jax.Array, arrays: Arrays, starts: jax.Array) -> jax.Array:
        """Multiplies each row of x by the matrix of its group. Rows of no group are zeros."""
        matrices = self.plain(arrays)
        count, *out, size = matrices.shape
        flat = matrices.reshape(count, -1, size).swapaxes(-1, -2)
        y = jax.lax.ragged_dot(x, flat, jnp.diff(starts), preferred_element_type=x.dtype)
        return y.reshape(len(x), *out)


def _only(experts: Experts) -> Arrays:
    [arrays] = experts.stacks
    return arrays


def _if_any(own: Callable[..., jax.Array | None], like: Callable[..., jax.Array], *args: Any) -> jax.Array | None:
    """Returns the result of `own` with the derivatives of `like`, or None where `own` has no result."""
    if jax.eval_shape(own, *args) is None:
        return None
    result: jax.Array = with_derivatives_of(own, like)(*args)
    return result
