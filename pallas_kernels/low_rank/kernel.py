"""Two products in one call: into the rank, as dot products, and out of it, as sums of rows of the second matrix.

The second sum has the few terms of a rank. Dot products of 16 numbers would be mostly the sums across a vector's lanes,
so there a vector has columns of the result, which stay in registers while all of the rank passes by. Few rows are bound
by what is read, and so no zeros are: each column has the rank of its part alone. In bfloat16, CPUs that multiply pairs
take two ranks at once, and round what is between the products for it: 16 rows took 0.9 of the time (Zen 4).

Matrices of adapters are short, and what fetches memory by itself has only begun when one ends. So tiles ask for what
the next ones read, and the first product for the second matrix. Without it, the adapters of 28 experts were read at 10
GB/s, and now at 15 (4.5 MB a layer, one core of Zen 4, float32, nothing in the caches before).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce

from llvmlite import ir

from pallas_kernels.cpu.emit import SIZE_OF, Emitter
from pallas_kernels.cpu.frame import Frame
from pallas_kernels.cpu.pool import num_threads, parallel_runs
from pallas_kernels.cpu.values import I64, Value, Variable
from pallas_kernels.cpu.vectors import bfloat16_pairs, dot_pairs, first_lanes, gelu_tanh, largest, silu
from pallas_kernels.small_matmul.kernel import COLUMNS, dot_products

RANKS = COLUMNS  # of a tile, of what is between the two products
ROWS = 64  # of a unit, as long as a group has so many
BLOCK = 128  # columns of the result, of which an item of the second product has some
ITEMS = 4  # for each thread, where there are few units
NO_GATE = "none"
_FLOAT, _WORD, _LINE = SIZE_OF["float32"], 8, 64
_ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh}


def low_rank(e: Emitter, frame: Frame, dtype: str, out_dtype: str, has_ratios: bool) -> None:
    """Emits y += (x down^T) up where the result y [T, out] is.

    The arguments are y, x, rows i32[T], starts i32[G + 1], index, down[0], up[0], down[1], up[1], ... Rows starts[g] to
    starts[g + 1] of `rows` are those of group g. The last row of `up` says which part of the rank a column has. With
    ratios, each pair is followed by f32[G, out], and y is multiplied by one and its group's before.
    """
    _multiply(e, frame, _LowRankProduct(dtype, out_dtype, out_dtype, NO_GATE, has_ratios))


def gated_low_rank(e: Emitter, frame: Frame, dtype: str, gate: str, has_ratios: bool) -> None:
    """Emits gate(a) * b of all rows, [T, F], where y [T, 2, F] has a and b before the same is added to them.

    y is float32, and the arguments are as above.
    """
    _multiply(e, frame, _LowRankProduct(dtype, "float32", dtype, gate, has_ratios))


@dataclass(frozen=True)
class _LowRankProduct:
    """Says how the second product becomes the result, and of which dtypes."""

    dtype: str  # of the matrices
    sum_dtype: str  # of what is added to
    out_dtype: str
    gate: str
    has_ratios: bool

    @property
    def halves(self) -> int:
        return 1 if self.gate == NO_GATE else 2

    def has_pairs(self, e: Emitter) -> bool:
        """Returns whether the second product takes two ranks at once, as pairs of bfloat16."""
        return self.dtype == "bfloat16" and e.chip.has_bf16_dot

    def between_dtype(self, e: Emitter) -> str:
        """Returns the dtype of what is between the two products."""
        return "bfloat16" if self.has_pairs(e) else "float32"

    def up_bytes(self, part_rank: Value, size_out: Value) -> Value:
        """Returns the bytes of the second matrix of a group."""
        return (part_rank + 1) * size_out * (self.halves * SIZE_OF[self.dtype])


@dataclass(frozen=True)
class _Units:
    """The work of a call: up to `ROWS` rows of one group each, so that no item looks at groups without rows.

    A unit is three words: its group, its first place in the order of `rows`, and how many rows it has.
    """

    address: Value

    @staticmethod
    def most(num_groups: Value, num_rows: Value) -> Value:
        """Returns how many there may be, with one after the last."""
        return num_groups + 2 + num_rows // ROWS

    def put(self, e: Emitter, number: Variable, group: Value, begin: Value, end: Value) -> None:
        """Emits those of a group, of which `number` is the first."""
        with e.loop(begin, end, ROWS) as first:
            for word, value in enumerate((group, first, e.min(end - first, e.integer(ROWS)))):
                e.store_int(self.address + (number.get() * 3 + word) * _WORD, value)
            number.set(number.get() + 1)

    def end(self, e: Emitter, number: Value, num_groups: Value) -> None:
        """Emits one after the last, of no group, whose matrices are asked for in advance wherever they would be."""
        e.store_int(self.address + number * (3 * _WORD), num_groups)

    def words(self, t: Emitter, number: Value) -> list[Value]:
        return [t.load_int(self.address + (number * 3 + word) * _WORD) for word in range(3)]


def _multiply(e: Emitter, frame: Frame, result: _LowRankProduct) -> None:
    y, out, x, rows, starts = frame.argument(0), frame.result(0), *(frame.argument(number) for number in (1, 2, 3))
    first = e.load_int(frame.argument(4).data, 32) * (3 if result.has_ratios else 2) + 5
    down, up = frame.argument(first), frame.argument(first + 1)
    ratios = frame.argument(first + 2).data if result.has_ratios else e.integer(0)
    num_groups, rank, size_in, size_out, num_rows = down.size(0), down.size(1), x.size(1), out.size(1), x.size(0)
    num_grouped = e.load_int(starts.data + num_groups * 4, 32)
    # In the order of `rows`, and words follow.
    between_bytes = (num_grouped * rank * SIZE_OF[result.between_dtype(e)] + (_WORD - 1)) // _WORD * _WORD
    between = e.call_c("malloc", between_bytes + _Units.most(num_groups, num_rows) * (3 * _WORD))
    units, number = _Units(between + between_bytes), e.variable(e.integer(0))
    with e.loop(0, num_groups) as group:
        place = starts.data + group * 4
        units.put(e, number, group, e.load_int(place, 32), e.load_int(place + 4, 32))
    num_units = number.get()
    if result.gate != NO_GATE:  # it changes all rows, and without one those of no group are as they were
        units.put(e, number, num_groups, num_grouped, num_rows)
    units.end(e, number.get(), num_groups)
    wanted = num_threads(e, frame) * ITEMS

    def parts_of(count: Value, most: Value) -> Value:
        return e.max(e.min(wanted // e.max(count, e.integer(1)), most), e.integer(1))

    rank_parts = parts_of(num_units, rank // RANKS)
    column_parts = parts_of(number.get(), (size_out + (BLOCK - 1)) // BLOCK)
    addresses = (y.data, out.data, x.data, down.data, up.data, ratios, rows.data, between, units.address)
    captured = (*addresses, rank, up.size(1) - 1, num_groups, size_in, size_out, rank_parts, column_parts)
    parallel_runs(e, frame, num_units * rank_parts, captured, partial(_into, result))
    parallel_runs(e, frame, number.get() * column_parts, captured, partial(_out_of, result))
    e.call_c("free", between)


def _into(result: _LowRankProduct, t: Emitter, item: Value, captured: Sequence[Value]) -> None:
    """Emits some ranks of a unit. Its part of the second matrix, whose turn is next, comes nearer meanwhile."""
    _, _, x, down, up, _, rows, between, units, rank, part_rank, _, size_in, size_out, parts, _ = captured
    between_dtype = result.between_dtype(t)
    tiles = {count: _into_tile(t, count, result.dtype, between_dtype) for count in t.chip.group_sizes}
    group, first, num_rows = _Units(units).words(t, item // parts)
    next_group, _, _ = _Units(units).words(t, item // parts + 1)
    part, blocks, row_bytes = item % parts, rank // RANKS, size_in * SIZE_OF[result.dtype]
    up_bytes = result.up_bytes(part_rank, size_out)
    begin, end = (up + group * up_bytes + number * up_bytes // parts for number in (part, part + 1))
    with t.loop(begin, end, _LINE) as line:
        t.prefetch(line, level=2)
    with t.loop(part * blocks // parts * RANKS, (part + 1) * blocks // parts * RANKS, RANKS) as first_rank:
        matrix, next_rank = down + (group * rank + first_rank) * row_bytes, first_rank + RANKS
        following = t.select(next_rank < rank, group * rank + next_rank, next_group * rank)
        ahead = down + following * row_bytes - matrix
        for count, at in t.groups(t.chip.group_sizes, num_rows):
            to = between + ((first + at) * rank + first_rank) * SIZE_OF[between_dtype]
            t.call(tiles[count], x, rows + (first + at) * 4, matrix, to, size_in, rank, ahead)


def _out_of(result: _LowRankProduct, t: Emitter, item: Value, captured: Sequence[Value]) -> None:
    """Emits some columns of a unit of the result."""
    y, out, _, _, up, ratios, rows, between, units, rank, part_rank, num_groups, _, size_out, _, parts = captured
    group, first, num_rows = _Units(units).words(t, item // parts)
    next_group, _, _ = _Units(units).words(t, item // parts + 1)
    up_bytes = result.up_bytes(part_rank, size_out)
    next_matrix = up + next_group * up_bytes
    has_group = group < num_groups
    group, own_rank = (t.select(has_group, number, t.integer(0)) for number in (group, part_rank))
    matrix, own_ratios = up + group * up_bytes, ratios + group * size_out * (result.halves * _FLOAT)
    part, blocks = item % parts, (size_out + (BLOCK - 1)) // BLOCK
    begin = part * blocks // parts * BLOCK
    end = t.min((part + 1) * blocks // parts * BLOCK, size_out)

    def columns(count: int, vectors: int, begin: Value, end: Value, at: Value) -> None:
        tile, step = _out_tile(t, count, vectors, result), vectors * t.lanes
        of_rows = rows + (first + at) * 4, between + (first + at) * rank * SIZE_OF[result.between_dtype(t)]
        with t.loop(begin, end, step) as column:
            places = y + column * SIZE_OF[result.sum_dtype], out + column * SIZE_OF[result.out_dtype]
            own, following = matrix + column * SIZE_OF[result.dtype], column + step
            ahead = t.select(following < size_out, matrix + following * SIZE_OF[result.dtype], next_matrix) - own
            of_columns = own, own_ratios + column * _FLOAT
            t.call(tile, *places, *of_columns, *of_rows, rank, own_rank, size_out, end - column, ahead)

    for count, at in t.groups(t.chip.group_sizes, num_rows):
        vectors = _vectors(t, count) // result.halves
        whole = begin + (end - begin) // (vectors * t.lanes) * (vectors * t.lanes)
        columns(count, vectors, begin, whole, at)
        columns(count, 1, whole, end, at)


def _vectors(t: Emitter, num_rows: int) -> int:
    """Returns the vectors of a tile, both halves together, whose sums fit the registers (`CpuChip.group_sizes`)."""
    return 4 if num_rows > 2 or t.lanes == 8 else 8


def _into_tile(e: Emitter, count: int, dtype: str, between_dtype: str) -> ir.Function:
    """Emits the products of `count` rows of x with `RANKS` rows of a matrix."""
    t = e.function(f"into{count}", 7)
    x, rows, matrix, to, size_in, rank, ahead = t.arguments
    row_bytes = size_in * SIZE_OF[dtype]
    addresses = [x + t.load_int(rows + m * 4, 32) * row_bytes for m in range(count)]
    dot_products(t, addresses, matrix, None, to, size_in, rank, dtype, between_dtype, dtype, ahead)
    return t.finish()


def _out_tile(e: Emitter, count: int, vectors: int, result: _LowRankProduct) -> ir.Function:
    """Emits `count` rows by `vectors` vectors of the result. A single vector may lack some columns."""
    t = e.function(f"out{count}x{vectors}", 11)
    y, out, matrix, ratios, rows, between, rank, part_rank, size_out, left, ahead = t.arguments
    mask = first_lanes(left, t.lanes) if vectors == 1 else None
    numbers = [t.load_int(rows + m * 4, 32) for m in range(count)]
    width = size_out * result.halves
    parts = [(half, v) for half in range(result.halves) for v in range(vectors)]
    offsets = {(half, v): size_out * half + v * t.lanes for half, v in parts}

    def begun(m: int, part: tuple[int, int]) -> Variable:
        address = y + (numbers[m] * width + offsets[part]) * SIZE_OF[result.sum_dtype]
        return t.variable(t.load(address, result.sum_dtype, mask))

    totals = {(m, *part): begun(m, part) for m in range(count) for part in parts}
    pairs, between_dtype = result.has_pairs(t), result.between_dtype(t)
    # Pairs, and then a last rank alone: what is beside it, the number of a part, is multiplied by zero.
    whole = part_rank // 2 * 2
    turns = [(t.integer(0), whole, 2), (whole, part_rank, 1)] if pairs else [(t.integer(0), part_rank, 1)]
    with t.when(part_rank > 0):  # rows of no group have nothing to read
        if result.has_ratios:
            for part in parts:
                factor = t.load(ratios + offsets[part] * _FLOAT, "float32", mask) + 1.0
                for m in range(count):
                    totals[m, *part].set(totals[m, *part].get() * factor)
        for half in range(result.halves):
            own = [part for part in parts if part[0] == half]

            def loaded(row: Value, part: tuple[int, int]) -> Value:
                return t.load(matrix + (row * width + offsets[part]) * SIZE_OF[result.dtype], result.dtype, mask)

            marks = {part: loaded(part_rank, part) for part in own}
            most = _integer(largest(reduce(t.max, marks.values())))
            least = t.integer(0) - _integer(largest(reduce(t.max, (t.vector(0) - mark for mark in marks.values()))))
            with t.loop(least, most + 1) as number:
                is_own = {part: mark.equals(t.floats(t.splat(number))) for part, mark in marks.items()}
                for first, end, num_ranks in turns:
                    with t.loop(first, end, num_ranks) as r:
                        for row in range(num_ranks):
                            for part in own[:: max(_LINE // (t.lanes * SIZE_OF[result.dtype]), 1)]:
                                line = matrix + ((r + row) * width + offsets[part]) * SIZE_OF[result.dtype]
                                t.prefetch(line + ahead, level=2)
                        b = {part: loaded(r, part) for part in own}
                        if pairs:
                            b = {part: bfloat16_pairs(b[part], loaded(r + 1, part)) for part in own}
                        b = {part: t.select(is_own[part], b[part], t.vector(0)) for part in own}
                        for m in range(count):
                            address = between + (rank * m + number * part_rank + r) * SIZE_OF[between_dtype]
                            a = t.load_pair_everywhere(address, num_ranks) if pairs else t.load_everywhere(address)
                            for part in own:
                                added = (dot_pairs if pairs else t.fma)(a, b[part], totals[m, *part].get())
                                totals[m, *part].set(added)
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
