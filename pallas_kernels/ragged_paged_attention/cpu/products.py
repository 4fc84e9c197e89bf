"""The products of attention on CPU, each a function of machine code.

The operands of an item lie in units of 4 bytes, each a float32 or a pair of bfloat16: two neighbours in a key, or the
same place of the values of two neighbouring tokens. Sums are of float32. The products take a few queries at a time, so
that their sums stay in registers, and there is a function for each such number.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from llvmlite import ir

from pallas_kernels.chips import CpuChip
from pallas_kernels.cpu.amx import ROWS as TILE_ROWS
from pallas_kernels.cpu.amx import release_tiles
from pallas_kernels.cpu.bytes import has_table_of_128
from pallas_kernels.cpu.emit import SIZE_OF, Emitter
from pallas_kernels.cpu.float8 import E4M3, halves_of_pairs, pairs_of_codes
from pallas_kernels.cpu.tile_product import DEPTH as TILE_DEPTH
from pallas_kernels.cpu.tile_product import (
    TileOperand,
    add_tile_product,
    configure_few_rows,
    few_rows_product,
    tile_product,
)
from pallas_kernels.cpu.values import Value
from pallas_kernels.cpu.vectors import dot_pairs, first_lanes, shuffle, transposed

VECTORS = 4  # of tokens in a block, and of a head that are accumulated at a time
FLOAT = 4  # bytes of a float32, and of a unit
LINE = 64  # bytes of a line of a cache
# Of 64 numbers, those that are pairs in two vectors of 16 pairs, so that the first halves of a vector's pairs follow
# each other, and so do the second ones.
_FAR_PAIRS = tuple([n + half for n in range(first, first + 16) for half in (0, 16)] for first in (0, 32))


@dataclass(frozen=True)
class Operands:
    """The types of queries and pages, and what multiplies them.

    in_pairs: whether the operands of products are pairs of bfloat16
    in_tiles: whether these are multiplied in the tile registers of AMX
    """

    dtype: str
    kv_dtype: str
    in_pairs: bool
    in_tiles: bool

    @classmethod
    def of(cls, chip: CpuChip, dtype: str, kv_dtype: str) -> Self:
        are_bfloat16 = dtype == kv_dtype == "bfloat16"
        in_tiles = are_bfloat16 and chip.has_bf16_tiles
        return cls(dtype, kv_dtype, in_tiles or (are_bfloat16 and chip.has_bf16_dot), in_tiles)

    @property
    def per_unit(self) -> int:
        """The numbers in a unit."""
        return 2 if self.in_pairs else 1

    def add(self, e: Emitter, a: Value, b: Value, total: Value) -> Value:
        """Returns `total` and the products of vectors of units."""
        return dot_pairs(a, b, total) if self.in_pairs else e.fma(a, b, total)


@dataclass(frozen=True)
class Products(ABC):
    """The functions of one handler. Pages have W elements of a token: its key first, its value last."""

    transpose: ir.Function
    pack: ir.Function
    values_in_pages: dict[int, ir.Function]  # none where operands are pairs

    @classmethod
    def emit(cls, e: Emitter, operands: Operands) -> "Products":
        transpose = _transpose(e, operands)
        if operands.in_tiles:
            return TileProducts(transpose, _pack_pairs(e, whole_vectors=True), {}, tile_product(e), few_rows_product(e))
        # Groups of three heads are common. As two and one, each value was loaded and converted twice.
        sizes = [n for n in (6, 4, 3, 2, 1) if n <= e.chip.group_sizes[0]]
        return VectorProducts(
            transpose,
            _pack_pairs(e, whole_vectors=False) if operands.in_pairs else _pack(e, operands.kv_dtype),
            {} if operands.in_pairs else {n: _values_in_pages(e, n, operands.kv_dtype) for n in sizes},
            {n: _dots(e, n, operands) for n in sizes},
            {n: _values(e, n, operands) for n in sizes},
        )

    @abstractmethod
    def begin(self, e: Emitter, M: Value) -> None:
        """Emits what prepares products of M queries, until `end`."""

    @abstractmethod
    def end(self, e: Emitter, M: Value) -> None:
        """Emits what ends them."""

    @property
    @abstractmethod
    def step(self) -> int:
        """The tokens of which values must be packed together, zeros for those that no query sees."""

    @abstractmethod
    def add_logits(
        self, e: Emitter, queries: Value, keys: Value, logits: Value, M: Value, D: Value, scale: Value, vectors: Value
    ) -> None:
        """Emits logits f32[M, block] = queries [M, D] times keys [D, block], of so many vectors of tokens.

        Queries and keys are units, of which D are a multiple of 8, and the number at the address `scale` multiplies
        all logits.
        """

    @abstractmethod
    def add_values(
        self, e: Emitter, values: Value, weights: Value, sums: Value, M: Value, V: Value, first: Value, end: Value
    ) -> None:
        """Emits the addition of packed values [block, V], times weights [M, block], to sums f32[M, V].

        The units from `first` to before `end` count.
        """


@dataclass(frozen=True)
class VectorProducts(Products):
    """Products by vectors."""

    dots: dict[int, ir.Function]
    values: dict[int, ir.Function]  # of packed values

    step = 1

    def begin(self, e: Emitter, M: Value) -> None:
        """Emits nothing: vectors need no preparation."""

    def end(self, e: Emitter, M: Value) -> None:
        """Emits nothing: vectors need no preparation."""

    def add_logits(
        self, e: Emitter, queries: Value, keys: Value, logits: Value, M: Value, D: Value, scale: Value, vectors: Value
    ) -> None:
        for count, m in e.groups(tuple(self.dots), M):
            of_queries, of_logits = queries + m * D * FLOAT, logits + m * (VECTORS * e.lanes * FLOAT)
            e.call(self.dots[count], of_queries, keys, of_logits, D, scale, vectors)

    def add_values(
        self, e: Emitter, values: Value, weights: Value, sums: Value, M: Value, V: Value, first: Value, end: Value
    ) -> None:
        for count, m in e.groups(tuple(self.values), M):
            of_weights, of_sums = weights + m * (VECTORS * e.lanes * FLOAT), sums + m * V * FLOAT
            e.call(self.values[count], values, of_weights, of_sums, V, first, end)


@dataclass(frozen=True)
class TileProducts(Products):
    """Products in the tile registers of AMX. Where one tile has all queries, it is configured once an item."""

    product: ir.Function
    of_few: ir.Function

    step = TILE_DEPTH

    def begin(self, e: Emitter, M: Value) -> None:
        with e.when(M <= TILE_ROWS):
            configure_few_rows(e, M)

    def end(self, e: Emitter, M: Value) -> None:
        with e.when(M <= TILE_ROWS):
            release_tiles(e)

    def add_logits(
        self, e: Emitter, queries: Value, keys: Value, logits: Value, M: Value, D: Value, scale: Value, vectors: Value
    ) -> None:
        row = e.integer(VECTORS * e.lanes * FLOAT)
        operands = TileOperand(queries, D * FLOAT), TileOperand(keys, row), TileOperand(logits, row)
        self._add(e, operands, M, vectors * e.lanes, D * 2, goes_on=e.integer(0))
        factor = e.splat(e.load_float(scale))
        with e.loop(0, M * (VECTORS * e.lanes), e.lanes) as at:
            e.store(logits + at * FLOAT, e.load(logits + at * FLOAT) * factor)

    def add_values(
        self, e: Emitter, values: Value, weights: Value, sums: Value, M: Value, V: Value, first: Value, end: Value
    ) -> None:
        of_weights = TileOperand(weights + first * FLOAT, e.integer(VECTORS * e.lanes * FLOAT))
        of_values, of_sums = TileOperand(values + first * V * FLOAT, V * FLOAT), TileOperand(sums, V * FLOAT)
        self._add(e, (of_weights, of_values, of_sums), M, V, (end - first) * 2, goes_on=e.integer(1))

    def _add(
        self,
        e: Emitter,
        operands: tuple[TileOperand, TileOperand, TileOperand],
        M: Value,
        columns: Value,
        inputs: Value,
        goes_on: Value,
    ) -> None:
        with e.when(M <= TILE_ROWS):
            add_tile_product(e, self.of_few, *operands, M, columns, inputs, goes_on, e.integer(0))
        with e.when(M > TILE_ROWS):
            add_tile_product(e, self.product, *operands, M, columns, inputs, goes_on, e.integer(0))


@contextmanager
def _each_line(e: Emitter, offset: Value, step: int) -> Iterator[None]:
    """Emits what follows so that it happens once for each line, in a loop over bytes by `step`."""
    if step >= LINE:
        yield
    else:
        with e.when((offset & (LINE - 1)).equals(0)):
            yield


def _transpose(e: Emitter, operands: Operands) -> ir.Function:
    """Emits (kv, kv of the tokens to come, keys, D in units, W): keys of `lanes` tokens become columns of [D, block].

    So the logits of neighbouring tokens are the lanes of a vector, and no sum goes across lanes.
    """
    t = e.function("transpose", 5)
    kv, ahead, out, D, W = t.arguments
    row = W * SIZE_OF[operands.kv_dtype]
    size = FLOAT if operands.in_pairs else SIZE_OF[operands.kv_dtype]
    widths = (VECTORS * t.lanes, t.lanes) if _has_tables(t, operands.kv_dtype) else (t.lanes,)
    for width, d in t.groups(widths, (D + (t.lanes - 1)) // t.lanes * t.lanes):
        with _each_line(t, d * size, width * size):
            # Pages are anywhere in memory: 64 rows of 192 tokens took 1.8 ms without this and 1.0 with it, and sixteen
            # of 256 0.30 with the first cache and 0.20 with the second (Zen 4, float32). These tokens' values are
            # wanted next, and the next block's keys are fetched while the values pass by: with all of it at once, a
            # core has more misses than it can wait for. 64 rows took 0.77 ms so, and 0.68 in turns.
            for i in range(t.lanes):
                t.prefetch(ahead + row * i + d * size, level=2)
                t.prefetch(kv + row * (i + 1) + (d - D) * size, level=2)
        rows = [kv + row * i + d * size for i in range(t.lanes)]
        for i, column in enumerate(_columns(t, rows, width, D - d, operands)):
            t.store(out + (d + i) * (VECTORS * t.lanes * FLOAT), column)
    return t.finish()


def _columns(t: Emitter, rows: Sequence[Value], width: int, left: Value, operands: Operands) -> list[Value]:
    """Returns as many columns as `width` of the keys at the addresses `rows`, of which so many units are `left`."""
    if operands.in_pairs:
        mask = first_lanes(left, t.lanes)
        return transposed([t.load(row, mask=mask) for row in rows])
    if width == t.lanes:
        return transposed([t.load(row, operands.kv_dtype) for row in rows])
    # Pairs are turned round as words, so that half as many are.
    pairs = [pairs_of_codes(t, row, _FAR_PAIRS) for row in rows]
    columns = []
    for of_vector in zip(*pairs, strict=True):
        halves = [halves_of_pairs(column) for column in transposed(of_vector)]
        columns += [first for first, _ in halves] + [second for _, second in halves]
    return columns


def _loaded(t: Emitter, address: Value, count: int, dtype: str) -> list[Value]:
    """Loads vectors of numbers that follow each other, as float32."""
    if count == VECTORS and _has_tables(t, dtype):
        return [half for pairs in pairs_of_codes(t, address, _FAR_PAIRS) for half in halves_of_pairs(pairs)]
    return [t.load(address + i * t.lanes * SIZE_OF[dtype], dtype) for i in range(count)]


def _has_tables(t: Emitter, dtype: str) -> bool:
    return dtype == E4M3 and has_table_of_128(t.chip)


def _pack(e: Emitter, dtype: str) -> ir.Function:
    """Emits (values in a page, kv to come, packed [.., V], V, W, first, end): those tokens' values become float32."""
    t = e.function("pack", 7)
    values, ahead, out, V, W, first, end = t.arguments
    size = SIZE_OF[dtype]
    with t.loop(first, end) as token:
        for width, d in t.groups((VECTORS * t.lanes, t.lanes), V):
            for i in range(0, width, t.lanes):
                with _each_line(t, (d + i) * size, t.lanes * size):
                    t.prefetch(ahead + (token * W + d + i) * size, level=2)
            for i, numbers in enumerate(_loaded(t, values + (token * W + d) * size, width // t.lanes, dtype)):
                t.store(out + (token * V + d + i * t.lanes) * FLOAT, numbers)
    return t.finish()


def _pack_pairs(e: Emitter, whole_vectors: bool) -> ir.Function:
    """Emits the same for pairs of tokens, [../2, V] units. Values outside `first` and `end` become zeros.

    whole_vectors: whether all tokens of a vector become units, or only pairs with a token that counts
    """
    t = e.function("pack_pairs", 7)
    values, ahead, out, V, W, first, end = t.arguments
    size = SIZE_OF["bfloat16"]
    lanes, nothing = t.integer(t.lanes), t.integer(0)
    neighbours = [lane + half for lane in range(t.lanes) for half in (0, t.lanes)]
    begin, stop = (nothing, lanes) if whole_vectors else (first // 2 * 2, end)
    with t.loop(begin, stop, 2) as token:
        some = [first_lanes(t.select((n >= first) & (n < end), lanes, nothing), t.lanes) for n in (token, token + 1)]
        with t.loop(0, V, t.lanes) as d:
            with _each_line(t, d * size, t.lanes * size):
                for half in range(2):
                    t.prefetch(ahead + ((token + half) * W + d) * size, level=2)
            a, b = (t.load_halves(values + ((token + half) * W + d) * size, some[half]) for half in range(2))
            t.store_halves(out + ((token >> 1) * V + d) * FLOAT, shuffle(a, b, neighbours))
    return t.finish()


def _dots(e: Emitter, count: int, operands: Operands) -> ir.Function:
    """Emits (queries [count, D], keys [D, block], logits [count, block], D in units, scale, vectors).

    The logits of so many vectors of tokens become products times what is at the address `scale`.
    """
    t = e.function(f"dots{count}", 6)
    queries, keys, out, D, scale, count_vectors = t.arguments
    width = t.lanes * FLOAT
    for vectors, v in t.groups((VECTORS, 1), count_vectors):
        places = [(m, i) for m in range(count) for i in range(vectors)]
        sums = {place: t.variable(t.vector(0)) for place in places}
        with t.loop(0, D) as d:
            k = [t.load(keys + (d * VECTORS + v + i) * width) for i in range(vectors)]
            for m in range(count):
                q = t.splat(t.load_float(queries + (D * m + d) * FLOAT))
                for i in range(vectors):
                    sums[m, i].set(operands.add(t, q, k[i], sums[m, i].get()))
        factor = t.splat(t.load_float(scale))
        for m, i in places:
            t.store(out + (v + m * VECTORS + i) * width, sums[m, i].get() * factor)
    return t.finish()


def _values(e: Emitter, count: int, operands: Operands) -> ir.Function:
    """Emits (packed values, weights [count, block], sums [count, V], V, first, end): adds weighted units of values."""
    t = e.function(f"values{count}", 6)
    values, weights, out, V, first, end = t.arguments
    width = VECTORS * t.lanes
    # Of the value, a few vectors at a time, and what is left of it one by one.
    for size, d in t.groups((VECTORS * t.lanes, t.lanes), V):
        places = {(m, i): out + (V * m + d + i * t.lanes) * FLOAT for m in range(count) for i in range(size // t.lanes)}
        sums = {place: t.variable(t.load(address)) for place, address in places.items()}
        with t.loop(first, end) as n:
            v = [t.load(values + (n * V + d + i * t.lanes) * FLOAT) for i in range(size // t.lanes)]
            for m in range(count):
                weight = t.splat(t.load_float(weights + (n + m * width) * FLOAT))
                for i, vector in enumerate(v):
                    sums[m, i].set(operands.add(t, weight, vector, sums[m, i].get()))
        for place, address in places.items():
            t.store(address, sums[place].get())
    return t.finish()


def _values_in_pages(e: Emitter, count: int, dtype: str) -> ir.Function:
    """Emits (values in a page, kv to come, weights, sums, V, W, first, end): the same without packed values.

    `values` and `weights` begin at the same token, and those from `first` to before `end` count.
    """
    t = e.function(f"values_in_pages{count}", 8)
    values, ahead, weights, out, V, W, first, end = t.arguments
    size = SIZE_OF[dtype]
    for width, d in t.groups((VECTORS * t.lanes, t.lanes), V):
        vectors = width // t.lanes
        at = {(m, i): out + (V * m + d + i * t.lanes) * FLOAT for m in range(count) for i in range(vectors)}
        sums = {place: t.variable(t.load(address)) for place, address in at.items()}
        with t.loop(first, end) as token:
            v = _loaded(t, values + (token * W + d) * size, vectors, dtype)
            for i in range(0, vectors, max(LINE // (t.lanes * size), 1)):
                t.prefetch(ahead + (token * W + d + i * t.lanes) * size, level=2)
            for m in range(count):
                weight = t.splat(t.load_float(weights + (token + m * (VECTORS * t.lanes)) * FLOAT))
                for i in range(vectors):
                    sums[m, i].set(t.fma(weight, v[i], sums[m, i].get()))
        for place, address in at.items():
            t.store(address, sums[place].get())
    return t.finish()
