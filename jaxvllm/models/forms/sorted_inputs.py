"""A matrix whose inputs are kept in an order of their own, in which those of a group follow each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms.few_bits import Elements, FewBits
from jaxvllm.models.forms.form import Arrays, Gating
from jaxvllm.models.tiling import Fill

ORDER = "order"


@dataclass(frozen=True)
class SortedInputs(FewBits):
    """A matrix [.., in] whose inputs another form keeps in the order i32[in], as GPTQ's `desc_act` needs it.

    Input i of that form is input order[i] of the matrix, so that a product first takes the columns of x in this order,
    which is exact. No device has a part of the inputs, and no stack of experts is such a matrix.

    kept: the form of the matrix in that order
    """

    kept: FewBits

    @property
    def tells_columns(self) -> bool:
        return self.kept.tells_columns

    def takes(self, matrix: ParamDecl) -> bool:
        return self.kept.takes(matrix)

    def of_matrix(self, matrix: ParamDecl) -> "SortedInputs":
        return SortedInputs(self.kept.of_matrix(matrix))

    def declare(self, matrix: ParamDecl) -> dict[str, ParamDecl]:
        order = ParamDecl(matrix.shape[-1:], (None,), "zeros", dtype="int32")
        return self.kept.declare(matrix) | {ORDER: order}

    def fills(self, matrix: ParamDecl, elements: Elements) -> Mapping[str, Fill]:
        assert elements.order is not None, "the form was chosen for what is stored"
        return {**self.kept.fills(matrix, elements), ORDER: elements.order}

    def keep(self, matrix: jax.Array, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        order = jnp.arange(matrix.shape[-1], dtype=jnp.int32)
        others = {name: sharding for name, sharding in shardings.items() if name != ORDER}
        return self.kept.keep(matrix, others) | {ORDER: jax.device_put(order, shardings[ORDER])}

    def product(self, x: jax.Array, arrays: Arrays, dtype: DTypeLike | None, is_slice: bool = False) -> jax.Array:
        return self.kept.product(_sorted(x, arrays[ORDER]), _others(arrays), dtype, is_slice)

    def product_with_one(
        self, x: jax.Array, matrices: Sequence[Arrays], index: jax.Array | int, dtype: DTypeLike | None
    ) -> jax.Array:
        ours = [_others(arrays) for arrays in matrices]
        return self.kept.product_with_one(_sorted_as_one(x, matrices, index), ours, index, dtype)

    def gated_product(
        self, x: jax.Array, matrices: Sequence[Arrays], index: jax.Array | int, gating: Gating
    ) -> jax.Array | None:
        ours = [_others(arrays) for arrays in matrices]
        return self.kept.gated_product(_sorted_as_one(x, matrices, index), ours, index, gating)


def _others(arrays: Arrays) -> dict[str, jax.Array]:
    return {name: array for name, array in arrays.items() if name != ORDER}


def _sorted(x: jax.Array, order: jax.Array) -> jax.Array:
    """Returns the columns of x [T, in] in that order."""
    return jnp.take(x, order, axis=1, mode="clip")


def _sorted_as_one(x: jax.Array, matrices: Sequence[Arrays], index: jax.Array | int) -> jax.Array:
    """Returns the columns of x in the order of matrix number `index`."""
    orders = [arrays[ORDER] for arrays in matrices]
    order = orders[0] if len(orders) == 1 else jax.lax.select_n(jnp.asarray(index, jnp.int32), *orders)
    return _sorted(x, order)
