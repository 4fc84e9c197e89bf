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
    dtype: DTypeLike | None = None,
    chip: CpuChip,
) -> jax.Array:
    """Multiplies x [T, in] by matrix number `index`, [.., outs, in] each, in panels: [T, .. * outs] in `dtype`.

    Tokens are rounded to integers of eight bits, `panels.together` inputs with one size, and products with codes are
    summed in integers, exactly. Sums over groups are in float32. So each row of the result has the same bits whatever
    other rows there are. The arrays are read where they are, whichever matrix is chosen.

    Raises ValueError for shapes and dtypes that do not agree. An index out of range is not detected.
    """
    from pallas_kernels.integer_matmul.kernel import matmul

    out_dtype = checked_dtype(x, matrices, panels, dtype)
    handler = Handler(matmul, (out_dtype, panels), chip)
    return _product(handler, x, matrices, index, [], panels, outs, out_dtype, chip)


def integer_gated_matmul(
    x: jax.Array,
    matrices: Sequence[Arrays],
    index: jax.Array | int,
    *,
    panels: CodePanels,
    outs: int,
    gate: Gate,
    chip: CpuChip,
) -> jax.Array:
    """Computes gate(x a) * (x b) for x [T, in] and a matrix [2, outs, in], whose halves are a and b: [T, outs].

    Otherwise it is as `integer_matmul`. The products are rounded once, after the gate.
    """
    from pallas_kernels.integer_matmul.kernel import gated

    out_dtype = checked_dtype(x, matrices, panels, None, gate)
    handler = Handler(gated, (out_dtype, gate, panels), chip)
    return _product(handler, x, matrices, index, [], panels, outs, out_dtype, chip, halves=2)


def integer_grouped_matmul(
    x: jax.Array,
    stacks: Sequence[Arrays],
    index: jax.Array | int,
    starts: jax.Array,
    *,
    panels: CodePanels,
    outs: int,
    dtype: DTypeLike | None = None,
    chip: CpuChip,
) -> jax.Array:
    """Multiplies each row of x [N, in] by the matrix of its group, of stack number `index`, [G, .., outs, in] each.

    starts  # i32[G + 1]: rows starts[g] to starts[g + 1] are those of group g; the rest of the result is arbitrary

    Otherwise it is as `integer_matmul`.
    """
    from pallas_kernels.integer_matmul.kernel import grouped

    out_dtype = checked_dtype(x, stacks, panels, dtype, starts=starts)
    handler = Handler(grouped, (out_dtype, panels), chip)
    return _product(handler, x, stacks, index, [starts], panels, outs, out_dtype, chip, groups=len(starts) - 1)


def integer_grouped_gated_matmul(
    x: jax.Array,
    stacks: Sequence[Arrays],
    index: jax.Array | int,
    starts: jax.Array,
    *,
    panels: CodePanels,
    outs: int,
    gate: Gate,
    chip: CpuChip,
) -> jax.Array:
    """Computes gate(x a) * (x b) for the matrix [2, outs, in] of each row's group, whose halves are a and b: [N, outs].

    Otherwise it is as `integer_grouped_matmul`.
    """
    from pallas_kernels.integer_matmul.kernel import grouped_gated

    out_dtype = checked_dtype(x, stacks, panels, None, gate, starts)
    handler = Handler(grouped_gated, (out_dtype, gate, panels), chip)
    groups = len(starts) - 1
    return _product(handler, x, stacks, index, [starts], panels, outs, out_dtype, chip, groups=groups, halves=2)


def _product(
    handler: Handler,
    x: jax.Array,
    matrices: Sequence[Arrays],
    index: jax.Array | int,
    starts: Sequence[jax.Array],
    panels: CodePanels,
    outs: int,
    dtype: str,
    chip: CpuChip,
    *,
    groups: int = 1,
    halves: int = 1,
) -> jax.Array:
    flat = [flat_arrays(panels, arrays) for arrays in matrices]
    columns = len(flat[0][0]) // (groups * halves) * panels.columns
    tokens = rounded_tokens(x, panels.together, chip)
    out = jax.ShapeDtypeStruct((len(x), columns), dtype)
    arrays = [array for matrix in flat for array in matrix]
    y: jax.Array = handler(out, *tokens, jnp.asarray(index, jnp.int32), *starts, *arrays)
    return without_padding(y, panels, outs)


def without_padding(y: jax.Array, panels: CodePanels, outs: int) -> jax.Array:
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
