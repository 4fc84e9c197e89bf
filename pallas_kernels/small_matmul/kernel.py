"""The matrix product as dot products: both operands are contiguous along the sum, so nothing is packed or turned.

An item of work is some columns of the result. It goes through them a few at a time, and through all rows for each few,
so that a matrix is read from memory once. The tile of a few rows by a few columns is summed in registers.
"""

from collections.abc import Sequence

from llvmlite import ir

from pallas_kernels.cpu.emit import SIZE_OF, Emitter
from pallas_kernels.cpu.frame import Frame
from pallas_kernels.cpu.pool import parallel_loop
from pallas_kernels.cpu.values import Value
from pallas_kernels.cpu.vectors import dot_pairs, first_lanes, shuffle, sums

COLUMNS = 4  # of a tile
BLOCK = 32  # columns of an item
ROWS = 64  # at a time: 512 rows by 384 columns of 2048 took 5.9 ms all at once, and 4.4 so (float32, Zen 4)
# Columns that are fetched in advance. One row and 4096 columns of 384 took 251 us without it, 314 with 4 and 227 with 8
# columns; sixteen rows 650, 401 and some 400 (Zen 4).
AHEAD = 2 * COLUMNS


def matmul(e: Emitter, frame: Frame, dtype: str, out_dtype: str) -> None:
    """Emits y [M, N] = x [M, K] w[index] [N, K]^T. Arguments: x, index, w[0], w[1], ..."""
    x, y = frame.argument(0), frame.result(0)
    weight = frame.argument(e.load_int(frame.argument(1).data, 32) + 2)
    num_columns = y.size(1)
    captured = (x.data, weight.data, y.data, x.size(0), x.size(1), num_columns)

    def block(t: Emitter, item: Value, captured: Sequence[Value]) -> None:
        _block(t, item, captured, dtype, out_dtype)

    parallel_loop(e, frame, (num_columns + (BLOCK - 1)) // BLOCK, captured, block)


def _block(e: Emitter, item: Value, captured: Sequence[Value], dtype: str, out_dtype: str) -> None:
    x, weight, y, M, K, N = captured
    tiles = {rows: _tile(e, rows, dtype, out_dtype) for rows in e.chip.group_sizes}
    size, out_size = SIZE_OF[dtype], SIZE_OF[out_dtype]
    # `x` of these rows stays in the second cache while all columns of the item pass by.
    with e.loop(0, M, ROWS) as first:
        some = e.min(M - first, e.integer(ROWS))
        with e.loop(item * BLOCK, e.min(item * BLOCK + BLOCK, N), COLUMNS) as wanted:
            column = e.min(wanted, N - COLUMNS)  # the last few may be computed twice, to the same bits
            for rows, at in e.groups(e.chip.group_sizes, some):
                row = first + at
                places = (x + row * K * size, weight + column * K * size, y + (row * N + column) * out_size)
                e.call(tiles[rows], *places, K, N)


def _tile(e: Emitter, rows: int, dtype: str, out_dtype: str) -> ir.Function:
    """Emits the product of `rows` rows with COLUMNS columns. Each is a sum over vectors, then over lanes."""
    t = e.function(f"tile{rows}", 5)
    x, weight, y, K, N = t.arguments
    size = SIZE_OF[dtype]
    totals = {(m, n): t.variable(t.vector(0)) for m in range(rows) for n in range(COLUMNS)}
    pairs = dtype == "bfloat16" and t.chip.has_bf16_dot
    step = t.lanes * 2 if pairs else t.lanes

    def add(k: Value, mask: Value | None = None) -> None:
        for n in range(COLUMNS):
            t.prefetch(weight + (K * (n + AHEAD) + k) * size, level=2)
        load = t.load_pairs if pairs else lambda address, mask: t.load(address, dtype, mask)
        a = [load(x + (K * m + k) * size, mask) for m in range(rows)]
        for n in range(COLUMNS):
            b = load(weight + (K * n + k) * size, mask)
            for m in range(rows):
                totals[m, n].set((dot_pairs if pairs else t.fma)(a[m], b, totals[m, n].get()))

    whole = K // step * step
    with t.loop(0, whole, step) as k:
        add(k)
    with t.when(whole < K):
        add(whole, first_lanes(K - whole, step))
    places = list(totals)
    for first in range(0, len(places), t.lanes):
        some = places[first : first + t.lanes]
        total = sums([totals[place].get() for place in some])
        for start in range(0, len(some), COLUMNS):
            m, n = some[start]
            address = y + (N * m + n) * SIZE_OF[out_dtype]
            t.store(address, shuffle(total, total, range(start, start + COLUMNS)), out_dtype)
    return t.finish()
