"""The API of products with packed matrices: checks arguments and calls the kernels."""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import NDArray

from pallas_kernels.chips import CpuChip
from pallas_kernels.cpu.handlers import Handler
from pallas_kernels.packed_matmul.panels import Panels
from pallas_kernels.small_matmul.api import DTYPES, Gate, check_alike


def packed_matmul(
    x: jax.Array,
    matrices: Sequence[jax.Array],
    index: jax.Array | int,
    *,
    size: int,
    starts: jax.Array | None = None,
    dtype: DTypeLike | None = None,
    gate: Gate | None = None,
    chip: CpuChip,
) -> jax.Array:
    """Multiplies x [T, in] by matrix number `index` of `matrices`, [.., size, in] each: [T, .. * size].

    matrices: in the panels that `Panels.of(chip, x.dtype)` makes of them, all of one shape
    starts  # i32[G + 1]: each row has a matrix of its own, of [G, .., size, in]. Rows starts[g] to starts[g + 1] are
    those of group g; the rest of the result is arbitrary
    dtype: of the result, float32 or bfloat16 (None: x's)
    gate: the matrices are [.., 2, size, in], of the halves a and b, and the result is gate(x a) * (x b), [T, size],
    which is rounded once

    Sums are in float32, in one order. Each row of the result has the same bits whatever other rows there are. The
    matrices are read where they are, whichever is chosen, and those of groups without rows are not read.

    Raises ValueError for shapes and dtypes that do not agree. An index out of range is not detected, nor are starts
    that do not rise.
    """
    # Imported here: only where it runs must llvmlite be installed.
    from pallas_kernels.packed_matmul.kernel import NO_GATE, grouped_packed_matmul
    from pallas_kernels.packed_matmul.kernel import packed_matmul as whole

    out_dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    _check(x, matrices, size, starts, out_dtype, gate, chip)
    *others, _, _, _, _ = matrices[0].shape
    width = size * prod(others[(starts is not None) : len(others) - (gate is not None)])
    emit, groups = (whole, []) if starts is None else (grouped_packed_matmul, [starts])
    handler = Handler(emit, (x.dtype.name, out_dtype.name, NO_GATE if gate is None else gate), chip)
    flat = [matrix.reshape(-1, *matrix.shape[-4:]) for matrix in matrices]
    out = jax.ShapeDtypeStruct((len(x), width), out_dtype)
    result: jax.Array = handler(out, x, jnp.asarray(index, jnp.int32), *groups, *flat)
    return result


def pack_into(memory: NDArray[Any], matrix: NDArray[Any], chip: CpuChip) -> None:
    """Writes a matrix [.., out, in] into `memory`, in the panels in which `chip`, this machine's, reads its dtype.

    The memory begins at a multiple of 64 bytes. It is NumPy's, whose large arrays have large pages, and XLA's results
    have small ones: with those, 25 MB in float32 took 12 ms, of which 8 were for the pages (Zen 4).
    """
    device = jax.local_devices(backend="cpu")[0]
    shared = jax.device_put(memory, device)
    if shared.unsafe_buffer_pointer() != memory.ctypes.data:
        raise ValueError("panels need memory that begins at a multiple of 64 bytes, which XLA uses without a copy")
    *others, outs, ins = matrix.shape
    rows = matrix.reshape(prod(others), outs, ins)
    if missing := -ins % Panels.of(chip, matrix.dtype).depth:
        rows = np.pad(rows, ((0, 0), (0, 0), (0, missing)))
    _written(jax.device_put(rows, device), shared, chip).block_until_ready()


@partial(jax.jit, static_argnums=2)
def _written(rows: jax.Array, memory: jax.Array, chip: CpuChip) -> jax.Array:
    """Returns a number when the memory, which is an argument, has the rows in panels."""
    # Imported here: only where it runs must llvmlite be installed.
    from pallas_kernels.packed_matmul.packing import pack_words

    done: jax.Array = Handler(pack_words, (rows.dtype.name,), chip)(jax.ShapeDtypeStruct((), jnp.int32), rows, memory)
    return done


def _check(
    x: jax.Array,
    matrices: Sequence[jax.Array],
    size: int,
    starts: jax.Array | None,
    out_dtype: jnp.dtype,
    gate: Gate | None,
    chip: CpuChip,
) -> None:
    first = matrices[0]
    check_alike(matrices, None, "matrices")
    if {x.dtype.name, out_dtype.name} - set(DTYPES) or first.dtype != x.dtype:
        rule = f"x and matrices must both be of {' or '.join(DTYPES)}, and so must the result"
        raise ValueError(f"{rule}, got {x.dtype}, {first.dtype} and {out_dtype}")
    if x.ndim != 2 or not x.size:
        raise ValueError(f"x must be [rows, in] with at least one row, got {x.shape}")
    panels = Panels.of(chip, x.dtype).shape(size, x.shape[1])
    if first.ndim < len(panels) or first.shape[-len(panels) :] != panels:
        raise ValueError(
            f"matrices of {size} rows of {x.shape[1]} must lie in panels [.., {panels}], got {first.shape}"
        )
    parts = first.shape[: -len(panels)]
    if starts is not None:
        groups, parts = parts[:1], parts[1:]
        if starts.shape != tuple(1 + count for count in groups) or starts.dtype != jnp.int32:
            rule = f"starts must be i32[groups + 1] for matrices {first.shape}"
            raise ValueError(f"{rule}, got {starts.dtype}{list(starts.shape)}")
    if gate is not None and (gate not in get_args(Gate) or parts != (2,)):
        rule = f"gated matrices have two halves, and the gate is one of {', '.join(get_args(Gate))}"
        raise ValueError(f"{rule}: got {first.shape} and {gate!r}")
