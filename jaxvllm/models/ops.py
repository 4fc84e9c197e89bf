"""The operations that every kind of layer uses: matmuls with weights in any storage, and activation functions.

They are few and large, because each operation has a cost in XLA on CPU.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.chips import CpuChip
from pallas_kernels.small_matmul import small_gated_matmul, small_matmul

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["out_shape"])
@dataclass(frozen=True)
class InOut:
    """A matrix `[in, out]`, where `out` is `out_shape` flattened."""

    array: jax.Array
    out_shape: tuple[int, ...]


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["chip"])
@dataclass(frozen=True)
class KernelMatrix:
    """A matrix `[.., in]` that our own kernel multiplies, on a CPU."""

    array: jax.Array
    chip: CpuChip

    @property
    def dtype(self) -> jnp.dtype:
        return self.array.dtype


@dataclass(frozen=True)
class LayerMatrix:
    """The same matrix of several layers, each in its own array. `index` chooses one while the step runs."""

    of_layers: tuple[jax.Array | InOut, ...] | tuple[KernelMatrix, ...]
    index: jax.Array | int


@dataclass(frozen=True)
class LayerSlice:
    """One layer's slice of a stack of matrices.

    XLA:TPU reads it in place only if neither the slice nor the output is reshaped within the matmul. Otherwise it
    copies Llama 3 70B's 160 MiB of qkv in each layer (compiled HLO, v5e and v7x).
    """

    array: jax.Array


Matrix = jax.Array | InOut | KernelMatrix | LayerMatrix | LayerSlice


@dataclass(frozen=True)
class _ForKernel:
    """The arguments with which our kernels for CPUs are called."""

    matrices: list[jax.Array]  # of which the call picks number `index`
    index: jax.Array | int
    chip: CpuChip


def _for_kernel(weight: Matrix) -> _ForKernel | None:
    """Returns the arguments of a kernel that multiplies by `weight`; None: XLA does it."""
    if isinstance(weight, KernelMatrix):
        return _ForKernel([weight.array], 0, weight.chip)
    if isinstance(weight, LayerMatrix):
        if ours := [matrix for matrix in weight.of_layers if isinstance(matrix, KernelMatrix)]:
            return _ForKernel([matrix.array for matrix in ours], weight.index, ours[0].chip)
    return None


def project(x: jax.Array, weight: Matrix, bias: jax.Array | None = None, dtype: DTypeLike | None = None) -> jax.Array:
    """Multiplies x [T, in] by weight [..., in] and adds `bias` [...]: [T, ...] in `dtype` (None: that of x)."""
    if (ours := _for_kernel(weight)) is not None:
        y = small_matmul(x, ours.matrices, ours.index, dtype=dtype, chip=ours.chip)
        return biased(y.reshape(x.shape[0], *ours.matrices[0].shape[:-1]), bias)
    if isinstance(weight, LayerMatrix):
        branches = [partial(project, weight=matrix, dtype=dtype) for matrix in weight.of_layers]
        return biased(jax.lax.switch(weight.index, branches, x), bias)
    assert not isinstance(weight, KernelMatrix), "a kernel multiplies by it"
    is_slice = isinstance(weight, LayerSlice)
    if isinstance(weight, InOut):
        matrix, contracted, out_shape = weight.array, 0, weight.out_shape
    else:
        array = weight.array if isinstance(weight, LayerSlice) else weight
        # XLA CPU's fast matmul takes two dimensions only: 23 ms a step with three, 6 ms with two.
        matrix = array if is_slice else array.reshape(-1, array.shape[-1])
        contracted, out_shape = matrix.ndim - 1, array.shape[:-1]
    y = jax.lax.dot_general(x, matrix, (((1,), (contracted,)), ((), ())), preferred_element_type=dtype)
    y = jax.lax.optimization_barrier(y) if is_slice else y
    return biased(y.reshape(x.shape[0], *out_shape), bias)


def project_gated(x: jax.Array, weight: Matrix, activation: Activation, bias: jax.Array | None = None) -> jax.Array:
    """Returns activation(gate x) * up x, [T, F], for x [T, in] and weight [2, F, in], gate before up; bias [2, F]."""
    ours = _for_kernel(weight)
    if ours is not None and bias is None and (activation == "silu" or activation == "gelu_tanh"):
        return small_gated_matmul(x, ours.matrices, ours.index, gate=activation, chip=ours.chip)
    gate_up = project(x, weight, bias)  # [T, 2, F]
    return activate(gate_up[:, 0], activation) * gate_up[:, 1]


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """Applies the activation function of that name to each element."""
    if activation == "silu":
        return jax.nn.silu(x)
    if activation == "relu":
        return jax.nn.relu(x)
    return jax.nn.gelu(x, approximate=activation == "gelu_tanh")


def biased(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Adds `bias` to `x`, if there is one."""
    return x if bias is None else x + bias
