"""The product of rounded tokens with a matrix in panels of codes: sums of products are integers, which are exact.

An item of work is a panel and some rows. A tile of a few of these rows by a panel is summed in registers over one group
of inputs; then its sums are multiplied by the group's scales and added up in float32, group after group. So a row has
the same bits whatever other rows there are.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from llvmlite import ir

from pallas_kernels.cpu.bytes import dot_bytes, looked_up, signed_bytes
from pallas_kernels.cpu.emit import SIZE_OF, Emitter
from pallas_kernels.cpu.frame import Frame
from pallas_kernels.cpu.pool import parallel_runs
from pallas_kernels.cpu.values import F32, I32, Value, Variable
from pallas_kernels.cpu.vectors import gelu_tanh, load_scales, silu
from pallas_kernels.integer_matmul.amx_sums import AMX_ROWS, amx_sums
from pallas_kernels.integer_matmul.code_panels import (
    CODES,
    FACTORS,
    HIGH,
    MIN_FACTORS,
    MINS,
    SCALE_BYTES,
    SCALES,
    ZEROS,
    CodePanels,
)  # fmt: skip

ROWS = 96  # of an item of work
FEW = 2  # rows of a tile whose sums over groups stay in registers


def matmul(e: Emitter, frame: Frame, out_dtype: str, panels: CodePanels) -> None:
    """Emits y [M, P * columns] = the tokens times the matrix w[index] of P panels.

    Its arguments are codes i8[M, K], sizes f32[M, G] and sums i32[M, G] of tokens, index, and the arrays of w[0], w[1],
    ..., whose dimensions before panels are one with them.
    """
    _multiply(e, frame, panels, _plain(out_dtype))


def grouped(e: Emitter, frame: Frame, out_dtype: str, panels: CodePanels) -> None:
    """Emits the same for tokens in groups, each of which has P panels of w[index].

    After the index comes starts i32[groups + 1].
    """
    _multiply(e, frame, panels, _plain(out_dtype), grouped=True)


def gated(e: Emitter, frame: Frame, out_dtype: str, activation: str, panels: CodePanels) -> None:
    """Emits h [M, P * columns] = activation(the tokens times the first P panels) * (the tokens times the next P)."""
    _multiply(e, frame, panels, _gated(out_dtype, activation), halves=2)


def grouped_gated(e: Emitter, frame: Frame, out_dtype: str, activation: str, panels: CodePanels) -> None:
    """Emits the same for tokens in groups, each of which has 2 P panels of w[index]."""
    _multiply(e, frame, panels, _gated(out_dtype, activation), halves=2, grouped=True)


@dataclass(frozen=True)
class _Finish:
    """Tells what becomes of the sums of a vector: `emit(emitter, vectors)` takes one vector of each half."""

    dtype: str
    emit: Callable[[Emitter, Sequence[Value]], Value]


def _plain(dtype: str) -> _Finish:
    return _Finish(dtype, lambda t, sums: sums[0])


def _gated(dtype: str, activation: str) -> _Finish:
    activate = {"silu": silu, "gelu_tanh": gelu_tanh}[activation]
    return _Finish(dtype, lambda t, sums: activate(sums[0]) * sums[1])


@dataclass(frozen=True)
class _Array:
    """One of the arrays of a matrix: its first panel, the bytes of a panel, and how often it has a row of columns."""

    address: Value
    panel_bytes: Value
    count: Value


def _multiply(
    e: Emitter, frame: Frame, panels: CodePanels, result: _Finish, halves: int = 1, grouped: bool = False
) -> None:
    """Emits a loop over all panels of the result and all rows."""
    x, sizes, sums = (frame.argument(number) for number in range(3))
    index, first, y = e.load_int(frame.argument(3).data, 32), 5 if grouped else 4, frame.result(0)
    names = panels.names
    buffers = [frame.argument(index * len(names) + (first + number)) for number in range(len(names))]
    M, P = x.size(0), y.size(1) // panels.columns
    starts, num_groups = e.integer(0), (M + (ROWS - 1)) // ROWS  # rows in parts, where they have no groups
    if grouped:
        starts, num_groups = frame.argument(4).data, frame.argument(4).size(0) - 1
    captured = [x.data, sizes.data, sums.data, y.data, M, x.size(1), sizes.size(1), P, starts, num_groups]
    for buffer in buffers:
        captured += [buffer.data, buffer.size(1)]

    def item(t: Emitter, number: Value, captured: Sequence[Value]) -> None:
        x, sizes, sums, y, M, stride, G, P, starts, num_groups, *rest = captured
        arrays = {
            name: _Array(address, count * _row_bytes(panels, name), count)
            for name, address, count in zip(names, rest[::2], rest[1::2], strict=True)
        }
        if grouped:
            group, panel = number // P, number % P
            begin, end = (t.load_int(starts + (group + more) * 4, 32) for more in (0, 1))
            first = group * P * halves + panel
        else:
            first = panel = number // num_groups
            begin = number % num_groups * ROWS
            end = t.min(begin + ROWS, M)
        tiles = {rows: _tile(t, rows, panels) for rows in _row_counts(t, panels)}
        vectors = range(0, panels.columns, t.lanes)
        for rows, at in t.groups(tuple(tiles), end - begin):
            row = begin + at
            place = row * G * 4
            totals = [t.words(rows * panels.columns // 2) for _ in range(halves)]
            for half, total in enumerate(totals):
                places = [array.address + (first + P * half) * array.panel_bytes for array in arrays.values()]
                counts = [array.count for array in arrays.values()]
                t.call(tiles[rows], x + row * stride, stride, sizes + place, sums + place, G, total, *places, *counts)
            for m in range(rows):
                to = y + ((row + m) * P + panel) * (panels.columns * SIZE_OF[result.dtype])
                for start in vectors:
                    offset = (m * panels.columns + start) * 4
                    value = result.emit(t, [t.load(total + offset) for total in totals])
                    t.store(to + start * SIZE_OF[result.dtype], value, result.dtype)

    parallel_runs(e, frame, num_groups * P, captured, item)


def _row_counts(t: Emitter, panels: CodePanels) -> tuple[int, ...]:
    """Returns the numbers of rows of tiles. A word of two codes needs registers for both, which a sixth row lacks."""
    few = tuple(size if panels.bits == 8 else min(size, 5) for size in t.chip.group_sizes)
    return (AMX_ROWS, *few) if t.chip.has_byte_tiles else few


def _row_bytes(panels: CodePanels, name: str) -> int:
    """Returns the bytes that all columns of a panel have for one unit of inputs, or for one group."""
    if name in (CODES, HIGH):
        return 4 * panels.columns
    dtypes = {SCALES: panels.scale_dtype, MINS: panels.held_mins, FACTORS: "float16", MIN_FACTORS: "float16"}
    dtype = dtypes.get(name, "uint8")
    return SCALE_BYTES[dtype] * panels.columns


def _tile(e: Emitter, rows: int, panels: CodePanels) -> ir.Function:
    """Emits the product of `rows` tokens with a panel: totals f32[rows, columns].

    Where groups share factors, the sums over these groups are multiplied by them, and then added up.
    """
    names = panels.names
    t = e.function(f"tile{rows}", 6 + 2 * len(names))
    x, stride, sizes, sums, G, totals, *rest = t.arguments
    at = dict(zip(names, rest, strict=False))
    units = rest[len(names)]  # of the codes
    vectors = range(panels.columns // t.lanes)
    unit = 4 if panels.bits == 8 else 8

    def decode(first: Value, number: int) -> Codes:
        return _codes(t, panels, at, first, number)

    def add_group(group: Value, sums_of: GroupSums, scaled: Cells, least: Cells) -> None:
        """Adds the group's sums times their scales, and its minima times the sums of tokens."""
        begin, end = t.integer(0), units
        if panels.together is not None:
            begin = group * (panels.together // unit)
            end = t.min(begin + panels.together // unit, units)
        sum_of = [t.splat_word(sums + (G * m + group) * 4) for m in range(rows)]
        found = sums_of(begin, end, _initial(t, panels, at, group, sum_of))
        scales = [_scale(t, panels, at, group, v) for v in vectors]
        mins = [_min(t, panels, at, group, v) for v in vectors] if panels.offsets == "mins" else []
        for m in range(rows):
            size = t.splat(t.load_float(sizes + (G * m + group) * 4))
            for v in vectors:
                exact = Value(t, t.builder.sitofp(found(m, v).ir, ir.VectorType(F32, t.lanes)))
                scaled[m, v].set(t.fma(exact * scales[v], size, scaled[m, v].get()))
                if mins:
                    whole = Value(t, t.builder.sitofp(sum_of[m].ir, ir.VectorType(F32, t.lanes)))
                    least[m, v].set(t.fma(mins[v], whole * size, least[m, v].get()))

    sums_of_groups: AbstractContextManager[GroupSums]
    if rows == AMX_ROWS:
        sums_of_groups = amx_sums(t, panels, decode, at[CODES], x, stride)
    else:
        sums_of_groups = nullcontext(_vector_sums(t, panels, decode, x, stride, rows))
    total = _zeros(t, rows, vectors)
    least = _zeros(t, rows, vectors) if panels.offsets == "mins" else {}
    with sums_of_groups as sums_of:
        if panels.span is None:
            with t.loop(0, G) as group:
                add_group(group, sums_of, total, least)
            for place, cell in least.items():
                total[place].set(total[place].get() - cell.get())
        else:
            assert panels.together is not None
            number = panels.span // panels.together
            with t.loop(0, G, number) as first:
                of_span = _zeros(t, rows, vectors)
                for cell in least.values():
                    cell.set(t.vector(0))
                with t.loop(first, t.min(first + number, G)) as group:
                    add_group(group, sums_of, of_span, least)
                for parts, name, sign in ((of_span, FACTORS, 1.0), (least, MIN_FACTORS, -1.0)):
                    factors = [_factor(t, panels, at[name], first, v) * sign for v in vectors if parts]
                    for (m, v), cell in parts.items():
                        total[m, v].set(t.fma(cell.get(), factors[v], total[m, v].get()))
    for (m, v), cell in total.items():
        t.store(totals + (m * panels.columns + v * t.lanes) * 4, cell.get())
    return t.finish()


@dataclass(frozen=True)
class _StoredVector:
    """A vector in memory, which is used as a variable is."""

    emitter: Emitter
    address: Value

    def get(self) -> Value:
        return self.emitter.load(self.address)

    def set(self, value: Value) -> None:
        self.emitter.store(self.address, value)


# Vectors of sums, of each row m and vector v.
type Cells = Mapping[tuple[int, int], _StoredVector | Variable]


def _zeros(t: Emitter, rows: int, vectors: range) -> Cells:
    """Returns sums that are zeros, in registers for few rows: those of more need the registers for a group's sums."""
    places = [(m, v) for m in range(rows) for v in vectors]
    if rows <= FEW:
        return {place: t.variable(t.vector(0)) for place in places}
    memory, width = t.words(len(places) * t.lanes // 2), t.lanes * 4
    cells = {place: _StoredVector(t, memory + number * width) for number, place in enumerate(places)}
    for cell in cells.values():
        cell.set(t.vector(0))
    return cells


def _initial(
    t: Emitter, panels: CodePanels, at: Mapping[str, Value], group: Value, sums: Sequence[Value]
) -> Callable[[int, int], Value]:
    """Returns what sums of products begin with: the products of tokens and the code that stands for 0, taken away."""
    zero = panels.zero if panels.number_table is None else panels.number_table.zero
    nothing = Value(t, ir.Constant(ir.VectorType(I32, t.lanes), [0] * t.lanes))
    if panels.offsets == "zeros":
        row = _group_row(t, panels, group)
        zeros = [
            t.load_words(at[ZEROS] + row * panels.columns + v * t.lanes, 8) for v in range(panels.columns // t.lanes)
        ]
        return lambda m, v: nothing - zeros[v] * sums[m]
    negative = [nothing - one * zero for one in sums]
    return lambda m, v: negative[m]


# Words of four codes, of one half of the inputs of a row of codes, and of a vector of columns.
type Codes = dict[tuple[int, int], Value]
# Emits the codes of row `first + number`, where a unit of inputs begins with row `first`.
type Decode = Callable[[Value, int], Codes]
# Emits the sums of the rows of codes from `begin` to `end`, from initial ones on, of each row m and vector v.
type GroupSums = Callable[[Value, Value, Callable[[int, int], Value]], Callable[[int, int], Value]]


def _vector_sums(t: Emitter, panels: CodePanels, decode: Decode, x: Value, stride: Value, rows: int) -> GroupSums:
    """Returns what emits the sums of a few rows in vector registers."""
    halves, vectors = 1 if panels.bits == 8 else 2, range(panels.columns // t.lanes)
    step, most = panels.unit // (4 * halves), 255 if panels.bits == 8 else 63
    if panels.number_table is not None:
        most = max(panels.number_table.unsigned)

    def of_group(begin: Value, end: Value, initial: Callable[[int, int], Value]) -> Callable[[int, int], Value]:
        found = {(m, v): t.variable(initial(m, v)) for m in range(rows) for v in vectors}
        with t.loop(begin, end, step) as first:
            for number in range(step):
                codes = decode(first, number)
                for m in range(rows):
                    for half in range(halves):
                        numbers = t.splat_word(x + stride * m + ((first + number) * halves + half) * 4)
                        for v in vectors:
                            found[m, v].set(dot_bytes(found[m, v].get(), codes[half, v], numbers, most))
        return lambda m, v: found[m, v].get()

    return of_group


def _codes(t: Emitter, panels: CodePanels, at: Mapping[str, Value], first: Value, number: int) -> Codes:
    row_bytes, halves = 4 * panels.columns, 1 if panels.bits == 8 else 2
    step = panels.unit // (4 * halves)
    codes = {}
    for v in range(panels.columns // t.lanes):
        words = t.load_words(at[CODES] + (first + number) * row_bytes + v * t.lanes * 4)
        for half in range(halves):
            codes[half, v] = words
            if halves == 2:
                codes[half, v] = (words >> 4 if half else words) & 0x0F0F0F0F
            if panels.number_table is not None:
                codes[half, v] = looked_up(signed_bytes(panels.number_table.unsigned), codes[half, v])
            if panels.bits in (5, 6):
                high = t.load_words(at[HIGH] + first // step * row_bytes + v * t.lanes * 4)
                codes[half, v] = codes[half, v] | _high(high, panels.bits - 4, number * 2 + half)
    return codes


def _high(words: Value, bits: int, number: int) -> Value:
    """Returns the high bits of four inputs, number `number` of four in their words, where the codes have them."""
    move, mask = number * bits - 4, {1: 0x10101010, 2: 0x30303030}[bits]
    return (words >> move if move >= 0 else words << -move) & mask


def _group_row(t: Emitter, panels: CodePanels, group: Value) -> Value:
    """Returns the row of arrays of groups for a group of inputs that are rounded together."""
    if panels.group is None or panels.together is None:
        return t.integer(0)
    return group // (panels.group // panels.together)


def _scale(t: Emitter, panels: CodePanels, at: Mapping[str, Value], group: Value, v: int) -> Value:
    """Returns the scales of a vector of columns."""
    dtype = panels.scale_dtype
    place = _group_row(t, panels, group) * panels.columns + v * t.lanes
    scale = load_scales(t, at[SCALES] + place * SCALE_BYTES[dtype], dtype)
    table = panels.number_table
    return scale if table is None or table.unit == 1 else scale * table.unit


def _min(t: Emitter, panels: CodePanels, at: Mapping[str, Value], group: Value, v: int) -> Value:
    """Returns the minima of a vector of columns."""
    place = _group_row(t, panels, group) * panels.columns + v * t.lanes
    return load_scales(t, at[MINS] + place * SCALE_BYTES[panels.held_mins], panels.held_mins)


def _factor(t: Emitter, panels: CodePanels, address: Value, group: Value, v: int) -> Value:
    assert panels.span is not None and panels.together is not None
    row = group // (panels.span // panels.together)
    return load_scales(t, address + (row * panels.columns + v * t.lanes) * SCALE_BYTES["float16"], "float16")
