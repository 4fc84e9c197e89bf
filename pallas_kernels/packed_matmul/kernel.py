"""The product with packed matrices: an item of work is a panel of outputs and some rows.

The sums of an item are in its thread's memory. Tiles add some inputs of a panel to them, for all rows of the item
before the next inputs, so that this part of the panel stays in the second cache. Then the sums become outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pallas_kernels.chips import CpuChip
from pallas_kernels.cpu.emit import SIZE_OF, Emitter
from pallas_kernels.cpu.frame import Frame
from pallas_kernels.cpu.pool import num_threads, parallel_runs
from pallas_kernels.cpu.values import Value
from pallas_kernels.cpu.vectors import bfloat16s, first_lanes, gelu_tanh, silu
from pallas_kernels.packed_matmul.amx_tiles import AmxTiles
from pallas_kernels.packed_matmul.panels import WORD, Panels
from pallas_kernels.packed_matmul.tiles import FLOAT, ROWS, RowStep, Tiles, TileWork, VectorTiles

NO_GATE = "none"
ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh}


def packed_matmul(e: Emitter, frame: Frame, dtype: str, out_dtype: str, gate: str) -> None:
    """Emits y [M, A * N] = x [M, K] w[index]^T, where w[index] is [A * N, K] in panels [A, panels(N), ..].

    Its arguments are x, index, w[0], w[1], ... With a gate, w[index] is [2, panels(N), ..], of a and of b, and y [M, N]
    is activation(x a^T) * (x b^T).
    """
    _multiply(e, frame, _Product(tiles_for(e.chip, dtype), out_dtype, gate))


def grouped_packed_matmul(e: Emitter, frame: Frame, dtype: str, out_dtype: str, gate: str) -> None:
    """Emits the same for rows in groups, each of which has a matrix of its own, w[index] [G * A, panels(N), ..].

    Its arguments are x, index, starts i32[G + 1], w[0], ...
    """
    _multiply(e, frame, _Product(tiles_for(e.chip, dtype), out_dtype, gate, in_groups=True))


def tiles_for(chip: CpuChip, dtype: str) -> Tiles:
    """Returns the tiles that a chip computes fastest, of x and matrices of `dtype`."""
    kind = AmxTiles if dtype == "bfloat16" and chip.has_bf16_tiles else VectorTiles
    return kind(dtype, Panels.of(chip, dtype))


def outputs_of(gate: str, sums: Sequence[Value]) -> Value:
    """Returns a vector of outputs for one of sums of each panel: of two where there is a gate."""
    return sums[0] if gate == NO_GATE else ACTIVATIONS[gate](sums[0]) * sums[1]


@dataclass(frozen=True)
class _Product:
    """Says what an item multiplies, and what becomes of its sums."""

    tiles: Tiles
    out_dtype: str
    gate: str
    in_groups: bool = False

    @property
    def panels(self) -> int:
        """The number of panels of an item, one of each matrix."""
        return 1 if self.gate == NO_GATE else 2


@dataclass(frozen=True)
class _PanelRows:
    """Some rows of x [.., K], the first one at `x`, times some panels."""

    x: Value
    count: Value
    K: Value
    panels: Sequence[Value]
    sums: Sequence[Value]  # of each panel, f32[rows, columns]


def _multiply(e: Emitter, frame: Frame, product: _Product) -> None:
    """Emits a loop over all items: some panels of a matrix that lie side by side, and some rows."""
    x, y, tiles = frame.argument(0), frame.result(0), product.tiles
    index, first = e.load_int(frame.argument(1).data, 32), 3 if product.in_groups else 2
    weight = frame.argument(index + first)
    groups, starts, blocks = e.integer(1), e.integer(0), (x.size(0) + (ROWS - 1)) // ROWS
    if product.in_groups:  # an item has all rows of a group
        groups, starts, blocks = frame.argument(2).size(0) - 1, frame.argument(2).data, e.integer(1)
    matrices, num_panels = weight.size(0) // (groups * product.panels), weight.size(1)
    size = (x.size(1) + (tiles.panels.depth - 1)) // tiles.panels.depth * (tiles.panels.columns * WORD)
    others = groups * matrices * blocks
    together = tiles.panels_together(
        e, size * product.panels, x.size(0) // groups, others * num_panels, num_threads(e, frame)
    )
    parts = (num_panels + (together - 1)) // together
    captured = (
        x.data, weight.data, y.data, x.size(0), x.size(1), y.size(1), matrices, num_panels, starts, size, together
    )  # fmt: skip

    def item(t: Emitter, number: Value, captured: Sequence[Value]) -> None:
        x, weight, y, M, K, width, matrices, num_panels, starts, size, together = captured
        blocks = t.integer(1) if product.in_groups else (M + (ROWS - 1)) // ROWS
        parts = (num_panels + (together - 1)) // together
        block, part, matrix = number % blocks, number // blocks % parts, number // blocks // parts
        if product.in_groups:
            group = starts + matrix // matrices * 4
            first_row = begin = t.load_int(group, 32)
            end = t.load_int(group + 4, 32)
        else:
            first_row, begin = t.integer(0), block * ROWS
            end = t.min(begin + ROWS, M)
        of_matrix = weight + matrix * num_panels * size * product.panels
        columns, N = tiles.panels.columns, width // matrices
        sums = [t.words(tiles.most_rows * columns * FLOAT // 8) for _ in range(product.panels)]
        first_panel = part * together
        for step in tiles.steps(t, begin, end, first_row):
            of_x = x + step.first * K * SIZE_OF[tiles.dtype]
            with t.loop(first_panel, t.min(first_panel + together, num_panels)) as panel:
                panels = [of_matrix + (num_panels * which + panel) * size for which in range(product.panels)]
                some = _PanelRows(of_x, step.count, K, panels, sums)
                _add_up(t, tiles, step, some, together * size)
                column, count = matrix % matrices * N + panel * columns, t.min(N - panel * columns, t.integer(columns))
                place = y + (step.first * width + column) * SIZE_OF[product.out_dtype]
                _finish(t, product, some, place, width, count)

    parallel_runs(e, frame, others * parts, captured, item)


def _add_up(t: Emitter, tiles: Tiles, step: RowStep, item: _PanelRows, next_panels: Value) -> None:
    """Emits the sums of some rows. The panels of the next item lie `next_panels` bytes after those of this one."""
    columns, size = tiles.panels.columns, SIZE_OF[tiles.dtype]
    part = tiles.part // (columns * size * len(item.panels))
    with t.loop(0, item.K, part) as k:
        inputs = t.min(item.K - k, t.integer(part))
        for panel, sums in zip(item.panels, item.sums, strict=True):
            of_panel = panel + k * (columns * size)
            ahead = step.ahead(of_panel + next_panels)
            step.add(TileWork(item.x + k * size, item.K * size, of_panel, sums, inputs, item.count, k, ahead))


def _finish(t: Emitter, product: _Product, item: _PanelRows, y: Value, width: Value, count: Value) -> None:
    """Emits the first `count` outputs of each row of an item at `y`, in rows of `width` outputs."""
    columns, size = product.tiles.panels.columns, SIZE_OF[product.out_dtype]
    with t.loop(0, item.count) as row:
        with t.loop(0, count, t.lanes) as at:
            outputs = outputs_of(product.gate, [t.load(sums + (row * columns + at) * FLOAT) for sums in item.sums])
            place = y + (row * width + at) * size
            with t.when(at + t.lanes <= count):
                if product.out_dtype == "bfloat16":
                    t.store_halves(place, bfloat16s(outputs))
                else:
                    t.store(place, outputs)
            with t.when(at + t.lanes > count):
                t.store(place, outputs, product.out_dtype, first_lanes(count - at, t.lanes))
