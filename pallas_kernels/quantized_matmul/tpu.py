"""The product of rows with matrices of few bits, for TPUs: codes stay codes in HBM, and become numbers in registers.

The grid is that of `grouped_matmul.tpu`: a visit is one tile of rows and one matrix. While it multiplies by a block of
a matrix, Pallas fetches the codes and scales of the next one. What the matrix units are given is made of the codes by
the vector unit, some registers at a time (`tpu_words`), so that no part of a matrix is ever written as numbers.

Rows are multiplied by numbers that have been scaled. Where that would be done in float32, a few rows are multiplied by
numbers alone, and the sums of each group are scaled, which is less work: a matrix of 4 bits must become 800 numbers in
each cycle to be read as fast as v5e can. For that, rows are repeated for each of the groups in a chunk of inputs, with
zeros in the place of others.
"""

from collections.abc import Iterator
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
from pallas_kernels.quantized_matmul.tpu_words import (
    PIECE,
    WORD_ROWS,
    bits_of,
    in_both_halves,
    numbers,
    offset_of,
    planes_of,
)

INPUTS = 128  # of which a matrix has a multiple, and a group a divisor
MOST_ROWS = 512  # of a tile: while so many are multiplied, the next numbers are made
TILE_ROWS = 128  # of a tile with several groups of rows
FEW_ROWS = 16
BLOCK_BYTES = 2 * MIB  # of codes: larger blocks would only make the first fetch, which nothing hides, take longer
COLUMNS = 512  # that are computed together: so many sums of a few rows stay in registers
# One plane is written in units of 256 inputs, as many as matrix units take; so many units overlap.
CHUNK, UNROLLED = 256, 4


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
    few = padded(len(x), SUBLANES)
    # Where the vector unit multiplies two thousand numbers at a time, rows need not be repeated: for 16 rows that took
    # 12,000 of 87,000 cycles (int4, 4096 by 24,576, v6e), and scaling all numbers took 75,000.
    is_fast = chip.computes_bf16 and w.scales.dtype != jnp.float32
    scales_sums = few <= FEW_ROWS and 8 * few <= w.group and x.dtype == jnp.bfloat16 and not is_fast
    of_matrix = columns * (4 * w.codes.shape[-2] + w.scales.shape[-2] * (w.scales.dtype.itemsize + 9))
    times = CHUNK // w.group if scales_sums else 1
    rows = few if scales_sums else min(len(x), MOST_ROWS if num_groups == 1 else TILE_ROWS)
    while 2 * of_matrix + rows * (2 * x.dtype.itemsize * (size * times + columns) + 12 * columns) > (
        chip.vmem_bytes * VMEM_SHARE
    ):
        if rows <= SUBLANES:
            raise NotImplementedError(
                f"matrices of few bits with {size} inputs on a device have no room in the memory of a TPU's core: "
                "divide them among more devices, or use the quantization int8 or fp8"
            )
        rows = padded(rows // 2, SUBLANES)
    return QuantizedBlocks(rows, columns, scales_sums)


def loop_lengths(w: QuantizedMatrices, blocks: QuantizedBlocks) -> tuple[int, ...]:
    """Returns how often the grid, the loop over columns and that over inputs turn, for one tile of rows."""
    parts = pl.cdiv(w.codes.shape[-1], blocks.columns) * w.codes.shape[1]
    count = w.size // _chunk(w.size)
    return parts, blocks.columns // _width(blocks.columns), count // _unrolled(count)


def _chunk(size: int) -> int:
    """Returns the inputs that are multiplied together, of so many."""
    return CHUNK if size % CHUNK == 0 else INPUTS


def _width(columns: int) -> int:
    """Returns the columns that are computed together, of so many."""
    return next(width for width in (COLUMNS, 384, 256, LANES) if columns % width == 0)


def _unrolled(count: int) -> int:
    """Returns how many chunks one turn of a loop takes, of so many."""
    return next(length for length in (UNROLLED, 2, 1) if count % length == 0)


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
    been scaled, if they are scaled at all. Starts that do not rise, and matrices that are not there, are not detected.
    """
    _, halves, _, num_columns = w.codes.shape
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    assert x.shape[1] == w.size and w.size % INPUTS == 0 and num_columns % LANES == 0, (x.shape, w.codes.shape)
    assert INPUTS % w.group == 0 and w.group % PIECE == 0, w.group
    num_rows = len(x)
    chunk = _chunk(w.size)
    if blocks.scales_sums:  # whose sums of a group are whole registers
        x = jnp.pad(x, ((0, blocks.rows - num_rows), (0, 0)))
    visits = visits_of(starts, len(x), blocks.rows, first)
    matrices = [w.codes, w.scales, *([] if w.zeros is None else [w.zeros])]
    if not interpret:  # XLA would copy a stack that fits into VMEM there
        matrices = [pltpu.with_memory_space_constraint(array, pltpu.HBM) for array in matrices]
    grid = pl.cdiv(num_columns, blocks.columns), halves, len(visits[0])
    if blocks.scales_sums:
        rows, sums = _repeated(x, w.group, chunk)
        of_rows = [rows, sums]
        specs = [pl.BlockSpec(array.shape, lambda *_: (0, 0, 0)) for array in of_rows]
    else:
        of_rows = [x]
        specs = [pl.BlockSpec((blocks.rows, w.size), lambda part, half, visit, tiles, *_: (tiles[visit], 0))]
    call = pl.pallas_call(
        partial(
            _kernel,
            code=w.code,
            group=w.group,
            chunk=chunk,
            scales_sums=blocks.scales_sums,
            has_zeros=w.zeros is not None,
            computes_bf16=chip.computes_bf16,
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
    return out[:, :num_rows].swapaxes(0, 1)


def _repeated(x: jax.Array, group: int, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Returns the rows [T, in] of each chunk, once for each of its groups, and the sums of the groups in all lanes.

    The rows [chunks, groups * T, chunk] have zeros but in one group each. The sums are f32[chunks, groups * T, 128].
    """
    num_rows, count = len(x), chunk // group
    of_chunks = x.reshape(num_rows, -1, 1, chunk).transpose(1, 2, 0, 3)
    is_own = jnp.arange(chunk)[None, None] // group == jnp.arange(count)[:, None, None]
    # Few operations, because each has a cost: one for each of these steps took a sixth of the product (int4, v6e).
    rows = jnp.where(is_own, of_chunks, jnp.zeros((), x.dtype)).reshape(-1, count * num_rows, chunk)
    sums = rows.astype(jnp.float32).sum(-1, keepdims=True)
    return rows, jnp.broadcast_to(sums, (*sums.shape[:2], LANES))


def _kernel(
    tiles: Any,
    matrices: Any,
    lows: Any,
    highs: Any,
    *refs: Any,
    code: Code,
    group: int,
    chunk: int,
    scales_sums: bool,
    has_zeros: bool,
    computes_bf16: bool,
) -> None:
    num_rows = 2 if scales_sums else 1
    rows, (codes, *of_groups), (out, *kept) = refs[:num_rows], refs[num_rows:][: 2 + has_zeros], refs[-2 - has_zeros :]
    visit = pl.program_id(2)
    low, high = (at[visit] - tiles[visit] * out.shape[0] for at in (lows, highs))
    zero_new_tile(tiles, visit, out)

    @pl.when(high > low)
    def _() -> None:
        # A product of two numbers in bfloat16 is rounded as if it were made in float32.
        is_exact = of_groups[0].dtype != jnp.float32 and rows[0].dtype == jnp.bfloat16
        dtype = jnp.bfloat16 if computes_bf16 and is_exact and not scales_sums else jnp.float32
        block = _ColumnBlock(code, codes, kept[0], kept[1] if has_zeros else None, dtype, group, chunk, computes_bf16)
        block.begin(*of_groups)
        # One body for all of them: to compile the loops over inputs for 512 rows took 10 s when there were two.
        width = _width(out.shape[1])

        @pl.loop(0, out.shape[1] // width)
        def _(number: jax.Array) -> None:
            columns = pl.ds(pl.multiple_of(number * width, LANES), width)
            y = block.scaled_sums(rows[0], rows[1], columns) if scales_sums else block.sums_of_scaled(rows[0], columns)
            out[:, columns] = with_rows(out[:, columns], y, low, high)


@dataclass(frozen=True)
class _ColumnBlock:
    """Some columns of a matrix, in VMEM.

    codes  # i32[in / codes of a word, columns]
    scales, zeros  # i32[in / group, columns], bits of numbers of `dtype`, which both halves have if that is bfloat16
    """

    code: Code
    codes: Any
    scales: Any
    zeros: Any | None
    dtype: Any
    group: int
    chunk: int
    computes_bf16: bool

    def begin(self, scales: Any, zeros: Any | None = None) -> None:
        """Makes numbers of the scales and zeros of a checkpoint."""
        stored = scales[...]
        if stored.dtype == jnp.uint8:
            self.scales[...] = self._bits(pltpu.bitcast(stored.astype(jnp.int32) << 23, jnp.float32))
        else:
            self.scales[...] = self._bits(stored.astype(jnp.float32))
        if zeros is not None:
            assert self.zeros is not None
            whole = zeros[...].astype(jnp.int32) + offset_of(self.code)
            self.zeros[...] = self._bits(whole.astype(jnp.float32))

    def _bits(self, values: jax.Array) -> jax.Array:
        return in_both_halves(values) if self.dtype == jnp.bfloat16 else pltpu.bitcast(values, jnp.int32)

    def sums_of_scaled(self, x: Any, columns: pl.Slice) -> jax.Array:
        """Returns the product of rows [T, in] with these columns: f32[T, columns]."""

        def add(number: jax.Array, sums: jax.Array) -> jax.Array:
            pieces, first = [], number * (self.chunk // self.group)
            for at, piece in self._numbers(number, columns):
                scaled = piece.astype(self.dtype)
                minus, scale = self._of_group(first + at // self.group, columns)
                if minus is not None:
                    scaled = scaled - minus
                pieces.append((scaled * scale).astype(x.dtype))
            part = x[:, pl.ds(pl.multiple_of(number * self.chunk, INPUTS), self.chunk)]
            return sums + _product(part, jnp.concatenate(pieces))

        return self._over_chunks(add, x.shape[0], columns)

    def scaled_sums(self, rows: Any, sums_of_rows: Any, columns: pl.Slice) -> jax.Array:
        """Returns the product of rows that `_repeated` has made with these columns: f32[T, columns]."""
        count = self.chunk // self.group
        num_rows = rows.shape[1] // count

        def add(number: jax.Array, sums: jax.Array) -> jax.Array:
            part = _product(rows[number], jnp.concatenate([piece for _, piece in self._numbers(number, columns)]))
            for i in range(count):
                of_group = slice(i * num_rows, (i + 1) * num_rows)
                minus, scale = self._of_group(number * count + i, columns)
                own = part[of_group]
                if minus is not None:
                    wide = jnp.concatenate([sums_of_rows[number, of_group]] * (own.shape[1] // LANES), 1)
                    own = own - minus * wide
                sums = sums + own * scale
            return sums

        return self._over_chunks(add, num_rows, columns)

    def _over_chunks(self, add: Any, num_rows: int, columns: pl.Slice) -> jax.Array:
        count = self.codes.shape[0] * 32 // bits_of(self.code) // self.chunk
        unrolled = _unrolled(count)

        def some(turn: jax.Array, sums: jax.Array) -> jax.Array:
            for i in range(unrolled):
                sums = add(turn * unrolled + i, sums)
            return sums

        sums = jnp.zeros((num_rows, columns.size), jnp.float32)
        result: jax.Array = jax.lax.fori_loop(0, count // unrolled, some, sums)
        return result

    def _numbers(self, number: jax.Array, columns: pl.Slice) -> Iterator[tuple[int, jax.Array]]:
        """Yields the numbers of a chunk of inputs, bf16[16, columns] at a time, and where they begin in it."""
        planes = planes_of(self.code)
        of_chunk = self.chunk * bits_of(self.code) // 32
        for at in range(0, of_chunk, WORD_ROWS):
            words = self.codes[pl.ds(pl.multiple_of(number * of_chunk + at, WORD_ROWS), WORD_ROWS), columns]
            for plane in range(planes):
                yield (
                    (at // WORD_ROWS * planes + plane) * PIECE,
                    numbers(self.code, words, plane, self.computes_bf16),
                )

    def _of_group(self, group: jax.Array, columns: pl.Slice) -> tuple[Any, jax.Array]:
        """Returns what is subtracted from the numbers of a group, or None, and its scales, for 1 or 16 of its rows."""

        def row(ref: Any) -> jax.Array:
            bits = ref[pl.ds(group, 1), columns]
            if self.dtype == jnp.bfloat16:
                bits = jnp.broadcast_to(bits, (WORD_ROWS, bits.shape[1]))
            return pltpu.bitcast(bits, self.dtype)

        minus = self.code.zero + offset_of(self.code)
        if self.zeros is not None:
            return row(self.zeros), row(self.scales)
        return (jnp.asarray(minus, self.dtype) if minus else None), row(self.scales)


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # else its factors would be rounded
    return jax.lax.dot_general(x, w, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
