"""A product of bfloat16 matrices in the tile registers of AMX, for whatever kernel has its operands in memory."""

from dataclasses import dataclass
from itertools import batched, zip_longest

from llvmlite import ir

from pallas_kernels.cpu.amx import (
    LANE,
    NUMBER,
    ROW_BYTES,
    TileRegisters,
    TileShape,
    configure_tiles,
    configured_registers,
    tile_registers,
)
from pallas_kernels.cpu.amx import ROWS as TILE_ROWS
from pallas_kernels.cpu.emit import SIZE_OF, Emitter
from pallas_kernels.cpu.values import Value

SIZE = SIZE_OF["bfloat16"]
DEPTH = ROW_BYTES // SIZE  # inputs of a tile
COLUMNS = ROW_BYTES // LANE  # of a tile of sums
SUMS = 4  # tile registers for sums: 32 rows and 32 columns, or up to 16 rows and 64 columns
LINE = 64  # bytes of a line of a cache
FETCHED_LINES = 16  # while 32 inputs of 32 rows and 32 columns are multiplied
MANY, FEW = 2 * TILE_ROWS, TILE_ROWS  # rows that are multiplied at a time, and of fewer the most


@dataclass(frozen=True)
class TileOperand:
    """A matrix in memory: the address of its first row, and the bytes from one row to the next."""

    address: Value
    stride: Value

    def at(self, row: Value | int, offset: Value | int) -> Value:
        """Returns the address that is `offset` bytes after the beginning of a row."""
        return self.address + self.stride * row + offset


def tile_product(e: Emitter) -> ir.Function:
    """Emits a function for `add_tile_product`, of any number of rows, which configures the tile registers."""
    shape, rows = _begun(e, "tile_product")
    t = shape.t
    whole = rows // MANY * MANY
    with t.when(whole > 0):
        with tile_registers(t, _MANY.shapes) as tiles, t.loop(0, whole, MANY) as row:
            _add_rows(shape, tiles, _MANY, row)
    with t.loop(whole, rows, FEW) as row:
        use = _TileUse(1, t.min(rows - row, t.integer(FEW)))
        with tile_registers(t, use.shapes) as tiles:
            _add_rows(shape, tiles, use, row)
    return t.finish()


def many_rows_product(e: Emitter) -> ir.Function:
    """Emits another one, for 32 rows, for which the tile registers are configured before."""
    shape, _ = _begun(e, "many_rows_product")
    _add_rows(shape, configured_registers(shape.t, _MANY.shapes), _MANY, shape.t.integer(0))
    return shape.t.finish()


def few_rows_product(e: Emitter) -> ir.Function:
    """Emits another one, for up to 16 rows, for which the tile registers are configured before."""
    shape, rows = _begun(e, "few_rows_product")
    use = _TileUse(1, rows)
    _add_rows(shape, configured_registers(shape.t, use.shapes), use, shape.t.integer(0))
    return shape.t.finish()


def configure_many_rows(e: Emitter) -> None:
    """Emits what configures the tile registers for calls of `many_rows_product`."""
    configure_tiles(e, _MANY.shapes)


def configure_few_rows(e: Emitter, rows: Value) -> None:
    """Emits what configures the tile registers for calls of `few_rows_product` with so many rows."""
    configure_tiles(e, _TileUse(1, rows).shapes)


def _begun(e: Emitter, name: str) -> tuple["_Shape", Value]:
    """Begins a function for `add_tile_product`, and returns its arguments: the shape, and the rows."""
    t = e.function(name, 11)
    *operands, rows, columns, inputs, goes_on, ahead = t.arguments
    x, panel, sums = (TileOperand(*operands[first : first + 2]) for first in (0, 2, 4))
    return _Shape(t, x, panel, sums, columns, inputs, goes_on, ahead), rows


def add_tile_product(
    t: Emitter,
    function: ir.Function,
    x: TileOperand,
    panel: TileOperand,
    sums: TileOperand,
    rows: Value,
    columns: Value,
    inputs: Value,
    goes_on: Value,
    ahead: Value,
) -> None:
    """Emits a call which adds x [rows, inputs] times a panel to sums f32[rows, columns].

    A panel's row has the same pair of inputs of all columns, which are a multiple of 16. Where `goes_on` is 0 the sums
    are those of this product alone, whatever their memory holds. `ahead` is 0 or the address of another panel, a half
    of which the second cache shall have by the next call of `many_rows_product`, for 64 columns: the first half of the
    lines of each 32 inputs, or the second one from 2048 bytes after its beginning on.

    A sum takes in 32 inputs after 32 inputs, from the first one on. A tile register's row depends on no other row, so
    the sums of one row have the same bits in a tile of one row and in one of sixteen. The last inputs, if these are
    not 32, are copied and followed by zeros, which change no bit.
    """
    operands = (part for one in (x, panel, sums) for part in (one.address, one.stride))
    t.call(function, *operands, rows, columns, inputs, goes_on, ahead)


@dataclass(frozen=True)
class _Shape:
    """The arguments of the function."""

    t: Emitter
    x: TileOperand
    panel: TileOperand
    sums: TileOperand
    columns: Value
    inputs: Value
    goes_on: Value
    ahead: Value


@dataclass(frozen=True)
class _TileUse:
    """Tells what tile registers hold: the first ones sums, row after row of tiles, the next x, the last the panel.

    heights: the number of tiles of x, one under the other
    rows: of each
    """

    heights: int
    rows: int | Value

    @property
    def most_rows(self) -> int:
        return self.heights * TILE_ROWS

    @property
    def most_across(self) -> int:
        """The tiles of sums side by side, of 16 columns each, that there can be."""
        return SUMS // self.heights

    @property
    def shapes(self) -> list[TileShape]:
        of_rows = [TileShape(self.rows)] * (SUMS + self.heights)
        return [*of_rows, *[TileShape()] * (NUMBER - len(of_rows))]

    def sums(self, across: int) -> list[tuple[int, int, int]]:
        """Returns each tile of sums, of so many side by side, with its first row, and its first column in bytes."""
        return [(tile, tile // across * TILE_ROWS, tile % across * ROW_BYTES) for tile in range(self.heights * across)]

    def add(self, tiles: TileRegisters, across: int, x: TileOperand, panel: TileOperand) -> None:
        """Adds up 32 inputs."""
        of_x = [SUMS + number for number in range(self.heights)]
        of_panel = range(SUMS + self.heights, NUMBER)
        for columns in batched(range(across), len(of_panel)):
            # One tile of each by turns: x first took 1.08 times as long, for 512 rows (Sapphire Rapids).
            of_both = zip_longest(zip(of_panel, columns, strict=False), enumerate(of_x) if columns[0] == 0 else ())
            for of_columns, of_rows in of_both:
                if of_columns is not None:
                    tiles.load(of_columns[0], panel.at(0, of_columns[1] * ROW_BYTES), panel.stride)
                if of_rows is not None:
                    tiles.load(of_rows[1], x.at(of_rows[0] * TILE_ROWS, 0), x.stride)
            for b, column in zip(of_panel, columns, strict=False):
                for number, a in enumerate(of_x):
                    tiles.add_products("bfloat16", number * across + column, a, b)


_MANY = _TileUse(2, TILE_ROWS)


def _add_rows(shape: _Shape, tiles: TileRegisters, use: _TileUse, row: Value) -> None:
    """Emits the sums of the rows from `row` on that the tiles hold."""
    t, inputs = shape.t, shape.inputs
    whole = inputs // DEPTH * DEPTH
    rest = inputs - whole
    last_x = TileOperand(t.words(use.most_rows * ROW_BYTES // 8), t.integer(ROW_BYTES))
    last_panel = TileOperand(t.words(TILE_ROWS * SUMS * ROW_BYTES // 8), t.integer(SUMS * ROW_BYTES))
    with t.when(rest > 0):
        rows = use.rows if isinstance(use.rows, Value) else t.integer(use.most_rows)
        _copy_last(t, TileOperand(shape.x.at(row, whole * SIZE), shape.x.stride), rest, last_x, rows)
    for across, column in t.groups(sorted({use.most_across, 1}, reverse=True), shape.columns // COLUMNS):
        first = column * ROW_BYTES
        for tile, down, right in use.sums(across):
            tiles.zero(tile)
            with t.when(shape.goes_on > 0):
                tiles.load(tile, shape.sums.at(row + down, first + right), shape.sums.stride)
        with t.loop(0, whole, DEPTH) as k:
            x = TileOperand(shape.x.at(row, k * SIZE), shape.x.stride)
            panel = TileOperand(shape.panel.at(k // 2, first), shape.panel.stride)
            if use == _MANY:
                with t.when(shape.ahead > 0):
                    lines = shape.ahead + k // 2 * shape.panel.stride + first * (FETCHED_LINES // across)
                    for line in range(FETCHED_LINES):
                        t.prefetch(lines + line * LINE, level=2)
            use.add(tiles, across, x, panel)
        with t.when(rest > 0):
            words = TileOperand(shape.panel.at(whole // 2, first), shape.panel.stride)
            _copy_words(t, words, (rest + 1) // 2, last_panel, across * ROW_BYTES)
            use.add(tiles, across, last_x, last_panel)
        for tile, down, right in use.sums(across):
            tiles.store(tile, shape.sums.at(row + down, first + right), shape.sums.stride)


def _copy_last(t: Emitter, x: TileOperand, count: Value, target: TileOperand, rows: Value) -> None:
    """Copies `count` numbers of each row, and fills up with zeros."""
    _fill(t, target.address, rows * ROW_BYTES)
    with t.loop(0, rows) as row, t.loop(0, count) as k:
        t.store_int(target.at(row, k * SIZE), t.load_int(x.at(row, k * SIZE), 16), 16)


def _copy_words(t: Emitter, panel: TileOperand, count: Value, target: TileOperand, width: int) -> None:
    """Copies `count` rows of a panel, so many bytes of each, and fills a tile up with zeros."""
    _fill(t, target.address, t.integer(TILE_ROWS * SUMS * ROW_BYTES))
    with t.loop(0, count) as row, t.loop(0, t.integer(width), LANE) as at:
        t.store_int(target.at(row, at), t.load_int(panel.at(row, at), 32), 32)


def _fill(t: Emitter, target: Value, size: Value) -> None:
    """Fills memory with zeros."""
    with t.loop(0, size, 8) as at:
        t.store_int(target + at, 0)
