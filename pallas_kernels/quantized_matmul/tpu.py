"""The product of rows with matrices of few bits, for TPUs: codes stay codes in HBM, and become numbers in registers.

The grid is that of `grouped_matmul.tpu`: a visit is one tile of rows and one matrix. While it multiplies by a block of
a matrix, Pallas fetches the codes and scales of the next one. What the matrix units are given is made of the codes by
the vector unit, some registers at a time (`tpu_words`), so that no part of a matrix is ever written as numbers.

A few rows are multiplied by numbers of eight bits, which matrix units take as they are, and the sums of each group are
scaled: a matrix of 4 bits must become 800 numbers in each cycle to be read as fast as v5e can. For that, rows are
repeated for each of the groups in a chunk of inputs, with zeros in the place of others. What zeros subtract is a
product of the sums of rows with zeros and scales. More rows are multiplied by numbers that have been scaled.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import MIB, TpuChip
from pallas_kernels.grouped_matmul.tpu import LANES, SUBLANES, VMEM_SHARE, padded, visits_of, with_rows, zero_new_tile
from pallas_kernels.quantized_matmul.code import Code
from pallas_kernels.quantized_matmul.tpu_columns import CHUNK, INPUTS, PIECE, UNROLLED, ColumnBlock, width_of
from pallas_kernels.quantized_matmul.tpu_words import bits_of, floats_of, numbers_of

MOST_ROWS = 512  # of a tile: while so many are multiplied, the next numbers are made
TILE_ROWS = 128  # of a tile with several groups of rows
# Few rows are at most a quarter of a group, because they are repeated for each. With 32 rows and groups of 128, sums
# took 67,000 bundles on v6e and 111,000 on v5e, and scaled numbers 70,000 and 169,000. With 64 rows the matrix units
# decide: 104,000 and 185,000 against 84,000 and 187,000.
REPEATED = 4
PACKED_ROWS = 16  # of a register of bfloat16
BLOCK_BYTES = 2 * MIB  # of codes: larger blocks would only make the first fetch, which nothing hides, take longer


@dataclass(frozen=True)
class QuantizedMatrices:
    """Matrices [M, P, in, out], of which rows are multiplied by all P of one of the M, in the layout of this kernel.

    codes  # i32[M, P, in / codes of a word, out], see `tpu_words.in_words`
    scales  # [M, P, in / group, out], bf16 or f32, or u8 for the exponents of powers of two; there may be more rows
    zeros  # integers of eight bits, as many as scales, or None

    `in` and the columns of codes are multiples of 128. Where scales have fewer columns, those of a product after them
    are arbitrary. The inputs of a group divide 128 and are a multiple of 16.
    """

    code: Code
    group: int  # the inputs that share a scale
    codes: jax.Array
    scales: jax.Array
    zeros: jax.Array | None = None

    @property
    def size(self) -> int:
        """The inputs of a matrix."""
        return self.codes.shape[-2] * 32 // bits_of(self.code)


@dataclass(frozen=True)
class QuantizedBlocks:
    """One step of the grid takes `rows` rows and `columns` columns.

    scales_sums: whether sums of groups are scaled, and not the numbers of a matrix
    """

    rows: int
    columns: int
    scales_sums: bool


def choose_blocks(x: jax.Array, w: QuantizedMatrices, num_groups: int, chip: TpuChip) -> QuantizedBlocks:
    """Returns the blocks of `quantized_matmul` for so many groups of rows.

    Raises NotImplementedError for matrices of which 128 columns have no room.
    """
    num_columns, size = w.codes.shape[-1], w.size
    most = max(BLOCK_BYTES // (4 * w.codes.shape[-2]) // LANES, 1) * LANES
    parts = padded(pl.cdiv(num_columns, most), chip.num_cores) if num_columns > LANES else 1
    columns = padded(pl.cdiv(num_columns, parts), LANES)
    of_matrix = columns * (4 * w.codes.shape[-2] + w.scales.shape[-2] * (w.scales.dtype.itemsize + 9))

    def has_room(rows: int) -> bool:
        of_rows = 2 * x.dtype.itemsize * (size + columns) + 12 * columns
        return 2 * of_matrix + rows * of_rows <= chip.vmem_bytes * VMEM_SHARE

    few = padded(len(x), PACKED_ROWS)
    if x.dtype == jnp.bfloat16 and few * REPEATED <= w.group and has_room(few):
        return QuantizedBlocks(padded(len(x), SUBLANES), columns, scales_sums=True)
    rows = min(len(x), MOST_ROWS if num_groups == 1 else TILE_ROWS)
    while not has_room(rows):
        if rows <= SUBLANES:
            raise NotImplementedError(
                f"matrices of few bits with {size} inputs on a device have no room in the memory of a TPU's core: "
                "divide them among more devices"
            )
        rows = padded(rows // 2, SUBLANES)
    return QuantizedBlocks(rows, columns, scales_sums=False)


def loop_lengths(w: QuantizedMatrices, blocks: QuantizedBlocks) -> tuple[int, ...]:
    """Returns how often the grid, the loop over columns and that over inputs turn, for one tile of rows."""
    parts = pl.cdiv(w.codes.shape[-1], blocks.columns) * w.codes.shape[1]
    return parts, blocks.columns // width_of(blocks.columns), w.size // (CHUNK * UNROLLED)


def quantized_matmul(
    x: jax.Array,
    w: QuantizedMatrices,
    starts: jax.Array,
    first: jax.Array | int = 0,
    *,
    dtype: Any = None,
    blocks: QuantizedBlocks,
    chip: TpuChip,
    interpret: bool = False,
) -> jax.Array:
    """Multiplies each row of x [N, in] by the matrices `first` + g of `w`, where g is its group: [N, P, out].

    starts  # i32[G + 1]: rows starts[g] to starts[g + 1] are those of group g; the rest of the result is finite

    Sums are in float32 and the result in `dtype` (None: x's). Numbers are rounded to the dtype of x after they have
    been scaled, if they are scaled at all. A code that is no finite number stays what it is, but on v5e, v5p and v6e a
    NaN of E4M3 counts as 480 with its sign, and where sums are scaled an infinity of E5M2 can make NaN of its column,
    because it is multiplied by the zeros in the place of other groups' inputs, too. Starts that do not rise, and
    matrices that are not there, are not detected.
    """
    _, halves, _, num_columns = w.codes.shape
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    assert x.shape[1] == w.size and w.size % INPUTS == 0 and num_columns % LANES == 0, (x.shape, w.codes.shape)
    assert INPUTS % w.group == 0 and w.group % PIECE == 0, w.group
    of_rows, specs = [x], [pl.BlockSpec((blocks.rows, w.size), lambda part, half, visit, tiles, *_: (tiles[visit], 0))]
    if blocks.scales_sums:  # whose sums of a group are whole registers; rows after the last one are arbitrary
        of_rows = [x, *_group_sums(x, w)]
        specs = [
            pl.BlockSpec((padded(len(x), unit), array.shape[1]), lambda *_: (0, 0))
            for array, unit in zip(of_rows, (PACKED_ROWS, SUBLANES), strict=False)
        ]
    visits = visits_of(starts, len(x), blocks.rows, first)
    matrices = [w.codes, w.scales, *([] if w.zeros is None else [w.zeros])]
    if not interpret:  # XLA would copy a stack that fits into VMEM there
        matrices = [pltpu.with_memory_space_constraint(array, pltpu.HBM) for array in matrices]
    grid = pl.cdiv(num_columns, blocks.columns), halves, len(visits[0])
    call = pl.pallas_call(
        partial(
            _kernel,
            code=w.code,
            group=w.group,
            scales_sums=blocks.scales_sums,
            has_zeros=w.zeros is not None,
            chip=chip,
        ),
        out_shape=jax.ShapeDtypeStruct((halves, len(x), num_columns), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=grid,
            in_specs=[
                *specs,
                *(
                    pl.BlockSpec(
                        (None, None, array.shape[2], blocks.columns),
                        lambda part, half, visit, tiles, matrices, *_: (matrices[visit], half, 0, part),
                    )
                    for array in matrices
                ),
            ],
            out_specs=pl.BlockSpec(
                (None, blocks.rows, blocks.columns),
                lambda part, half, visit, tiles, *_: (half, tiles[visit], part),
            ),
            scratch_shapes=[pltpu.VMEM((w.scales.shape[2], blocks.columns), jnp.int32) for _ in matrices[1:]],
        ),
        compiler_params=pltpu.CompilerParams(
            # Cores share the columns. Visits of one tile write it one after the other.
            dimension_semantics=("parallel" if chip.num_cores > 1 else "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=int(chip.vmem_bytes * VMEM_SHARE),
        ),
        interpret=pltpu.InterpretParams(detect_races=True, num_cores_or_threads=chip.num_cores) if interpret else False,
        name="quantized_matmul",
    )
    out: jax.Array = call(*visits, *of_rows, *matrices)
    return out.swapaxes(0, 1)


def _group_sums(x: jax.Array, w: QuantizedMatrices) -> list[jax.Array]:
    """Returns f32[T, in / group], the sums of the groups of rows [T, in], if zeros are subtracted.

    There are as many sums as scales, whose rows after the last group have sums of 0.
    """
    if w.zeros is None and not w.code.zero:
        return []
    # A product, because it is one operation for XLA, each of which has a cost. A reduction took a tenth more of it all.
    is_own = jnp.arange(w.size)[:, None] // w.group == jnp.arange(w.scales.shape[2])
    return [jnp.dot(x, is_own.astype(x.dtype), preferred_element_type=jnp.float32)]


def _kernel(
    tiles: Any,
    matrices: Any,
    lows: Any,
    highs: Any,
    *refs: Any,
    code: Code,
    group: int,
    scales_sums: bool,
    has_zeros: bool,
    chip: TpuChip,
) -> None:
    (rows, *sums), refs = (refs[:2], refs[2:]) if scales_sums and (code.zero or has_zeros) else (refs[:1], refs[1:])
    (codes, *of_groups), (out, *kept) = refs[: 2 + has_zeros], refs[2 + has_zeros :]
    decoding = (floats_of(code, chip) if scales_sums else None) or numbers_of(code, chip)
    visit = pl.program_id(2)
    low, high = (at[visit] - tiles[visit] * out.shape[0] for at in (lows, highs))
    zero_new_tile(tiles, visit, out)

    @pl.when(high > low)
    def _() -> None:
        # A product of two numbers in bfloat16 is rounded as if it were made in float32.
        is_exact = of_groups[0].dtype != jnp.float32 and rows.dtype == jnp.bfloat16
        dtype = jnp.bfloat16 if chip.computes_bf16 and is_exact and not scales_sums else jnp.float32
        block = ColumnBlock(decoding, codes, kept[0], kept[1] if has_zeros else None, dtype, group)
        block.begin(*of_groups)
        # One body for all of them: to compile the loops over inputs for 512 rows took 10 s when there were two.
        width = width_of(out.shape[1])

        @pl.loop(0, out.shape[1] // width)
        def _(number: jax.Array) -> None:
            columns = pl.ds(pl.multiple_of(number * width, LANES), width)
            if scales_sums:
                y = block.scaled_sums(rows, out.shape[0], sums, columns)
            else:
                y = block.sums_of_scaled(rows, columns)
            out[:, columns] = with_rows(out[:, columns], y, low, high)
