"""The matrix product as dot products: both operands are contiguous along the sum, so nothing is packed or turned.

An item of work is some columns of the result. It goes through them a few at a time, and through all rows for each few,
so that a matrix is read from memory once. The tile of a few rows by a few columns is summed in registers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from pallas_kernels.cpu.emit import SIZE_OF, Emitter
from pallas_kernels.cpu.frame import Frame
from pallas_kernels.cpu.pool import parallel_loop
from pallas_kernels.cpu.values import Value
from pallas_kernels.cpu.vectors import dot_pairs, first_lanes, gelu_tanh, shuffle, silu, sums

COLUMNS = 4  # of a tile
BLOCK = 32  # columns of an item
ROWS = 64  # at a time: 512 rows by 384 columns of 2048 took 5.9 ms all at once, and 4.4 so (float32, Zen 4)
# Columns that are fetched in advance. One row and 4096 columns of 384 took 251 us without it, 314 with 4 and 227 with 8
# columns; sixteen rows 650, 401 and some 400 (Zen 4).
AHEAD = 2 * COLUMNS
INT8 = "int8"


def matmul(e: Emitter, frame: Frame, dtype: str, out_dtype: str, weight_dtype: str) -> None:
    """Emits y [M, N] = x [M, K] w[index] [N, K]^T. Its arguments are x, index, w[0], w[1], ...

    Where the weights are int8, each is followed by its scales s [N], and column n of y is multiplied by s[n].
    """
    _multiply(e, frame, dtype, weight_dtype, _tiles(dtype, out_dtype, weight_dtype))


def grouped(e: Emitter, frame: Frame, dtype: str, out_dtype: str, weight_dtype: str) -> None:
    """Emits the same for rows in groups, each of which has a matrix of its own, w[index] [G, N, K].

    The arguments are x, index, starts i32[G + 1], w[0], ...
    """
    _multiply(e, frame, dtype, weight_dtype, _tiles(dtype, out_dtype, weight_dtype), groups=1)


def _tiles(dtype: str, out_dtype: str, weight_dtype: str) -> "TileOf":

    def tile_of(t: Emitter, rows: int) -> EmitTile:
        tile, size = _tile(t, rows, dtype, out_dtype, weight_dtype), SIZE_OF[out_dtype]

        def emit(x: Value, w: _Weight, y: Value, row: Value, column: Value, K: Value, N: Value) -> None:
            t.call(tile, x, w.row(column, K), w.scale(column), y + (row * N + column) * size, K, N)

        return emit

    return tile_of


def gated(e: Emitter, frame: Frame, dtype: str, activation: str, weight_dtype: str) -> None:
    """Emits h [M, F] = activation(x a^T) * (x b^T), where w[index] [2, F, K] is a and b.

    It takes the arguments of `matmul`.
    """
    _multiply(e, frame, dtype, weight_dtype, _gated_tiles(dtype, activation, weight_dtype))


def grouped_gated(e: Emitter, frame: Frame, dtype: str, activation: str, weight_dtype: str) -> None:
    """Emits the same for rows in groups, where w[index] is [G, 2, F, K]. It takes the arguments of `grouped`."""
    _multiply(e, frame, dtype, weight_dtype, _gated_tiles(dtype, activation, weight_dtype), groups=2)


def _gated_tiles(dtype: str, activation: str, weight_dtype: str) -> "TileOf":
    activate = {"silu": silu, "gelu_tanh": gelu_tanh}[activation]

    def tile_of(t: Emitter, rows: int) -> EmitTile:
        tile, size = _tile(t, rows, dtype, "float32", weight_dtype), SIZE_OF[dtype]
        # The products of both halves, [rows, COLUMNS] each and a vector after them, which partial vectors may read.
        floats = rows * COLUMNS
        gate, up = (t.words((floats + t.lanes) // 2) for _ in range(2))

        def emit(x: Value, w: _Weight, h: Value, row: Value, column: Value, K: Value, F: Value) -> None:
            for half, products in enumerate((gate, up)):
                first = F + column if half else column
                t.call(tile, x, w.row(first, K), w.scale(first), products, K, t.integer(COLUMNS))
            for start in range(0, floats, t.lanes):
                result = activate(t.load(gate + start * 4)) * t.load(up + start * 4)
                for place in range(start, min(start + t.lanes, floats), COLUMNS):
                    some = shuffle(result, result, range(place - start, place - start + COLUMNS))
                    t.store(h + ((row + place // COLUMNS) * F + column) * size, some, dtype)

        return emit

    return tile_of


@dataclass(frozen=True)
class _Weight:
    """A matrix [N, K] in memory, and the scales of its rows if it is int8."""

    address: Value
    scales: Value
    dtype: str

    def row(self, number: Value, K: Value) -> Value:
        """Returns the address of a row."""
        return self.address + number * K * SIZE_OF[self.dtype]

    def scale(self, number: Value) -> Value:
        """Returns the address of a row's scale."""
        return self.scales + number * SIZE_OF["float32"]


# Emits a tile of the result: (x at the first row, weight, result, first row, first column, K, columns of the result).
EmitTile = Callable[[Value, _Weight, Value, Value, Value, Value, Value], None]
# Makes the emitter of tiles of so many rows.
type TileOf = Callable[[Emitter, int], EmitTile]


def _multiply(e: Emitter, frame: Frame, dtype: str, weight_dtype: str, tile_of: TileOf, groups: int = 0) -> None:
    """Emits a loop over all tiles of the result.

    Where rows are in `groups`, the matrix of each has so many times as many rows as the result has columns.
    """
    x, y = frame.argument(0), frame.result(0)
    index, first = e.load_int(frame.argument(1).data, 32), 3 if groups else 2
    if weight_dtype == INT8:
        weight, scales = frame.argument(index * 2 + first).data, frame.argument(index * 2 + first + 1).data
    else:
        weight, scales = frame.argument(index + first).data, e.integer(0)
    num_columns = y.size(1)
    num_blocks = (num_columns + (BLOCK - 1)) // BLOCK
    starts, num_groups = e.integer(0), e.integer(1)
    if groups:
        starts, num_groups = frame.argument(2).data, frame.argument(2).size(0) - 1
    captured = (x.data, weight, scales, y.data, x.size(0), x.size(1), num_columns, starts)

    def block(t: Emitter, item: Value, captured: Sequence[Value]) -> None:
        x, address, scales, y, M, K, N, starts = captured
        begin, end = t.integer(0), M
        if groups:
            num_blocks = (N + (BLOCK - 1)) // BLOCK
            group, item = item // num_blocks, item % num_blocks
            begin, end = t.load_int(starts + group * 4, 32), t.load_int(starts + group * 4 + 4, 32)
            rows_before = group * N * groups
            address = address + rows_before * K * SIZE_OF[weight_dtype]
            scales = scales + rows_before * SIZE_OF["float32"]
        weight = _Weight(address, scales, weight_dtype)
        tiles = {rows: tile_of(t, rows) for rows in t.chip.group_sizes}
        # `x` of these rows stays in the second cache while all columns of the item pass by.
        with t.loop(begin, end, ROWS) as first:
            some = t.min(end - first, t.integer(ROWS))
            with t.loop(item * BLOCK, t.min(item * BLOCK + BLOCK, N), COLUMNS) as wanted:
                column = t.min(wanted, N - COLUMNS)  # the last few may be computed twice, to the same bits
                for rows, at in t.groups(t.chip.group_sizes, some):
                    row = first + at
                    tiles[rows](x + row * K * SIZE_OF[dtype], weight, y, row, column, K, N)

    parallel_loop(e, frame, num_groups * num_blocks, captured, block)


def _tile(e: Emitter, rows: int, dtype: str, out_dtype: str, weight_dtype: str) -> ir.Function:
    """Emits the product of `rows` rows with COLUMNS columns. Each is a sum over vectors, then over lanes."""
    t = e.function(f"tile{rows}", 6)
    x, weight, scales, y, K, N = t.arguments
    addresses = [x + K * m * SIZE_OF[dtype] for m in range(rows)]
    of_int8 = scales if weight_dtype == INT8 else None
    dot_products(t, addresses, weight, of_int8, y, K, N, dtype, out_dtype, weight_dtype)
    return t.finish()


def dot_products(
    t: Emitter,
    rows: Sequence[Value],
    weight: Value,
    scales: Value | None,
    y: Value,
    K: Value,
    N: Value,
    dtype: str,
    out_dtype: str,
    weight_dtype: str,
    ahead: Value | None = None,
) -> None:
    """Emits the products of rows of K numbers, at these addresses, with the first COLUMNS rows of a matrix [.., K].

    The result at `y` has rows of N numbers. `scales`: those of the matrix's rows, if it is int8. What lies `ahead`
    bytes after what is read is fetched in advance (None: `AHEAD` rows).
    """
    size, weight_size = SIZE_OF[dtype], SIZE_OF[weight_dtype]
    ahead = K * (AHEAD * weight_size) if ahead is None else ahead
    totals = {(m, n): t.variable(t.vector(0)) for m in range(len(rows)) for n in range(COLUMNS)}
    pairs = dtype == weight_dtype == "bfloat16" and t.chip.has_bf16_dot
    step = t.lanes * 2 if pairs else t.lanes

    def load(address: Value, dtype: str, mask: Value | None) -> Value:
        return t.load_pairs(address, mask) if pairs else t.load(address, dtype, mask)

    def add(k: Value, mask: Value | None = None) -> None:
        for n in range(COLUMNS):
            t.prefetch(weight + (K * n + k) * weight_size + ahead, level=2)
        a = [load(row + k * size, dtype, mask) for row in rows]
        for n in range(COLUMNS):
            b = load(weight + (K * n + k) * weight_size, weight_dtype, mask)
            for m in range(len(rows)):
                totals[m, n].set((dot_pairs if pairs else t.fma)(a[m], b, totals[m, n].get()))

    whole = K // step * step
    with t.loop(0, whole, step) as k:
        add(k)
    with t.when(whole < K):
        add(whole, first_lanes(K - whole, step))
    if scales is not None:
        columns = t.load(scales, mask=first_lanes(t.integer(COLUMNS), t.lanes))
        scale = shuffle(columns, columns, [place % COLUMNS for place in range(t.lanes)])
    places = list(totals)
    for first in range(0, len(places), t.lanes):
        some = places[first : first + t.lanes]
        total = sums([totals[place].get() for place in some])
        total = total if scales is None else total * scale
        for start in range(0, len(some), COLUMNS):
            m, n = some[start]
            address = y + (N * m + n) * SIZE_OF[out_dtype]
            t.store(address, shuffle(total, total, range(start, start + COLUMNS)), out_dtype)
