"""The API of products with matrices of codes that are decoded: checks arguments and calls the kernel."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.chips import CpuChip
from pallas_kernels.cpu.handlers import Handler
from pallas_kernels.integer_matmul.api import Arrays, call_by_panels, checked_dtype
from pallas_kernels.integer_matmul.code_panels import CodePanels
from pallas_kernels.small_matmul.api import Gate


def decoded_matmul(
    x: jax.Array,
    matrices: Sequence[Arrays],
    index: jax.Array | int,
    *,
    panels: CodePanels,
    outs: int,
    starts: jax.Array | None = None,
    dtype: DTypeLike | None = None,
    gate: Gate | None = None,
    chip: CpuChip,
) -> jax.Array:
    """Multiplies x [T, in] by matrix number `index`, [.., outs, in] each, in panels: [T, .. * outs] in `dtype`.

    Codes are numbers of FP8, or four bits that are places in a table of float32. Groups of the latter have a multiple
    of eight inputs.

    starts  # i32[G + 1]: each row has a matrix of its own, of [G, .., outs, in]. Rows starts[g] to starts[g + 1] are
    those of group g; the rest of the result is arbitrary
    gate: the matrices are [.., 2, outs, in], of the halves a and b, and the result is gate(x a) * (x b), [T, outs],
    which is rounded once

    Nothing is rounded before it is multiplied. Sums are in float32: those of a group of inputs in one order, then over
    groups. Each row of the result has the same bits whatever other rows there are. The arrays are read where they are,
    whichever matrix is chosen, and those of groups without rows are not read.

    Raises ValueError for shapes and dtypes that do not agree. An index out of range is not detected.
    """
    # Imported here: only where it runs must llvmlite be installed.
    from pallas_kernels.decoded_matmul.kernel import multiply_by_decoded
    from pallas_kernels.packed_matmul.kernel import NO_GATE

    out_dtype = checked_dtype(x, matrices, panels, dtype, gate, starts)
    if not panels.is_float8:  # numbers of a table are no bfloat16
        x = x.astype(jnp.float32)
    rows_of = "whole" if starts is None else "groups"
    handler = Handler(multiply_by_decoded, (x.dtype.name, out_dtype, gate or NO_GATE, rows_of, panels), chip)
    return call_by_panels(handler, [x], matrices, index, panels, outs, starts, out_dtype, gate)
