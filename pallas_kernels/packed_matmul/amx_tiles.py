"""The tiles of a product with packed matrices of bfloat16 where a CPU has AMX."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from llvmlite import ir

from pallas_kernels.cpu.amx import release_tiles
from pallas_kernels.cpu.emit import Emitter
from pallas_kernels.cpu.tile_product import (
    FETCHED_LINES,
    FEW,
    LINE,
    MANY,
    TileOperand,
    add_tile_product,
    configure_few_rows,
    configure_many_rows,
    few_rows_product,
    many_rows_product,
    tile_product,
)
from pallas_kernels.cpu.values import Value
from pallas_kernels.packed_matmul.panels import WORD
from pallas_kernels.packed_matmul.tiles import RowStep, Tiles, TileWork

# Bytes of panels that each step of rows goes through while its inputs stay in the first cache. By one panel at a time,
# 512 rows of 4096x384 took 1.26 times as long, and more than the second cache of 2 MiB 1.2 times (Sapphire Rapids).
TOGETHER = 512 * 1024
MOST_TOGETHER = 8
# The first rows fetch the panels of the next item, each 32 of them a half. 64 rows of 4096x384 took 0.82 of the time
# where the matrix was in no near cache, and where all rows fetched, 512 rows of 384x2048 1.17 (Sapphire Rapids).
FETCHING_ROWS = 64
FETCHED_BYTES = 2 * FETCHED_LINES * LINE  # by 32 rows, of 64 columns
ITEMS_PER_THREAD = 4  # at least, so that no thread waits long for the last one


@dataclass(frozen=True)
class AmxTiles(Tiles):
    """Multiplies 32 inputs of up to 32 rows at a time, by tiles that are read where they lie in x and in the panel."""

    part: ClassVar[int] = 1024 * 1024
    most_rows: ClassVar[int] = MANY

    def emit(self, t: Emitter) -> Callable[[TileWork], None]:
        return self._calls(t, tile_product(t))

    def steps(self, t: Emitter, begin: Value, end: Value, first_row: Value) -> Iterator[RowStep]:
        many, few = self._calls(t, many_rows_product(t)), self._calls(t, few_rows_product(t))
        whole = begin + (end - begin) // MANY * MANY
        with t.when(begin < whole):
            configure_many_rows(t)
            with t.loop(begin, whole, MANY) as first:
                ahead = first - first_row

                def of_next(panel: Value, ahead: Value = ahead) -> Value:
                    return t.select(ahead < FETCHING_ROWS, panel + ahead * (FETCHED_BYTES // MANY), t.integer(0))

                yield RowStep(first, t.integer(MANY), many, of_next)
            release_tiles(t)
        with t.loop(whole, end, FEW) as first:
            count = t.min(end - first, t.integer(FEW))
            configure_few_rows(t, count)
            yield RowStep(first, count, few, lambda panel: t.integer(0))
            release_tiles(t)

    def panels_together(self, t: Emitter, size: Value, rows: Value, items: Value, threads: Value) -> Value:
        most = t.min(t.integer(TOGETHER) // size, items // (threads * ITEMS_PER_THREAD))
        most = t.max(t.min(most, t.integer(MOST_TOGETHER)), t.integer(1))
        return t.select(rows <= MANY, t.integer(1), most)

    def _calls(self, t: Emitter, function: ir.Function) -> Callable[[TileWork], None]:
        columns = self.panels.columns
        width = t.integer(columns * WORD)

        def add(work: TileWork) -> None:
            operands = TileOperand(work.x, work.stride), TileOperand(work.panel, width), TileOperand(work.sums, width)
            add_tile_product(
                t, function, *operands, work.rows, t.integer(columns), work.inputs, work.goes_on, work.ahead
            )

        return add
