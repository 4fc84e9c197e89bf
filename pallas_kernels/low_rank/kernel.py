"""Two products in one call: into the rank, as dot products, and out of it, as sums of rows of the second matrix.

The second sum has the few terms of a rank. Dot products of 16 numbers would be mostly the sums across a vector's lanes,
so there a vector has columns of the result, which stay in registers while all of the rank passes by. Few rows are bound
by what is read, and so no zeros are: each column has the rank of its part alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce

from llvmlite import ir

from pallas_kernels.cpu.emit import SIZE_OF, Emitter
from pallas_kernels.cpu.frame import Frame
from pallas_kernels.cpu.pool import parallel_loop
from pallas_kernels.cpu.values import I64, Value, Variable
from pallas_kernels.cpu.vectors import first_lanes, gelu_tanh, largest, silu
from pallas_kernels.small_matmul.kernel import COLUMNS, dot_products

RANKS = COLUMNS  # of a tile, of what is between the two products
ROWS = 64  # of an item of work, as long as there are so many
BLOCK = 128  # columns of an item of the second product
VECTORS = 4  # of a tile, both halves together, whose sums fit the registers (`CpuChip.group_sizes`)
NO_GATE = "none"
_FLOAT = SIZE_OF["float32"]
_ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh}


def low_rank(e: Emitter, frame: Frame, dtype: str, out_dtype: str) -> None:
    """Emits y += (x down^T) up where the result y [T, out] is.

    The arguments are y, x, rows i32[T], starts i32[G + 1], index, down[0], up[0], down[1], up[1], ... Rows starts[g] to
    starts[g + 1] of `rows` are those of group g. The last row of `up` says which part of the rank a column has.
    """
    _multiply(e, frame, dtype, _LowRankProduct(dtype, out_dtype, out_dtype, NO_GATE))


def gated_low_rank(e: Emitter, frame: Frame, dtype: str, gate: str) -> None:
    """Emits gate(a) * b of all rows, [T, F], where y [T, 2, F] has a and b before the same is added to them.

    y is float32, and the arguments are as above.
    """
    _multiply(e, frame, dtype, _LowRankProduct(dtype, "float32", dtype, gate))


@dataclass(frozen=True)
class _LowRankProduct:
    """Says how the second product becomes the result, and of which dtypes."""

    dtype: str  # of the matrices
    sum_dtype: str  # of what is added to
    out_dtype: str
    gate: str

    @property
    def halves(self) -> int:
        return 1 if self.gate == NO_GATE else 2


def _multiply(e: Emitter, frame: Frame, dtype: str, result: _LowRankProduct) -> None:
    y, out, x, rows, starts = frame.argument(0), frame.result(0), *(frame.argument(number) for number in (1, 2, 3))
    pair = e.load_int(frame.argument(4).data, 32) * 2 + 5
    down, up = frame.argument(pair), frame.argument(pair + 1)
    num_groups, rank, size_in, size_out = down.size(0), down.size(1), x.size(1), out.size(1)
    num_grouped = e.load_int(starts.data + num_groups * 4, 32)
    between = e.call_c("malloc", e.max(num_grouped, e.integer(1)) * rank * _FLOAT)  # in the order of `rows`
    addresses = (y.data, out.data, x.data, down.data, up.data, rows.data, starts.data, between)
    captured = (*addresses, rank, up.size(1) - 1, num_groups, size_in, size_out, x.size(0))
    blocks = (num_grouped + (ROWS - 1)) // ROWS
    parallel_loop(e, frame, blocks * (rank // RANKS), captured, partial(_into, dtype))
    # A gate changes all rows, and without one those of no group are as they were.
    blocks = blocks if result.gate == NO_GATE else (x.size(0) + (ROWS - 1)) // ROWS
    columns = (size_out + (BLOCK - 1)) // BLOCK
    parallel_loop(e, frame, blocks * columns, captured, partial(_out_of, result))
    e.call_c("free", between)


def _into(dtype: str, t: Emitter, item: Value, captured: Sequence[Value]) -> None:
    """Emits some ranks of some rows."""
    _, _, x, down, _, rows, starts, between, rank, _, num_groups, size_in, _, _ = captured
    tiles = {count: _into_tile(t, count, dtype) for count in t.chip.group_sizes}
    blocks = rank // RANKS
    first_rank = item % blocks * RANKS

    def of_rows(count: int, first: Value, group: Value) -> None:
        matrix = down + (group * rank + first_rank) * size_in * SIZE_OF[dtype]
        to = between + (first * rank + first_rank) * _FLOAT
        t.call(tiles[count], x, rows + first * 4, matrix, to, size_in, rank)

    _over_groups(t, item // blocks, starts, num_groups, of_rows)


def _out_of(result: _LowRankProduct, t: Emitter, item: Value, captured: Sequence[Value]) -> None:
    """Emits some columns of some rows of the result."""
    y, out, _, _, up, rows, starts, between, rank, part_rank, num_groups, _, size_out, num_rows = captured
    vectors = VECTORS // result.halves
    tiles = {(count, of): _out_tile(t, count, of, result) for count in t.chip.group_sizes for of in (vectors, 1)}
    blocks = (size_out + (BLOCK - 1)) // BLOCK
    begin = item % blocks * BLOCK
    end = t.min(begin + BLOCK, size_out)
    step = vectors * t.lanes
    whole = begin + (end - begin) // step * step

    def of_columns(count: int, first: Value, matrix: Value, part_rank: Value) -> None:
        def tile(of: int, column: Value) -> None:
            at = y + column * SIZE_OF[result.sum_dtype], out + column * SIZE_OF[result.out_dtype]
            own = rows + first * 4, matrix + column * SIZE_OF[result.dtype], between + first * rank * _FLOAT
            t.call(tiles[count, of], *at, *own, rank, part_rank, size_out, end - column)

        with t.loop(begin, whole, step) as column:
            tile(vectors, column)
        with t.loop(whole, end, t.lanes) as column:
            tile(1, column)

    def of_rows(count: int, first: Value, group: Value) -> None:
        before = group * (part_rank + 1) * size_out * (result.halves * SIZE_OF[result.dtype])
        of_columns(count, first, up + before, part_rank)

    block = item // blocks
    _over_groups(t, block, starts, num_groups, of_rows)
    if result.gate != NO_GATE:
        first = t.max(t.load_int(starts + num_groups * 4, 32), block * ROWS)
        last = t.min(block * ROWS + ROWS, num_rows)
        for count, at in t.groups(t.chip.group_sizes, last - first):
            of_columns(count, first + at, up, t.integer(0))


def _over_groups(
    t: Emitter, block: Value, starts: Value, num_groups: Value, of_rows: Callable[[int, Value, Value], None]
) -> None:
    """Emits `of_rows(count, first, group)` of all rows in a block of `ROWS`, a few of one group at a time."""
    with t.loop(0, num_groups) as group:
        first = t.max(t.load_int(starts + group * 4, 32), block * ROWS)
        last = t.min(t.load_int(starts + group * 4 + 4, 32), block * ROWS + ROWS)
        for count, at in t.groups(t.chip.group_sizes, last - first):
            of_rows(count, first + at, group)


def _into_tile(e: Emitter, count: int, dtype: str) -> ir.Function:
    """Emits the products of `count` rows of x with `RANKS` rows of a matrix."""
    t = e.function(f"into{count}", 6)
    x, rows, matrix, to, size_in, rank = t.arguments
    row_bytes = size_in * SIZE_OF[dtype]
    addresses = [x + t.load_int(rows + m * 4, 32) * row_bytes for m in range(count)]
    dot_products(t, addresses, matrix, None, to, size_in, rank, dtype, "float32", dtype)
    return t.finish()


def _out_tile(e: Emitter, count: int, vectors: int, result: _LowRankProduct) -> ir.Function:
    """Emits `count` rows by `vectors` vectors of the result. A single vector may lack some columns."""
    t = e.function(f"out{count}x{vectors}", 9)
    y, out, rows, matrix, between, rank, part_rank, size_out, left = t.arguments
    mask = first_lanes(left, t.lanes) if vectors == 1 else None
    numbers = [t.load_int(rows + m * 4, 32) for m in range(count)]
    width = size_out * result.halves
    parts = [(half, v) for half in range(result.halves) for v in range(vectors)]
    offsets = {(half, v): size_out * half + v * t.lanes for half, v in parts}

    def begun(m: int, part: tuple[int, int]) -> Variable:
        address = y + (numbers[m] * width + offsets[part]) * SIZE_OF[result.sum_dtype]
        return t.variable(t.load(address, result.sum_dtype, mask))

    totals = {(m, *part): begun(m, part) for m in range(count) for part in parts}
    with t.when(part_rank > 0):  # rows of no group have nothing to read
        for half in range(result.halves):
            own = [part for part in parts if part[0] == half]

            def loaded(row: Value, part: tuple[int, int]) -> Value:
                return t.load(matrix + (row * width + offsets[part]) * SIZE_OF[result.dtype], result.dtype, mask)

            marks = {part: loaded(part_rank, part) for part in own}
            most = _integer(largest(reduce(t.max, marks.values())))
            least = t.integer(0) - _integer(largest(reduce(t.max, (t.vector(0) - mark for mark in marks.values()))))
            with t.loop(least, most + 1) as number:
                is_own = {part: mark.equals(t.floats(t.splat(number))) for part, mark in marks.items()}
                with t.loop(0, part_rank) as r:
                    b = {part: t.select(is_own[part], loaded(r, part), t.vector(0)) for part in own}
                    for m in range(count):
                        a = t.load_everywhere(between + (rank * m + number * part_rank + r) * _FLOAT)
                        for part in own:
                            totals[m, *part].set(t.fma(a, b[part], totals[m, *part].get()))
    for m in range(count):
        for v in range(vectors):
            total = totals[m, 0, v].get()
            if result.gate != NO_GATE:
                total = _ACTIVATIONS[result.gate](total) * totals[m, 1, v].get()
            address = out + (numbers[m] * size_out + v * t.lanes) * SIZE_OF[result.out_dtype]
            t.store(address, total, result.out_dtype, mask)
    return t.finish()


def _integer(number: Value) -> Value:
    """Returns a float32 without a fraction as an integer."""
    e = number.emitter
    return Value(e, e.builder.fptosi(number.ir, I64))
