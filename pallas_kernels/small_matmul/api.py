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
    dtype: DTypeLike | None = None,
    chip: CpuChip,
) -> jax.Array:
    """Multiplies x [T, in] by matrix number `index` of `matrices`, [.., in] each: [T, out] in `dtype` (None: x's).

    All matrices have one shape, and `out` is all their other dimensions. Sums are in float32. Each row of the result
    has the same bits whatever other rows there are. The matrices are read where they are, whichever is chosen.

    Raises ValueError for shapes and dtypes that do not agree. An index out of range is not detected.
    """
    # Imported here: only where it runs must llvmlite be installed.
    from pallas_kernels.small_matmul.kernel import COLUMNS, matmul

    _check(x, matrices)
    out_dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    if out_dtype.name not in DTYPES:
        raise ValueError(f"the result must be of {' or '.join(DTYPES)}, not {out_dtype}")
    size = prod(matrices[0].shape[:-1])
    if missing := max(COLUMNS - size, 0):  # a vocabulary of three: copied, unlike any other
        matrices = [jnp.pad(matrix.reshape(size, -1), ((0, missing), (0, 0))) for matrix in matrices]
    handler = Handler(matmul, (x.dtype.name, out_dtype.name), chip)
    out = jax.ShapeDtypeStruct((x.shape[0], size + missing), out_dtype)
    result: jax.Array = handler(out, x, jnp.asarray(index, jnp.int32), *matrices)
    return result[:, :size]


def small_gated_matmul(
    x: jax.Array, matrices: Sequence[jax.Array], index: jax.Array | int, *, gate: Gate, chip: CpuChip
) -> jax.Array:
    """Computes gate(x a) * (x b) for x [T, in] and a matrix [2, F, in] of `matrices`, whose halves are a and b: [T, F].

    Otherwise it is as `small_matmul`. The products are rounded once, after the gate.
    """
    from pallas_kernels.small_matmul.kernel import COLUMNS, gated

    _check(x, matrices)
    if matrices[0].ndim != 3 or matrices[0].shape[0] != 2 or matrices[0].shape[1] < COLUMNS:
        raise ValueError(f"gated matrices must be [2, at least {COLUMNS}, in], not {matrices[0].shape}")
    if gate not in get_args(Gate):
        raise ValueError(f"gate must be one of {', '.join(get_args(Gate))}, not {gate!r}")
    handler = Handler(gated, (x.dtype.name, gate), chip)
    out = jax.ShapeDtypeStruct((x.shape[0], matrices[0].shape[1]), x.dtype)
    result: jax.Array = handler(out, x, jnp.asarray(index, jnp.int32), *matrices)
    return result


def _check(x: jax.Array, matrices: Sequence[jax.Array]) -> None:
    first = matrices[0]
    if any((matrix.shape, matrix.dtype) != (first.shape, first.dtype) for matrix in matrices):
        raise ValueError(f"all matrices must be alike, got {', '.join(sorted({str(m.shape) for m in matrices}))}")
    if x.ndim != 2 or first.ndim < 2 or x.shape[1] != first.shape[-1] or not x.size:
        raise ValueError(f"x must be [rows, in] for matrices [.., in], got {x.shape} and {first.shape}")
    if x.dtype != first.dtype or x.dtype.name not in DTYPES:
        raise ValueError(f"x and matrices must both be of {' or '.join(DTYPES)}, got {x.dtype} and {first.dtype}")
