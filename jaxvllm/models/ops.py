"""The operations that every kind of layer uses: matmuls with weights in any form, and activation functions.

They are few and large, because each operation has a cost in XLA on CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxvllm.models.forms.form import Activation, Arrays, Experts, Form, Matrix
from jaxvllm.models.forms.plain import MATRIX, PLAIN


@dataclass(frozen=True)
class OneOf:
    """The same matrix of several layers, each in its own arrays. `index` chooses one while the step runs."""

    matrices: tuple[jax.Array | Matrix, ...]
    index: jax.Array | int


@dataclass(frozen=True)
class Slice:
    """One layer's slice of a stack of matrices."""

    matrix: jax.Array | Matrix


@dataclass(frozen=True)
class InStack:
    """The experts of one layer in a stack [L, X, ..] of those of several layers, of which no slice is taken."""

    stack: jax.Array | Matrix
    index: jax.Array | int


Weight = jax.Array | Matrix | OneOf | Slice
ExpertsWeight = jax.Array | Matrix | OneOf | InStack


def project(x: jax.Array, weight: Weight, bias: jax.Array | None = None, dtype: DTypeLike | None = None) -> jax.Array:
    """Multiplies x [T, in] by weight [.., in] and adds `bias` [..]: [T, ..] in `dtype` (None: that of x)."""
    if isinstance(weight, OneOf):
        form, matrices = _opened(weight.matrices)
        return biased(form.product_with_one(x, matrices, weight.index, dtype), bias)
    is_slice = isinstance(weight, Slice)
    form, [arrays] = _opened([weight.matrix if isinstance(weight, Slice) else weight])
    return biased(form.product(x, arrays, dtype, is_slice), bias)


def project_gated(x: jax.Array, weight: Weight, activation: Activation, bias: jax.Array | None = None) -> jax.Array:
    """Returns activation(gate x) * up x, [T, F], for x [T, in] and weight [2, F, in], gate before up; bias [2, F]."""
    if bias is None and not isinstance(weight, Slice):
        of = weight if isinstance(weight, OneOf) else OneOf((weight,), 0)
        form, matrices = _opened(of.matrices)
        if (gated := form.gated_product(x, matrices, of.index, activation)) is not None:
            return gated
    gate_up = project(x, weight, bias)  # [T, 2, F]
    return activate(gate_up[:, 0], activation) * gate_up[:, 1]


def project_grouped(x: jax.Array, weight: ExpertsWeight, starts: jax.Array) -> jax.Array:
    """Multiplies each row of x [N, in] by the matrix of its group, of weight [X, .., in]: [N, ..].

    Rows starts[g] to starts[g + 1], i32[X + 1], are those of group g. The others are arbitrary afterwards.
    """
    form, experts = _experts(weight)
    return form.grouped_product(x, experts, starts)


def project_grouped_gated(x: jax.Array, weight: ExpertsWeight, starts: jax.Array, activation: Activation) -> jax.Array:
    """Returns activation(gate x) * up x, [N, F], for rows in groups, as above, and weight [X, 2, F, in]."""
    form, experts = _experts(weight)
    if (gated := form.grouped_gated_product(x, experts, starts, activation)) is not None:
        return gated
    gate_up = form.grouped_product(x, experts, starts)  # [N, 2, F]
    return activate(gate_up[:, 0], activation) * gate_up[:, 1]


def _experts(weight: ExpertsWeight) -> tuple[Form, Experts]:
    """Returns the form of experts, and where they are."""
    if isinstance(weight, OneOf):
        form, stacks = _opened(weight.matrices)
        return form, Experts(stacks, weight.index)
    form, [arrays] = _opened([weight.stack if isinstance(weight, InStack) else weight])
    if not isinstance(weight, InStack):
        return form, Experts([arrays])
    # Layers and experts become one dimension, for which nothing is moved.
    flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in arrays.items()}
    num_experts = next(iter(arrays.values())).shape[1]
    return form, Experts([flat], first=weight.index * num_experts)


def lookup_table(weight: jax.Array | Matrix) -> jax.Array:
    """Returns the table [V, E] that `weight` keeps."""
    form, [arrays] = _opened([weight])
    return form.table(arrays)


def _opened(matrices: Sequence[jax.Array | Matrix]) -> tuple[Form, list[Arrays]]:
    """Returns the form of all `matrices`, and the arrays of each."""
    forms = {matrix.form if isinstance(matrix, Matrix) else PLAIN for matrix in matrices}
    assert len(forms) == 1, "the matrices of equal layers have one form"
    return forms.pop(), [matrix.arrays if isinstance(matrix, Matrix) else {MATRIX: matrix} for matrix in matrices]


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """Applies the activation function of that name to each element."""
    if activation == "silu":
        return jax.nn.silu(x)
    if activation == "relu":
        return jax.nn.relu(x)
    if activation == "relu_squared":
        return jnp.square(jax.nn.relu(x))
    return jax.nn.gelu(x, approximate=activation == "gelu_tanh")


def biased(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Adds `bias` to `x`, if there is one."""
    return x if bias is None else x + bias
