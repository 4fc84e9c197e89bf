"""The tiles of a product with packed matrices of bfloat16 where a CPU has AMX."""

from dataclasses import dataclass
from typing import ClassVar

from llvmlite import ir

from pallas_kernels.cpu.amx import NUMBER, ROW_BYTES, TileRegisters, TileShape, tile_registers
from pallas_kernels.cpu.amx import ROWS as TILE_ROWS
from pallas_kernels.cpu.emit import SIZE_OF, Emitter
from pallas_kernels.cpu.values import Value
from pallas_kernels.packed_matmul.panels import WORD
from pallas_kernels.packed_matmul.tiles import Tiles

SIZE = SIZE_OF["bfloat16"]
DEPTH = ROW_BYTES // SIZE  # inputs of a tile
SUMS = 4  # tile registers for sums: 32 rows and 32 columns, or up to 16 rows and 64 columns


@dataclass(frozen=True)
class AmxTiles(Tiles):
    """Multiplies 32 inputs of up to 32 rows at a time, by tiles that are read where they lie in x and in the panel.

    A sum takes in 32 inputs after 32 inputs, from the first one on. A tile register's row depends on no other row, so
    the sums of one row have the same bits in a tile of one row and in one of sixteen. The last inputs, if these are
    not 32, are copied and followed by zeros, which change no bit.
    """

    sizes: ClassVar[tuple[int, ...]] = (32, 16, 8, 4, 2, 1)

    def emit(self, e: Emitter, rows: int) -> ir.Function:
        t = e.function(f"tile{rows}", 5)
        x, stride, panel, sums, inputs = t.arguments
        use = _TileUse(rows)
        width = self.panels.columns * WORD  # bytes of the inputs of a panel that lie together; and of sums
        whole = inputs // DEPTH * DEPTH
        last_x, last_panel = t.words(rows * ROW_BYTES // 8), t.words(TILE_ROWS * width // 8)
        with t.when(whole < inputs):
            _copy_last(t, x + whole * SIZE, stride, inputs - whole, last_x, rows)
            _fill(t, last_panel, TILE_ROWS * width)
            size = (inputs - whole + 1) // 2 * width
            with t.loop(0, size, WORD) as at:
                t.store_int(last_panel + at, t.load_int(panel + whole * (width // 2) + at, 32), 32)
        with tile_registers(t, use.shapes) as tiles:
            with t.loop(0, t.integer(width), use.across * ROW_BYTES) as at:
                for tile, row, column in use.sums:
                    tiles.load(tile, sums + row * width + (at + column), width)
                with t.loop(0, whole, DEPTH) as k:
                    use.add(tiles, x + k * SIZE, stride, panel + k * (width // 2) + at, width)
                with t.when(whole < inputs):
                    use.add(tiles, last_x, t.integer(ROW_BYTES), last_panel + at, width)
                for tile, row, column in use.sums:
                    tiles.store(tile, sums + row * width + (at + column), width)
        return t.finish()


@dataclass(frozen=True)
class _TileUse:
    """Tells what tile registers hold: the first ones sums, row after row of tiles, the next x, the last the panel."""

    rows: int

    @property
    def heights(self) -> list[int]:
        return [min(TILE_ROWS, self.rows - first) for first in range(0, self.rows, TILE_ROWS)]

    @property
    def across(self) -> int:
        """The tiles of sums side by side, of 16 columns each."""
        return SUMS // len(self.heights)

    @property
    def shapes(self) -> list[TileShape]:
        of_sums = [TileShape(height) for height in self.heights for _ in range(self.across)]
        of_x = [TileShape(height) for height in self.heights]
        return [*of_sums, *of_x, *[TileShape()] * (NUMBER - len(of_sums) - len(of_x))]

    @property
    def sums(self) -> list[tuple[int, int, int]]:
        """Each tile of sums with its first row, and its first column in bytes."""
        return [
            (tile, tile // self.across * TILE_ROWS, tile % self.across * ROW_BYTES)
            for tile in range(len(self.heights) * self.across)
        ]

    def add(self, tiles: TileRegisters, x: Value, stride: Value, panel: Value, width: int) -> None:
        """Adds up 32 inputs, which lie at `x` in rows `stride` bytes apart, and at `panel` in such `width` apart."""
        of_x = [SUMS + number for number in range(len(self.heights))]
        of_panel = range(SUMS + len(of_x), NUMBER)
        for number, tile in enumerate(of_x):
            tiles.load(tile, x + stride * (number * TILE_ROWS), stride)
        for column in range(self.across):
            b = of_panel[column % len(of_panel)]
            tiles.load(b, panel + column * ROW_BYTES, width)
            for number, a in enumerate(of_x):
                tiles.add_products("bfloat16", number * self.across + column, a, b)


def _copy_last(t: Emitter, x: Value, stride: Value, count: Value, target: Value, rows: int) -> None:
    """Copies `count` numbers of each row, and fills up with zeros."""
    _fill(t, target, rows * ROW_BYTES)
    with t.loop(0, t.integer(rows)) as row, t.loop(0, count) as k:
        t.store_int(target + row * ROW_BYTES + k * SIZE, t.load_int(x + row * stride + k * SIZE, 16), 16)


def _fill(t: Emitter, target: Value, size: int) -> None:
    """Fills memory with zeros."""
    with t.loop(0, t.integer(size), 8) as at:
        t.store_int(target + at, 0)
