"""The tiles of a product with packed matrices: sums of a few rows and one panel, which stay in registers.

A chip's instructions for a dtype are one class, here and in `amx_tiles`. `kernel.tiles_for` chooses it, and the rest of
the kernel does not know.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from llvmlite import ir

from pallas_kernels.cpu.emit import SIZE_OF, Emitter
from pallas_kernels.cpu.values import Value
from pallas_kernels.cpu.vectors import dot_pairs
from pallas_kernels.packed_matmul.panels import WORD, Panels

FLOAT = SIZE_OF["float32"]
ROWS = 96  # of an item of work


@dataclass(frozen=True)
class TileWork:
    """Work of a tile: to add up the products of some inputs of some rows with a panel.

    x: the address of the first row at the first input
    stride: the bytes between rows
    panel: the address of the panel at that input
    sums: the address of f32[rows, columns]
    inputs: their number, a multiple of 32 but for the last ones of a row
    rows: their number
    goes_on: 0 where the sums begin with these products, whatever their memory holds
    ahead: 0, or the address of what is fetched into the second cache meanwhile (`cpu.tile_product`)
    """

    x: Value
    stride: Value
    panel: Value
    sums: Value
    inputs: Value
    rows: Value
    goes_on: Value
    ahead: Value


@dataclass(frozen=True)
class Tiles(ABC):
    """Adds products of rows of x, of `dtype`, with a panel to sums in float32.

    Each sum goes on from what it was, input after input or 32 after 32. So it has the same bits in a tile of any number
    of rows, and however many inputs are added at a time.
    """

    dtype: str
    panels: Panels
    # Bytes of panels that all rows of an item go through before the next: so many stay in the second cache.
    part: ClassVar[int]
    # The rows whose sums are added up before they become outputs.
    most_rows: ClassVar[int]

    @abstractmethod
    def emit(self, t: Emitter) -> Callable[[TileWork], None]:
        """Emits the functions of the tiles, and returns what emits their calls for some work."""

    @abstractmethod
    def steps(self, t: Emitter, begin: Value, end: Value, first_row: Value) -> Iterator["RowStep"]:
        """Emits the body of Python's `for` in loops over the rows from `begin` to before `end`.

        first_row: of all rows that are multiplied by the same matrix
        """

    @abstractmethod
    def panels_together(self, t: Emitter, size: Value, rows: Value, items: Value, threads: Value) -> Value:
        """Returns how many panels of `size` bytes each step goes through, of an item that has as many.

        rows: of x, in all items
        items: how many there are if an item has one panel
        """


@dataclass(frozen=True)
class RowStep:
    """Rows of an item.

    first: the first one
    count: their number
    add: emits the addition of their products
    ahead: returns what these products fetch of the panel at an address, as TileWork has it
    """

    first: Value
    count: Value
    add: Callable[[TileWork], None]
    ahead: Callable[[Value], Value]


@dataclass(frozen=True)
class VectorTiles(Tiles):
    """Multiplies one input of each row, in all lanes of a vector, by the vectors of a panel.

    6 rows and 4 vectors are 24 sums of the 32 registers of AVX-512 and NEON; 6 rows and 2 vectors are 12 of AVX2's 16.
    """

    part = 256 * 1024
    most_rows = ROWS
    sizes: ClassVar[tuple[int, ...]] = (6, 4, 2, 1)

    def emit(self, t: Emitter) -> Callable[[TileWork], None]:
        functions = {rows: self._tile(t, rows) for rows in self.sizes}

        def add(work: TileWork) -> None:
            for rows, at in t.groups(self.sizes, work.rows):
                x, sums = work.x + at * work.stride, work.sums + at * (self.panels.columns * FLOAT)
                t.call(functions[rows], x, work.stride, work.panel, sums, work.inputs, work.goes_on)

        return add

    def steps(self, t: Emitter, begin: Value, end: Value, first_row: Value) -> Iterator[RowStep]:
        add = self.emit(t)
        with t.loop(begin, end, ROWS) as first:
            yield RowStep(first, t.min(end - first, t.integer(ROWS)), add, lambda panel: t.integer(0))

    def panels_together(self, t: Emitter, size: Value, rows: Value, items: Value, threads: Value) -> Value:
        return t.integer(1)

    def _tile(self, e: Emitter, rows: int) -> ir.Function:
        """Emits the function of a tile with so many rows."""
        t = e.function(f"tile{rows}", 6)
        x, stride, panel, sums, inputs, goes_on = t.arguments
        depth, columns, size = self.panels.depth, self.panels.columns, SIZE_OF[self.dtype]
        vectors = range(columns // t.lanes)
        places = {(m, n): sums + (m * columns + n * t.lanes) * FLOAT for m in range(rows) for n in vectors}
        totals = {place: t.variable(t.vector(0)) for place in places}
        with t.when(goes_on > 0):
            for place, address in places.items():
                totals[place].set(t.load(address))
        starts = [x + stride * m for m in range(rows)]

        def add(k: Value, count: int) -> None:
            words = [panel + k * (columns * size) + n * (t.lanes * WORD) for n in vectors]
            for of_panel, of_row, multiply in self._terms(t, count):
                b = [of_panel(address) for address in words]
                for m in range(rows):
                    a = of_row(starts[m] + k * size)
                    for n in vectors:
                        totals[m, n].set(multiply(a, b[n], totals[m, n].get()))

        with t.loop(0, inputs - (depth - 1), depth) as k:
            add(k, depth)
        if depth == 2:
            with t.when((inputs % 2).equals(1)):
                add(inputs - 1, 1)
        for place, address in places.items():
            t.store(address, totals[place].get())
        return t.finish()

    def _terms(self, t: Emitter, count: int) -> Iterator["Term"]:
        """Yields what is to be added up of words that have `count` inputs."""
        if self.dtype == "float32":
            yield t.load, t.load_everywhere, t.fma
        elif t.chip.has_bf16_dot:
            yield t.load_pairs, partial(t.load_pair_everywhere, count=count), dot_pairs
        else:
            for number in range(count):
                yield partial(_bfloat16, t, number), partial(_next_bfloat16, t, number), t.fma


# How to load words of a panel, how to load those of a row in all lanes, and how to add their product to a sum.
type Term = tuple[Callable[[Value], Value], Callable[[Value], Value], Callable[[Value, Value, Value], Value]]


def _bfloat16(t: Emitter, number: int, address: Value) -> Value:
    """Loads a vector of pairs, and returns one of each pair as float32."""
    pairs = t.bits(t.load(address))
    return t.of_bits(pairs & -(2**16) if number else pairs << 16)


def _next_bfloat16(t: Emitter, number: int, address: Value) -> Value:
    return t.load_everywhere(address + number * SIZE_OF["bfloat16"], "bfloat16")
