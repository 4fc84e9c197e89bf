"""The API of products with matrices in panels of codes: checks arguments and calls the kernels."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.backend import KERNEL_DTYPES
from pallas_kernels.chips import CpuChip
from pallas_kernels.cpu.handlers import Handler
from pallas_kernels.integer_matmul.code_panels import CODES, CodePanels
from pallas_kernels.small_matmul.api import Gate

DTYPES = KERNEL_DTYPES["cpu"]
_ALIGN = 64  # bytes: the codes of a token begin in a cache line of their own
# The arrays of a matrix, by their names. Their dimensions before panels are those of the matrix before `out`.
Arrays = Mapping[str, jax.Array]


class TokenCodes(NamedTuple):
    """Tokens [T, in] as integers: token t is codes[t] * sizes[t], whose sizes are those of groups of inputs."""

    codes: jax.Array  # i8[T, at least in]; what comes after the inputs is arbitrary
    sizes: jax.Array  # f32[T, groups]
    sums: jax.Array  # i32[T, groups], of the codes of each group


def rounded_tokens(x: jax.Array, together: int | None, chip: CpuChip) -> TokenCodes:
    """Returns x [T, in] as integers: the largest number of each group of `together` inputs (None: all) becomes 127.

    A group of zeros has the size 1. The size of a group with a NaN or an infinity is NaN.
    """
    from pallas_kernels.integer_matmul.tokens import round_tokens

    T, size = x.shape
    groups = 1 if together is None else -(-size // together)
    out = [
        jax.ShapeDtypeStruct((T, size + _ALIGN + -size % _ALIGN), jnp.int8),
        jax.ShapeDtypeStruct((T, groups), jnp.float32),
        jax.ShapeDtypeStruct((T, groups), jnp.int32),
    ]
    handler = Handler(round_tokens, (x.dtype.name, "row" if together is None else str(together)), chip)
    return TokenCodes(*handler(out, x))


def integer_matmul(
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

    starts  # i32[G + 1]: each row has a matrix of its own, of [G, .., outs, in]. Rows starts[g] to starts[g + 1] are
    those of group g; the rest of the result is arbitrary
    gate: the matrices are [.., 2, outs, in], of the halves a and b, and the result is gate(x a) * (x b), [T, outs],
    which is rounded once

    Tokens are rounded to integers of eight bits, `panels.together` inputs with one size, and products with codes are
    summed in integers, exactly. Sums over groups are in float32. So each row of the result has the same bits whatever
    other rows there are. The arrays are read where they are, whichever matrix is chosen.

    Raises ValueError for shapes and dtypes that do not agree. An index out of range is not detected.
    """
    # Imported here: only where it runs must llvmlite be installed.
    from pallas_kernels.integer_matmul import kernel

    out_dtype = checked_dtype(x, matrices, panels, dtype, gate, starts)
    if gate is None:
        handler = Handler(kernel.matmul if starts is None else kernel.grouped, (out_dtype, panels), chip)
    else:
        emit = kernel.gated if starts is None else kernel.grouped_gated
        handler = Handler(emit, (out_dtype, gate, panels), chip)
    tokens = rounded_tokens(x, panels.together, chip)
    return call_by_panels(handler, tokens, matrices, index, panels, outs, starts, out_dtype, gate)


def call_by_panels(
    handler: Handler,
    tokens: Sequence[jax.Array],
    matrices: Sequence[Arrays],
    index: jax.Array | int,
    panels: CodePanels,
    outs: int,
    starts: jax.Array | None,
    dtype: str,
    gate: Gate | None,
) -> jax.Array:
    """Calls a kernel that multiplies tokens, one in each row of its first arguments, by matrices in panels of codes."""
    flat = [flat_arrays(panels, arrays) for arrays in matrices]
    parts = (1 if starts is None else len(starts) - 1) * (1 if gate is None else 2)
    out = jax.ShapeDtypeStruct((len(tokens[0]), len(flat[0][0]) // parts * panels.columns), dtype)
    of_groups = [] if starts is None else [starts]
    arrays = [array for matrix in flat for array in matrix]
    y: jax.Array = handler(out, *tokens, jnp.asarray(index, jnp.int32), *of_groups, *arrays)
    return _without_padding(y, panels, outs)


def _without_padding(y: jax.Array, panels: CodePanels, outs: int) -> jax.Array:
    """Returns outputs [T, .. * outs] without those that the last panel of each matrix has for nothing."""
    padded = -(-outs // panels.columns) * panels.columns
    return y if padded == outs else y.reshape(len(y), -1, padded)[..., :outs].reshape(len(y), -1)


def flat_arrays(panels: CodePanels, arrays: Arrays) -> list[jax.Array]:
    """Returns the arrays in the order of the kernel, with one dimension of panels."""
    inner = {name: len(shape) - 1 for name, (shape, _) in panels.arrays(1, 1).items()}
    return [arrays[name].reshape(-1, *arrays[name].shape[-count:]) for name, count in inner.items()]


def checked_dtype(
    x: jax.Array,
    matrices: Sequence[Arrays],
    panels: CodePanels,
    dtype: DTypeLike | None,
    gate: str | None = None,
    starts: jax.Array | None = None,
) -> str:
    """Returns the name of the dtype of the result. Raises ValueError where arguments do not agree."""
    out_dtype = jnp.dtype(x.dtype if dtype is None else dtype).name
    if x.ndim != 2 or not x.size or x.dtype.name not in DTYPES or out_dtype not in DTYPES:
        raise ValueError(
            f"x must be [rows, in], and it and the result of {' or '.join(DTYPES)}, not {x.dtype}{list(x.shape)} and "
            f"{out_dtype}"
        )
    if gate is not None and gate not in get_args(Gate):
        raise ValueError(f"gate must be one of {', '.join(get_args(Gate))}, not {gate!r}")
    if starts is not None and (starts.ndim != 1 or starts.dtype != jnp.int32):
        raise ValueError(f"starts must be i32[groups + 1], not {starts.dtype}{list(starts.shape)}")
    first = matrices[0]
    for arrays in matrices:
        kinds = {name: (array.shape, array.dtype.name) for name, array in arrays.items()}
        if kinds != {name: (array.shape, array.dtype.name) for name, array in first.items()}:
            raise ValueError("all matrices must be alike in the shapes and dtypes of their arrays")
    columns, ins = panels.columns, x.shape[1]
    for name, (shape, held) in panels.arrays(columns, ins).items():
        got = first.get(name)
        if got is None or got.shape[-len(shape) + 1 :] != shape[1:] or got.dtype.name != held:
            found = "nothing" if got is None else f"{got.dtype}{list(got.shape)}"
            raise ValueError(f"{name} must be {held}[.., panels, {str(shape[1:])[1:-1]}], not {found}")
    if starts is not None and first[CODES].shape[0] != len(starts) - 1:
        raise ValueError(f"stacks of {first[CODES].shape[0]} matrices need starts i32[{first[CODES].shape[0] + 1}]")
    return out_dtype
