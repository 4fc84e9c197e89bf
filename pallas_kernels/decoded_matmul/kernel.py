"""The product of rows with a matrix in panels of codes that are decoded. An item of work is a panel and some rows.

Each group of inputs is summed by itself, and its sums are multiplied by its scales and added up in float32, group after
group. Few rows are multiplied by codes that are decoded in registers. For more, some inputs of a panel are decoded into
memory of the thread, which the tiles of `packed_matmul` read for all rows of the item. Both add up the same products in
the same order, so a row has the same bits whatever other rows there are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from pallas_kernels.cpu.emit import SIZE_OF, Emitter
from pallas_kernels.cpu.frame import Frame
from pallas_kernels.cpu.pool import parallel_runs
from pallas_kernels.cpu.values import Value
from pallas_kernels.cpu.vectors import dot_pairs, load_scales
from pallas_kernels.decoded_matmul.decoders import CodeDecoder, decoder_of
from pallas_kernels.integer_matmul.code_panels import FLOAT8_UNIT, SCALE_BYTES, CodePanels
from pallas_kernels.packed_matmul.kernel import NO_GATE, outputs_of, tiles_for
from pallas_kernels.packed_matmul.tiles import FLOAT, ROWS, TileWork, VectorTiles

# Inputs that are decoded at a time: 32 KiB of float32, which the first cache holds.
PART = 128
# Rows that are multiplied by codes in registers: beside 16 sums, AVX-512 has room for the tables.
FEW = {16: (4, 2, 1), 8: (2, 1), 4: (4, 2, 1)}  # by the lanes of a vector


def multiply_by_decoded(
    e: Emitter, frame: Frame, dtype: str, out_dtype: str, gate: str, rows_of: str, panels: CodePanels
) -> None:
    """Emits y [M, P * columns] = x [M, K] times the matrix w[index] of P panels.

    Its arguments are x, index, and the codes and scales of w[0], w[1], ..., whose dimensions before panels are one with
    them. Where `rows_of` is "groups", starts i32[groups + 1] comes after the index, and each group of rows has P panels
    of its own. With a gate, each matrix has 2 P panels, and y is activation(x a^T) * (x b^T).
    """
    x, y, in_groups = frame.argument(0), frame.result(0), rows_of == "groups"
    first = 3 if in_groups else 2
    matrix = e.load_int(frame.argument(1).data, 32) * 2 + first
    codes, scales = frame.argument(matrix), frame.argument(matrix + 1)
    product = _DecodedProduct(dtype, out_dtype, gate, panels)
    P = y.size(1) // panels.columns
    starts, blocks = e.integer(0), (x.size(0) + (ROWS - 1)) // ROWS
    if in_groups:  # an item has all rows of a group
        starts, blocks = frame.argument(2).data, frame.argument(2).size(0) - 1
    captured = (
        x.data, y.data, codes.data, scales.data, x.size(0), x.size(1), P, codes.size(1), scales.size(1), starts, blocks,
    )  # fmt: skip

    def item(t: Emitter, number: Value, captured: Sequence[Value]) -> None:
        x, y, codes, scales, M, K, P, units, groups, starts, blocks = captured
        if in_groups:
            group, panel = number // P, number % P
            begin, end = (t.load_int(starts + (group + more) * 4, 32) for more in (0, 1))
            first = group * P * product.halves + panel
        else:
            first = panel = number // blocks
            begin = number % blocks * ROWS
            end = t.min(begin + ROWS, M)
        functions = _Functions.emit(t, product)
        totals = [t.words(ROWS * panels.columns * FLOAT // 8) for _ in range(product.halves)]
        with t.loop(begin, end, ROWS) as row:
            rows = _ItemRows(x + row * K * SIZE_OF[dtype], t.min(end - row, t.integer(ROWS)), K)
            for half, total in enumerate(totals):
                place = first + P * half
                of_codes = codes + place * units * (panels.columns * product.decoder.size)
                of_scales = scales + place * groups * (panels.columns * SCALE_BYTES[panels.scale_dtype])
                _add_up(t, product, functions, rows, of_codes, of_scales, groups, total)
            with t.loop(0, rows.count) as m, t.loop(0, t.integer(panels.columns), t.lanes) as column:
                value = outputs_of(
                    product.gate, [t.load(total + (m * panels.columns + column) * FLOAT) for total in totals]
                )
                place = ((row + m) * P + panel) * panels.columns + column
                t.store(y + place * SIZE_OF[out_dtype], value, out_dtype)

    parallel_runs(e, frame, blocks * P, captured, item)


@dataclass(frozen=True)
class _DecodedProduct:
    """Says what an item multiplies, and what becomes of its sums."""

    dtype: str
    out_dtype: str
    gate: str
    panels: CodePanels

    @property
    def decoder(self) -> CodeDecoder:
        return decoder_of(self.panels)

    @property
    def has_pairs(self) -> bool:
        """Whether codes become pairs of bfloat16, and not float32."""
        return self.dtype == "bfloat16"

    def place(self, codes: Value, inputs: Value) -> Value:
        """Returns the address of the codes of a panel after so many inputs, which begin a unit."""
        return codes + inputs // self.decoder.inputs * (self.panels.columns * self.decoder.size)

    @property
    def halves(self) -> int:
        return 1 if self.gate == NO_GATE else 2


@dataclass(frozen=True)
class _ItemRows:
    """Some rows [count, K]."""

    address: Value
    count: Value
    K: Value


@dataclass(frozen=True)
class _Functions:
    """The functions of a handler: of few rows and codes, what decodes, and those of rows and decoded inputs.

    There is none of few rows where tiles of AMX add up in another order than vectors do.
    """

    few: dict[int, ir.Function]
    decode: ir.Function
    packed: Callable[[TileWork], None]

    @classmethod
    def emit(cls, t: Emitter, product: _DecodedProduct) -> "_Functions":
        tiles = tiles_for(t.chip, product.dtype)
        sizes = FEW[t.lanes] if isinstance(tiles, VectorTiles) else ()
        return cls(
            {rows: _few_rows(t, rows, product) for rows in sizes},
            _decode(t, product),
            tiles.emit(t),
        )


def _add_up(
    t: Emitter, product: _DecodedProduct, functions: _Functions, rows: _ItemRows, codes: Value, scales: Value,
    groups: Value, totals: Value,
) -> None:  # fmt: skip
    """Emits the sums over all groups of a panel, times their scales: totals f32[rows, columns]."""
    columns, size = product.panels.columns, SIZE_OF[product.dtype]
    sums, decoded = t.words(ROWS * columns * FLOAT // 8), t.words(PART * columns * size // 8)
    few, stride, count = max(functions.few, default=0), rows.K * size, rows.count
    with t.loop(0, count * columns, t.lanes) as at:
        t.store(totals + at * FLOAT, t.vector(0))
    with t.loop(0, groups) as group:
        begin, end = t.integer(0), rows.K
        if product.panels.group is not None:
            begin = group * product.panels.group
            end = t.min(begin + product.panels.group, rows.K)
        with t.loop(0, count * columns, t.lanes) as at:
            t.store(sums + at * FLOAT, t.vector(0))
        with t.when(count <= few):
            for number, row in t.groups(tuple(functions.few), count):
                x = rows.address + row * stride + begin * size
                of_codes, of_sums = product.place(codes, begin), sums + row * (columns * FLOAT)
                t.call(functions.few[number], x, stride, of_codes, of_sums, end - begin)
        with t.when(count > few), t.loop(begin, end, PART) as k:
            inputs = t.min(end - k, t.integer(PART))
            t.call(functions.decode, product.place(codes, k), decoded, inputs)
            x = rows.address + k * size
            functions.packed(
                TileWork(x, stride, decoded, sums, inputs, count, goes_on=t.integer(1), ahead=t.integer(0))
            )
        scale = [
            load_scales(t, scales + (group * columns + v) * SCALE_BYTES[product.panels.scale_dtype],
                        product.panels.scale_dtype)
            for v in range(0, columns, t.lanes)
        ]  # fmt: skip
        with t.loop(0, count) as row:
            for number, of_vector in enumerate(scale):
                place = (row * columns + number * t.lanes) * FLOAT
                t.store(totals + place, t.fma(t.load(sums + place), of_vector, t.load(totals + place)))


def _few_rows(e: Emitter, rows: int, product: _DecodedProduct) -> ir.Function:
    """Emits (x, bytes between rows, codes, sums f32[rows, columns], inputs): adds the products of these inputs."""
    t = e.function(f"few{rows}", 5)
    x, stride, codes, sums, inputs = t.arguments
    columns, dtype, decoder = product.panels.columns, product.dtype, product.decoder
    places = {
        (m, v): sums + (m * columns + v * t.lanes) * FLOAT for m in range(rows) for v in range(columns // t.lanes)
    }
    totals = {place: t.variable(t.load(address)) for place, address in places.items()}

    def add(k: Value, count: int) -> None:
        of_rows = [x + stride * m + k * SIZE_OF[dtype] for m in range(rows)]
        of_codes = product.place(codes, k)
        if product.has_pairs and t.chip.has_bf16_dot:
            a = [t.load_pair_everywhere(address, count) for address in of_rows]
            pairs = decoder.pairs(t, of_codes, columns)
            for (m, v), total in totals.items():
                total.set(dot_pairs(a[m], pairs[v], total.get()))
        else:
            floats = decoder.floats(t, of_codes, columns)
            for number in range(count):
                a = [t.load_everywhere(address + number * SIZE_OF[dtype], dtype) for address in of_rows]
                for (m, v), total in totals.items():
                    total.set(t.fma(a[m], floats[v][number], total.get()))

    with t.loop(0, inputs - (decoder.inputs - 1), decoder.inputs) as k:
        add(k, decoder.inputs)
    if decoder.inputs == FLOAT8_UNIT:  # other units have whole ones in each group
        with t.when((inputs % 2).equals(1)):
            add(inputs - 1, 1)
    for place, address in places.items():
        t.store(address, totals[place].get())
    return t.finish()


def _decode(e: Emitter, product: _DecodedProduct) -> ir.Function:
    """Emits (codes, panel, inputs): the panel of `packed_matmul` that these inputs, some whole units, are."""
    t = e.function("decode", 3)
    codes, panel, inputs = t.arguments
    columns, decoder = product.panels.columns, product.decoder
    with t.loop(0, inputs, decoder.inputs) as k:
        of_codes = product.place(codes, k)
        if product.has_pairs:
            for v, pairs in enumerate(decoder.pairs(t, of_codes, columns)):
                t.store(panel + (k * (columns // 2) + v * t.lanes) * FLOAT, t.of_bits(pairs))
        else:
            for v, numbers in enumerate(decoder.floats(t, of_codes, columns)):
                for number, floats in enumerate(numbers):
                    t.store(panel + ((k + number) * columns + v * t.lanes) * FLOAT, floats)
    return t.finish()
