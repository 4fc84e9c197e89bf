"""The tile registers of AMX: eight matrices of up to 16 rows of 64 bytes, which a thread has for itself.

`tile_registers` configures them for what is emitted inside it. So each function that uses them begins and ends with
that, on whichever thread it runs, and none holds tiles while it calls another.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from llvmlite import ir

from pallas_kernels.cpu.dots import byte_products, first_and_second, flushed
from pallas_kernels.cpu.emit import Emitter
from pallas_kernels.cpu.values import F32, I8, Value

ROWS = 16
ROW_BYTES = 64
NUMBER = 8
# Bytes of a lane: a float32 or int32 of a sum, two bfloat16, or four bytes.
LANE = 4
# The dtypes of what a product multiplies: of a, and of b.
Factors = Literal["bfloat16", "int8 int8", "int8 uint8", "uint8 int8", "uint8 uint8"]
# Emits the words a[m, k], in all lanes, and b[k, n], for some columns n.
type EmitPair = Callable[[Value], tuple[Value, Value]]
_PRODUCTS: dict[Factors, str] = {
    "bfloat16": "tdpbf16ps",
    "int8 int8": "tdpbssd",
    "int8 uint8": "tdpbsud",
    "uint8 int8": "tdpbusd",
    "uint8 uint8": "tdpbuud",
}


@dataclass(frozen=True)
class TileShape:
    """The part of a tile register that is used. The number of rows may be a value that the kernel will have."""

    rows: int | Value = ROWS
    row_bytes: int = ROW_BYTES

    def __post_init__(self) -> None:
        rows = ROWS if isinstance(self.rows, Value) else self.rows
        if not (0 < rows <= ROWS and 0 < self.row_bytes <= ROW_BYTES and self.row_bytes % LANE == 0):
            raise ValueError(
                f"a tile has 1 to {ROWS} rows of up to {ROW_BYTES} bytes, in words of {LANE}: not {self.rows} of "
                f"{self.row_bytes}"
            )


@dataclass(frozen=True)
class TileRegisters(ABC):
    """The configured registers, by their numbers."""

    emitter: Emitter
    shapes: tuple[TileShape, ...]

    def __post_init__(self) -> None:
        if len(self.shapes) > NUMBER:
            raise ValueError(f"there are {NUMBER} tile registers, not {len(self.shapes)}")

    @abstractmethod
    def zero(self, tile: int) -> None:
        """Fills a tile with zeros."""

    @abstractmethod
    def load(self, tile: int, address: Value, stride: Value | int) -> None:
        """Loads a tile, whose rows begin `stride` bytes apart."""

    @abstractmethod
    def store(self, tile: int, address: Value, stride: Value | int) -> None:
        """Stores a tile, whose rows begin `stride` bytes apart."""

    def add_products(self, factors: Factors, c: int, a: int, b: int) -> None:
        """Adds the product of the tiles a and b to the tile c.

        Row m and column n of c get the products of the words a[m, k] and b[k, n], of two bfloat16 or four bytes each.
        Sums are float32 or int32. A row of c depends on no other row of a.
        """
        shapes = [self.shapes[tile] for tile in (c, a, b)]
        of_c, of_a, of_b = shapes
        if (of_c.rows, of_c.row_bytes, of_a.row_bytes) != (of_a.rows, of_b.row_bytes, of_b.rows * LANE):
            raise ValueError(f"the tiles of a product do not fit: {', '.join(map(str, shapes))}")
        self._add_products(factors, c, a, b)

    @abstractmethod
    def _add_products(self, factors: Factors, c: int, a: int, b: int) -> None: ...


@contextmanager
def tile_registers(e: Emitter, shapes: Sequence[TileShape]) -> Iterator[TileRegisters]:
    """Emits what follows with the tile registers 0, 1, .. of these shapes, which are released after it.

    The contents of tiles are undefined at first. Where the chip has no AMX and emulates it, the registers are memory.
    """
    configure_tiles(e, shapes)
    yield configured_registers(e, shapes)
    release_tiles(e)


def configure_tiles(e: Emitter, shapes: Sequence[TileShape]) -> None:
    """Emits the configuration of the tile registers until `release_tiles`, for functions that are called as well.

    Both take 0.1 us together (Sapphire Rapids), as long as products of few rows.
    """
    if "amx-tile" not in e.chip.emulated:
        AmxRegisters(e, tuple(shapes)).configure()


def release_tiles(e: Emitter) -> None:
    """Ends the use of the tile registers."""
    if "amx-tile" not in e.chip.emulated:
        e.intrinsic("llvm.x86.tilerelease", ir.VoidType())


def configured_registers(e: Emitter, shapes: Sequence[TileShape]) -> TileRegisters:
    """Returns the tile registers where they have these shapes already, here or in the caller."""
    if "amx-tile" in e.chip.emulated:
        return EmulatedRegisters(e, tuple(shapes), e.words(NUMBER * ROWS * ROW_BYTES // 8))
    return AmxRegisters(e, tuple(shapes))


class AmxRegisters(TileRegisters):
    """Emits the instructions of AMX."""

    def configure(self) -> None:
        """Emits the load of a configuration: palette 1, and the bytes in a row and the rows of each tile."""
        e = self.emitter
        config = e.words(8)
        for word in range(8):
            e.store_int(config + word * 8, int(word == 0))
        for tile, shape in enumerate(self.shapes):
            e.store_int(config + (16 + 2 * tile), shape.row_bytes, 16)
            e.store_int(config + (48 + tile), shape.rows, 8)
        e.intrinsic("llvm.x86.ldtilecfg", ir.VoidType(), _pointer(config))

    def zero(self, tile: int) -> None:
        self._call("tilezero", self._number(tile))

    def load(self, tile: int, address: Value, stride: Value | int) -> None:
        self._call("tileloadd64", self._number(tile), _pointer(address), self._stride(stride))

    def store(self, tile: int, address: Value, stride: Value | int) -> None:
        self._call("tilestored64", self._number(tile), _pointer(address), self._stride(stride))

    def _add_products(self, factors: Factors, c: int, a: int, b: int) -> None:
        self._call(_PRODUCTS[factors], *map(self._number, (c, a, b)))

    def _call(self, name: str, *arguments: Value) -> None:
        self.emitter.intrinsic(f"llvm.x86.{name}", ir.VoidType(), *arguments)

    def _number(self, tile: int) -> Value:
        return Value(self.emitter, ir.Constant(I8, tile))

    def _stride(self, stride: Value | int) -> Value:
        return stride if isinstance(stride, Value) else self.emitter.integer(stride)


@dataclass(frozen=True)
class EmulatedRegisters(TileRegisters):
    """Emits the same with vectors: register after register lies at `memory`, in rows of 64 bytes."""

    memory: Value

    def _row(self, tile: int, row: Value) -> Value:
        return self.memory + tile * (ROWS * ROW_BYTES) + row * ROW_BYTES

    def zero(self, tile: int) -> None:
        e, shape = self.emitter, self.shapes[tile]
        with e.loop(0, _number_of_rows(e, shape)) as row, e.loop(0, e.integer(shape.row_bytes), LANE) as at:
            e.store_int(self._row(tile, row) + at, 0, 32)

    def load(self, tile: int, address: Value, stride: Value | int) -> None:
        self._copy(tile, address, stride, stores=False)

    def store(self, tile: int, address: Value, stride: Value | int) -> None:
        self._copy(tile, address, stride, stores=True)

    def _copy(self, tile: int, address: Value, stride: Value | int, stores: bool) -> None:
        e, shape = self.emitter, self.shapes[tile]
        with e.loop(0, _number_of_rows(e, shape)) as row, e.loop(0, e.integer(shape.row_bytes), LANE) as at:
            ours, others = self._row(tile, row) + at, address + row * stride + at
            source, target = (ours, others) if stores else (others, ours)
            e.store_int(target, e.load_int(source, 32), 32)

    def _add_products(self, factors: Factors, c: int, a: int, b: int) -> None:
        e = self.emitter
        words, columns = _number_of_rows(e, self.shapes[b]), self.shapes[b].row_bytes // LANE
        for first in range(0, columns, e.lanes):
            with e.loop(0, _number_of_rows(e, self.shapes[c])) as row:
                place = self._row(c, row) + first * LANE

                def pair(k: Value, row: Value = row, first: int = first) -> tuple[Value, Value]:
                    return e.splat(e.load_float(self._row(a, row) + k * LANE)), e.load(self._row(b, k) + first * LANE)

                if factors == "bfloat16":
                    self._add_pairs(place, words, pair)
                else:
                    self._add_bytes(place, words, pair, *(one == "int8" for one in factors.split()))

    def _add_pairs(self, place: Value, words: Value, pair: EmitPair) -> None:
        """Adds as the manual says: the first and the second of all pairs apart, and then both to what was there."""
        e = self.emitter
        sums = [e.variable(e.vector(0)) for _ in range(2)]
        with e.loop(0, words) as k:
            for total, x, y in zip(sums, *map(first_and_second, pair(k)), strict=True):
                total.set(flushed(e.fma(x, y, total.get())))
        both = flushed(sums[0].get() + sums[1].get())
        e.store(place, flushed(flushed(e.load(place)) + both))

    def _add_bytes(self, place: Value, words: Value, pair: EmitPair, a_is_signed: bool, b_is_signed: bool) -> None:
        e = self.emitter
        total = e.variable(e.bits(e.load(place)))
        with e.loop(0, words) as k:
            total.set(byte_products(*pair(k), total.get(), a_is_signed, b_is_signed))
        e.store(place, Value(e, e.builder.bitcast(total.get().ir, ir.VectorType(F32, e.lanes))))


def _number_of_rows(e: Emitter, shape: TileShape) -> Value:
    return shape.rows if isinstance(shape.rows, Value) else e.integer(shape.rows)


def _pointer(address: Value) -> Value:
    return Value(address.emitter, address.emitter.builder.inttoptr(address.ir, ir.PointerType(I8)))
