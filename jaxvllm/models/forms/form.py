"""`Form`: how a matrix of weights is kept on devices, and how rows are multiplied by it.

A new form is one file beside this one and, if users choose it by a name, one line in `choice.QUANTIZATIONS`. Attention,
FFNs, families and loops over layers know no form: they pass a matrix on to `ops.project`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import jax
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from pallas_kernels.grouped_matmul import RowOrder, over_groups

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]


@dataclass(frozen=True)
class ClampedSwiglu:
    """A gate g, at most `limit`, and features u within it, both sides: (u + 1) * g * sigmoid(alpha g) (gpt-oss)."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class BoundedSwiglu:
    """The silu of a gate, at most `limit`, times features within it, both sides (Step 3.7)."""

    limit: float


# How a gate changes the features beside it: they are multiplied by an activation of the gate, or in another way.
Gating = Activation | ClampedSwiglu | BoundedSwiglu
# The arrays of one matrix, by the names that its form has given them.
Arrays = Mapping[str, jax.Array]


@dataclass(frozen=True)
class Experts:
    """The experts of a layer: matrices `first` and on of stack number `index`, which is known while the step runs.

    The arrays of a stack have one of each matrix.
    """

    stacks: Sequence[Arrays]
    index: jax.Array | int = 0
    first: jax.Array | int = 0


class Form(ABC):
    """A way to keep matrices `[.., in]`. It is frozen and hashable.

    `dtype` is that of a product, and None stands for the dtype of x.
    """

    # Whether `product_in_stack` reads one layer's matrix where it is in the stack of all layers. XLA would copy a slice
    # of a stack for a kernel of ours, and reads it in place for a product of its own.
    reads_stacks: ClassVar[bool] = False

    @property
    def tells_columns(self) -> bool:
        """Whether products with unit vectors are the columns of a matrix, which DoRA needs to know."""
        return True

    def of_matrix(self, matrix: ParamDecl) -> "Form":
        """Returns the form of one matrix, of which it may need to know more than its arrays tell."""
        return self

    @abstractmethod
    def declare(self, matrix: ParamDecl) -> dict[str, ParamDecl]:
        """Returns the arrays that keep a matrix. Arrays that layers stack begin with its first dimension."""

    @abstractmethod
    def keep(self, matrix: jax.Array, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        """Makes the arrays of a matrix that is on its devices. `shardings` are those of the arrays."""

    def plain(self, arrays: Arrays) -> jax.Array:
        """Returns the matrix [.., in] that these arrays hold exactly, in a function that may be differentiated.

        Raises ValueError for a form that rounds: its integers have no derivatives.
        """
        name = type(self).__name__
        raise ValueError(f"{name} keeps a rounded matrix, which has no derivatives: leave quantization out")

    @abstractmethod
    def product(self, x: jax.Array, arrays: Arrays, dtype: DTypeLike | None, is_slice: bool = False) -> jax.Array:
        """Multiplies x [T, in] by the matrix: [T, ..]. With `is_slice`, the arrays are slices of stacks of layers."""

    def product_with_one(
        self, x: jax.Array, matrices: Sequence[Arrays], index: jax.Array | int, dtype: DTypeLike | None
    ) -> jax.Array:
        """Multiplies x by matrix number `index`, which is known while the step runs. Equal layers have one each."""
        branches = [partial(self.product, arrays=arrays, dtype=dtype) for arrays in matrices]
        result: jax.Array = jax.lax.switch(index, branches, x)
        return result

    def gated_product(
        self, x: jax.Array, matrices: Sequence[Arrays], index: jax.Array | int, gating: Gating
    ) -> jax.Array | None:
        """Returns b x gated by a x for a matrix of the halves a and b, if the form has its own way to do that."""
        return None

    def grouped_product(
        self, x: jax.Array, experts: Experts, starts: jax.Array, dtype: DTypeLike | None = None
    ) -> jax.Array:
        """Multiplies each row of x [N, in] by the matrix of its group, as `over_groups` says: [N, ..].

        Group g has expert number g.
        """

        def of_stack(arrays: Arrays) -> jax.Array:
            return over_groups(
                x, starts, lambda tile, group: self.product_in_stack(tile, arrays, experts.first + group, dtype)
            )

        branches = [partial(of_stack, arrays) for arrays in experts.stacks]
        result: jax.Array = jax.lax.switch(experts.index, branches) if len(branches) > 1 else branches[0]()
        return result

    def add_low_rank(
        self,
        y: jax.Array,
        x: jax.Array,
        downs: Sequence[Arrays],
        ups: Sequence[Arrays],
        index: jax.Array | int,
        order: RowOrder,
        gating: Gating | None = None,
        ratios: Sequence[Arrays] | None = None,
    ) -> jax.Array | None:
        """Does what `pallas_kernels.low_rank.add_low_rank` says, or returns None where no kernel does."""
        return None

    def product_in_stack(
        self, x: jax.Array, stack: Arrays, number: jax.Array | int, dtype: DTypeLike | None = None
    ) -> jax.Array:
        """Multiplies x [T, in] by matrix `number` of a stack: [T, ..]."""
        return self.product(x, {name: item_of(array, number) for name, array in stack.items()}, dtype)

    def grouped_gated_product(
        self, x: jax.Array, experts: Experts, starts: jax.Array, gating: Gating
    ) -> jax.Array | None:
        """Returns b x gated by a x for matrices of the halves a and b, if the form has its own way to do that."""
        return None

    def look_up(self, arrays: Arrays, numbers: jax.Array) -> jax.Array:
        """Returns the rows i32[T] of a table [V, E], [T, E], for embeddings that may be the LM head too.

        Numbers beyond the table are those of its first or last row.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps no rows that could be looked up")

    def row_dtype(self, arrays: Arrays) -> DTypeLike:
        """Returns the dtype of the rows of a table."""
        [rows] = arrays.values()
        return rows.dtype

    def wrapped(self, arrays: Mapping[str, Any]) -> Any:
        """Returns the node that stands for the matrix in the tree of parameters."""
        return Matrix(self, dict(arrays))


def item_of(stack: jax.Array, index: jax.Array | int) -> jax.Array:
    """Returns one item of a stack, by a number that is known while the step runs."""
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False, allow_negative_indices=False)


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["form"])
@dataclass(frozen=True)
class Matrix:
    """A matrix in a form, or a stack of such matrices: a node in the tree of parameters."""

    form: Form
    arrays: dict[str, jax.Array]
