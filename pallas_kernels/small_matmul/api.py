"""The API of products of few rows with matrices: checks arguments and calls the kernels."""

from collections.abc import Sequence
from math import prod
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.backend import KERNEL_DTYPES
from pallas_kernels.chips import CpuChip
from pallas_kernels.cpu.handlers import Handler

DTYPES = KERNEL_DTYPES["cpu"]
Gate = Literal["silu", "gelu_tanh"]


def small_matmul(
    x: jax.Array,
    matrices: Sequence[jax.Array],
    index: jax.Array | int,
    *,
    scales: Sequence[jax.Array] | None = None,
    dtype: DTypeLike | None = None,
    chip: CpuChip,
) -> jax.Array:
    """Multiplies x [T, in] by matrix number `index` of `matrices`, [.., in] each: [T, out] in `dtype` (None: x's).

    All matrices have one shape, and `out` is all their other dimensions. Sums are in float32. Each row of the result
    has the same bits whatever other rows there are. The matrices are read where they are, whichever is chosen.
    Matrices of int8 have `scales`, f32[..] each, by which each row of a matrix is multiplied.

    Raises ValueError for shapes and dtypes that do not agree. An index out of range is not detected.
    """
    # Imported here: only where it runs must llvmlite be installed.
    from pallas_kernels.small_matmul.kernel import COLUMNS, matmul

    _check(x, matrices, scales)
    out_dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    if out_dtype.name not in DTYPES:
        raise ValueError(f"the result must be of {' or '.join(DTYPES)}, not {out_dtype}")
    size = prod(matrices[0].shape[:-1])
    if missing := max(COLUMNS - size, 0):  # a vocabulary of three: copied, unlike any other
        matrices = [jnp.pad(matrix.reshape(size, -1), ((0, missing), (0, 0))) for matrix in matrices]
        scales = None if scales is None else [jnp.pad(one.reshape(-1), (0, missing)) for one in scales]
    handler = Handler(matmul, (x.dtype.name, out_dtype.name, matrices[0].dtype.name), chip)
    out = jax.ShapeDtypeStruct((x.shape[0], size + missing), out_dtype)
    result: jax.Array = handler(out, x, jnp.asarray(index, jnp.int32), *arguments(matrices, scales))
    return result[:, :size]


def small_gated_matmul(
    x: jax.Array,
    matrices: Sequence[jax.Array],
    index: jax.Array | int,
    *,
    scales: Sequence[jax.Array] | None = None,
    gate: Gate,
    chip: CpuChip,
) -> jax.Array:
    """Computes gate(x a) * (x b) for x [T, in] and a matrix [2, F, in] of `matrices`, whose halves are a and b: [T, F].

    Otherwise it is as `small_matmul`. The products are rounded once, after the gate.
    """
    from pallas_kernels.small_matmul.kernel import COLUMNS, gated

    _check(x, matrices, scales)
    if matrices[0].ndim != 3 or matrices[0].shape[0] != 2 or matrices[0].shape[1] < COLUMNS:
        raise ValueError(f"gated matrices must be [2, at least {COLUMNS}, in], not {matrices[0].shape}")
    if gate not in get_args(Gate):
        raise ValueError(f"gate must be one of {', '.join(get_args(Gate))}, not {gate!r}")
    handler = Handler(gated, (x.dtype.name, gate, matrices[0].dtype.name), chip)
    out = jax.ShapeDtypeStruct((x.shape[0], matrices[0].shape[1]), x.dtype)
    result: jax.Array = handler(out, x, jnp.asarray(index, jnp.int32), *arguments(matrices, scales))
    return result


def arguments(matrices: Sequence[jax.Array], scales: Sequence[jax.Array] | None) -> list[jax.Array]:
    """Returns the matrices, each of them followed by its scales."""
    if scales is None:
        return list(matrices)
    return [array for pair in zip(matrices, scales, strict=True) for array in pair]


def _check(x: jax.Array, matrices: Sequence[jax.Array], scales: Sequence[jax.Array] | None) -> None:
    first = matrices[0]
    check_alike(matrices, scales, "matrices")
    if x.ndim != 2 or first.ndim < 2 or x.shape[1] != first.shape[-1] or not x.size:
        raise ValueError(f"x must be [rows, in] for matrices [.., in], got {x.shape} and {first.shape}")
    if x.dtype.name not in DTYPES or first.dtype != (x.dtype if scales is None else jnp.int8):
        rule = f"x and matrices must both be of {' or '.join(DTYPES)}" if scales is None else "matrices must be int8"
        raise ValueError(f"{rule}, got {x.dtype} and {first.dtype}")


def check_alike(arrays: Sequence[jax.Array], scales: Sequence[jax.Array] | None, what: str) -> None:
    """Raises ValueError if the arrays, which are called `what`, differ, or their scales do not fit them."""
    first = arrays[0]
    if any((one.shape, one.dtype) != (first.shape, first.dtype) for one in arrays):
        raise ValueError(f"all {what} must be alike, got {', '.join(sorted({str(one.shape) for one in arrays}))}")
    if scales is not None:
        wanted = (first.shape[:-1], jnp.float32)
        if len(scales) != len(arrays) or any((one.shape, one.dtype) != wanted for one in scales):
            raise ValueError(f"each of {len(arrays)} {what} {first.shape} needs scales f32{list(first.shape[:-1])}")
