"""The sums of one group of inputs by AMX: tokens of eight bits with signs, times codes without, in int32."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pallas_kernels.cpu.amx import LANE, ROW_BYTES, TileShape, tile_registers
from pallas_kernels.cpu.amx import ROWS as TILE_ROWS
from pallas_kernels.cpu.emit import Emitter
from pallas_kernels.cpu.values import Value
from pallas_kernels.integer_matmul.code_panels import CodePanels

if TYPE_CHECKING:
    from pallas_kernels.integer_matmul.kernel import Decode, GroupSums

# Tokens of a tile. Fewer are multiplied by vectors, to the same bits: the sums are exact.
AMX_ROWS = TILE_ROWS
_SUMS, _X, _CODES = range(4), 4, (5, 6, 7)  # the numbers of tile registers


@contextmanager
def amx_sums(
    t: Emitter, panels: CodePanels, decode: "Decode", panel: Value, x: Value, stride: Value
) -> Iterator["GroupSums"]:
    """Emits what follows with the tile registers, and yields what emits the sums of AMX_ROWS tokens.

    A tile takes 64 inputs of these, or those of a group if it has fewer. Codes of eight bits are read where they lie,
    at `panel`. Others are decoded to bytes in memory of the thread, and so are the last ones of a group that fill no
    tile: zeros follow, by which whatever x has there is multiplied.
    """
    columns, width = panels.columns, panels.columns * LANE
    inputs = min(ROW_BYTES, panels.together or ROW_BYTES)
    halves = 1 if panels.bits == 8 else 2
    rows, step = inputs // (4 * halves), panels.unit // (4 * halves)  # of the array of codes
    sums, codes = t.words(AMX_ROWS * width // 8), t.words(inputs // LANE * width // 8)
    shapes = [TileShape()] * len(_SUMS) + [TileShape(row_bytes=inputs)] + [TileShape(rows=inputs // LANE)] * len(_CODES)

    def decode_tile(first: Value, end: Value) -> None:
        with t.when(first + rows > end), t.loop(0, t.integer(inputs // LANE * width), 8) as at:
            t.store_int(codes + at, 0)
        with t.loop(first, t.min(first + rows, end), step) as unit:
            for number in range(step):
                for (half, v), words in decode(unit, number).items():
                    row = (unit - first + number) * halves + half
                    t.store(codes + row * width + v * t.lanes * LANE, words)

    with tile_registers(t, shapes) as tiles:

        def of_group(begin: Value, end: Value, initial: Callable[[int, int], Value]) -> Callable[[int, int], Value]:
            for m in range(AMX_ROWS):
                for v in range(columns // t.lanes):
                    t.store(sums + (m * columns + v * t.lanes) * LANE, initial(m, v))
            for tile in _SUMS:
                tiles.load(tile, sums + tile * ROW_BYTES, width)
            with t.loop(begin, end, rows) as first:
                is_last = first + rows > end
                of_tile = codes
                if panels.bits == 8:
                    of_tile = t.select(is_last, codes, panel + first * width)
                    with t.when(is_last):
                        decode_tile(first, end)
                else:
                    decode_tile(first, end)
                tiles.load(_X, x + first * (4 * halves), stride)
                for tile in _SUMS:
                    b = _CODES[tile % len(_CODES)]
                    tiles.load(b, of_tile + tile * ROW_BYTES, width)
                    tiles.add_products("int8 uint8", tile, _X, b)
            for tile in _SUMS:
                tiles.store(tile, sums + tile * ROW_BYTES, width)
            return lambda m, v: t.load_words(sums + (m * columns + v * t.lanes) * LANE)

        yield of_group
