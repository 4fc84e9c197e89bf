"""The API of products of low rank on CPUs: checks arguments and calls the kernel."""

from collections.abc import Sequence
from math import prod
from typing import get_args

import jax
import jax.numpy as jnp

from pallas_kernels.chips import CpuChip
from pallas_kernels.cpu.handlers import Handler
from pallas_kernels.grouped_matmul.order import RowOrder
from pallas_kernels.small_matmul.api import DTYPES, Gate, check_alike


def add_low_rank(
    y: jax.Array,
    x: jax.Array,
    downs: Sequence[jax.Array],
    ups: Sequence[jax.Array],
    index: jax.Array | int,
    order: RowOrder,
    *,
    ratios: Sequence[jax.Array] | None = None,
    gate: Gate | None = None,
    chip: CpuChip,
) -> jax.Array:
    """Returns y [T, ..] with (x down[g]^T) up[g] added to each row that is in a group g, for pair number `index`.

    The matrix may be several of a checkpoint, each with a part of the rank: W has P parts of R, and perhaps more, which
    are not used. A column of the result has one part, and `up` the R ranks of it.

    x: [T, in]
    downs: [G, W, in] each, of x's dtype, and W is a multiple of 4
    ups: [G, R + 1, ..] each, of x's dtype. The last row has the number of each column's part, below P
    order: of the T rows, in G groups
    ratios: f32[G, ..] each (DoRA): y of rows in group g is multiplied by 1 + ratios[g] before, which leaves all bits as
    they are where that is zero
    gate: y is f32[T, 2, F], of the halves a and b, and the result is gate(a) * b of all rows then, [T, F] of x's dtype

    Sums are in float32, and a row of the result is rounded once, to y's dtype. What is between the two products is in
    float32, too, or in bfloat16 where x is and the CPU multiplies pairs of these. Each row has the same bits whatever
    other rows there are, and whatever its group is. Only the matrices of groups with rows are read, and without a gate
    y is changed where it is, if nothing else reads it.

    Raises ValueError for shapes and dtypes that do not agree. An index or a part out of range is not detected.
    """
    # Imported here: only where it runs must llvmlite be installed.
    from pallas_kernels.low_rank.kernel import gated_low_rank, low_rank

    _check(y, x, downs, ups, ratios, order)
    of_rows = (order.rows.astype(jnp.int32), order.starts.astype(jnp.int32), jnp.asarray(index, jnp.int32))
    each = (downs, ups) if ratios is None else (downs, ups, ratios)
    operands = (x, *of_rows, *(array for of_layer in zip(*each, strict=True) for array in of_layer))
    has_ratios = ratios is not None
    if gate is None:
        flat = y.reshape(len(y), -1)
        handler = Handler(low_rank, (x.dtype.name, y.dtype.name, has_ratios), chip)
        result: jax.Array = handler(jax.ShapeDtypeStruct(flat.shape, y.dtype), flat, *operands, in_place=True)
        return result.reshape(y.shape)
    if y.ndim != 3 or y.shape[1] != 2 or y.dtype != jnp.float32 or gate not in get_args(Gate):
        rule = f"with a gate, one of {', '.join(get_args(Gate))}, y must be f32[T, 2, F]"
        raise ValueError(f"{rule}: got {gate!r} and {y.dtype}{list(y.shape)}")
    handler = Handler(gated_low_rank, (x.dtype.name, gate, has_ratios), chip)
    gated: jax.Array = handler(jax.ShapeDtypeStruct((len(y), y.shape[2]), x.dtype), y, *operands)
    return gated


def _check(
    y: jax.Array,
    x: jax.Array,
    downs: Sequence[jax.Array],
    ups: Sequence[jax.Array],
    ratios: Sequence[jax.Array] | None,
    order: RowOrder,
) -> None:
    from pallas_kernels.low_rank.kernel import RANKS

    check_alike(downs, None, "matrices")
    check_alike(ups, None, "matrices")
    down, up = downs[0], ups[0]
    agree = x.ndim == 2 and down.ndim == 3 and len(x) == len(y) and x.shape[1] == down.shape[2]
    agree &= len(up) == len(down) and 1 < up.shape[1] <= down.shape[1] + 1 and y.size > 0
    agree &= prod(up.shape[2:]) == prod(y.shape[1:])
    if not agree or down.shape[1] % RANKS or len(downs) != len(ups):
        raise ValueError(
            f"y [T, ..], x [T, in], down [G, W, in] and up [G, R + 1, ..] must agree, and W be a multiple of {RANKS}, "
            f"got {y.shape}, {x.shape}, {down.shape} and {up.shape}"
        )
    if ratios is not None:
        shape = (len(down), prod(y.shape[1:]))
        fit = all(one.dtype == jnp.float32 and (len(one), prod(one.shape[1:])) == shape for one in ratios)
        if len(ratios) != len(downs) or not fit:
            given = ", ".join(sorted({f"{one.dtype}{list(one.shape)}" for one in ratios}))
            raise ValueError(f"each pair needs ratios f32 of {shape[0]} groups by {shape[1]}, got {given}")
    if (len(order.rows), len(order.starts)) != (len(x), len(down) + 1):
        raise ValueError(f"the order must be of {len(x)} rows in {len(down)} groups")
    if {x.dtype.name, y.dtype.name} - set(DTYPES) or not x.dtype == down.dtype == up.dtype:
        rule = f"x, down and up must be of one of {' or '.join(DTYPES)}, and y of any of them"
        raise ValueError(f"{rule}, got {x.dtype}, {down.dtype}, {up.dtype} and {y.dtype}")
