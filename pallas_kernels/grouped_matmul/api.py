"""The API of products of groups of rows with a matrix each, on CPUs: checks arguments and calls the kernels."""

from collections.abc import Sequence
from math import prod
from typing import get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.chips import CpuChip
from pallas_kernels.cpu.handlers import Handler
from pallas_kernels.small_matmul.api import DTYPES, Gate, arguments, check_alike


def grouped_matmul(
    x: jax.Array,
    stacks: Sequence[jax.Array],
    index: jax.Array | int,
    starts: jax.Array,
    *,
    scales: Sequence[jax.Array] | None = None,
    dtype: DTypeLike | None = None,
    chip: CpuChip,
) -> jax.Array:
    """Multiplies each row of x [N, in] by the matrix of its group, of stack number `index`, [G, .., in] each: [N, out].

    starts  # i32[G + 1]: rows starts[g] to starts[g + 1] are those of group g; the rest of the result is arbitrary

    The result is in `dtype` (None: x's), and `out` is all other dimensions of a matrix. The matrices of groups with
    rows are read where they are, and no others. Each row has the bits that it has alone. Sums are in float32. Stacks
    of int8 have `scales`, f32[G, ..] each, by which each row of a matrix is multiplied.

    Raises ValueError for shapes and dtypes that do not agree. Starts that do not rise are not detected.
    """
    from pallas_kernels.small_matmul.kernel import grouped

    _check(x, stacks, starts, scales)
    out_dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    handler = Handler(grouped, (x.dtype.name, out_dtype.name, stacks[0].dtype.name), chip)
    out = jax.ShapeDtypeStruct((len(x), prod(stacks[0].shape[1:-1])), out_dtype)
    result: jax.Array = handler(out, x, jnp.asarray(index, jnp.int32), starts, *arguments(stacks, scales))
    return result


def grouped_gated_matmul(
    x: jax.Array,
    stacks: Sequence[jax.Array],
    index: jax.Array | int,
    starts: jax.Array,
    *,
    scales: Sequence[jax.Array] | None = None,
    gate: Gate,
    chip: CpuChip,
) -> jax.Array:
    """Computes gate(x a) * (x b) for the matrix [2, F, in] of each row's group, whose halves are a and b: [N, F].

    The stacks are [G, 2, F, in]. Otherwise it is as `grouped_matmul`.
    """
    from pallas_kernels.small_matmul.kernel import grouped_gated

    _check(x, stacks, starts, scales)
    if stacks[0].ndim != 4 or stacks[0].shape[1] != 2:
        raise ValueError(f"gated matrices must be [groups, 2, F, in], not {stacks[0].shape}")
    if gate not in get_args(Gate):
        raise ValueError(f"gate must be one of {', '.join(get_args(Gate))}, not {gate!r}")
    handler = Handler(grouped_gated, (x.dtype.name, gate, stacks[0].dtype.name), chip)
    out = jax.ShapeDtypeStruct((len(x), stacks[0].shape[2]), x.dtype)
    result: jax.Array = handler(out, x, jnp.asarray(index, jnp.int32), starts, *arguments(stacks, scales))
    return result


def _check(x: jax.Array, stacks: Sequence[jax.Array], starts: jax.Array, scales: Sequence[jax.Array] | None) -> None:
    from pallas_kernels.small_matmul.kernel import COLUMNS

    first = stacks[0]
    check_alike(stacks, scales, "stacks")
    if x.ndim != 2 or first.ndim < 3 or x.shape[1] != first.shape[-1] or not x.size:
        raise ValueError(f"x must be [rows, in] for stacks [groups, .., in], got {x.shape} and {first.shape}")
    if first.shape[-2] < COLUMNS:
        raise ValueError(f"matrices of groups must have at least {COLUMNS} rows, got {first.shape}")
    if starts.shape != (len(first) + 1,) or starts.dtype != jnp.int32:
        raise ValueError(f"starts must be i32[{len(first) + 1}], got {starts.dtype}{list(starts.shape)}")
    if x.dtype.name not in DTYPES or first.dtype != (x.dtype if scales is None else jnp.int8):
        raise ValueError(f"x and matrices must agree, or matrices be int8 with scales, got {x.dtype} and {first.dtype}")
