"""The tiles of a product with packed matrices of bfloat16 where a CPU has AMX."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from pallas_kernels.cpu.emit import Emitter
from pallas_kernels.cpu.tile_product import TileOperand, add_tile_product, tile_product
from pallas_kernels.packed_matmul.panels import WORD
from pallas_kernels.packed_matmul.tiles import Tiles, TileWork


@dataclass(frozen=True)
class AmxTiles(Tiles):
    """Multiplies 32 inputs of up to 32 rows at a time, by tiles that are read where they lie in x and in the panel."""

    # CPUs with AMX have second caches of 2 MiB.
    part: ClassVar[int] = 1024 * 1024

    def emit(self, t: Emitter) -> Callable[[TileWork], None]:
        function, columns = tile_product(t), self.panels.columns
        width = t.integer(columns * WORD)

        def add(work: TileWork) -> None:
            add_tile_product(
                t,
                function,
                TileOperand(work.x, work.stride),
                TileOperand(work.panel, width),
                TileOperand(work.sums, width),
                work.rows,
                t.integer(columns),
                work.inputs,
                work.goes_on,
            )

        return add
