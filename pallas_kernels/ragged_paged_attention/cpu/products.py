"""The products of attention on CPU, each a function of machine code.

The operands of an item lie in units of 4 bytes, each a float32 or a pair of bfloat16: two neighbours in a key, or the
same place of the values of two neighbouring tokens. Sums are of float32. The products take a few queries at a time, so
that their sums stay in registers, and there is a function for each such number.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from llvmlite import ir

from pallas_kernels.cpu.bytes import has_table_of_128
from pallas_kernels.cpu.emit import SIZE_OF, Emitter
from pallas_kernels.cpu.float8 import E4M3, halves_of_pairs, pairs_of_codes
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
    """The types of queries and pages, and whether the operands of products are pairs of bfloat16."""

    dtype: str
    kv_dtype: str
    in_pairs: bool

    @property
    def per_unit(self) -> int:
        """The numbers in a unit."""
        return 2 if self.in_pairs else 1

    def add(self, e: Emitter, a: Value, b: Value, total: Value) -> Value:
        """Returns `total` and the products of vectors of units."""
        return dot_pairs(a, b, total) if self.in_pairs else e.fma(a, b, total)


@dataclass(frozen=True)
class Products:
    """The functions of one handler. Pages have W elements of a token: its key first, its value last."""

    transpose: ir.Function
    pack: ir.Function
    dots: dict[int, ir.Function]
    values: dict[int, ir.Function]  # of packed values
    values_in_pages: dict[int, ir.Function]  # none where operands are pairs

    @classmethod
    def emit(cls, e: Emitter, operands: Operands) -> "Products":
        # Groups of three heads are common. As two and one, each value was loaded and converted twice.
        sizes = [n for n in (6, 4, 3, 2, 1) if n <= e.chip.group_sizes[0]]
        return cls(
            _transpose(e, operands),
            _pack_pairs(e) if operands.in_pairs else _pack(e, operands.kv_dtype),
            {n: _dots(e, n, operands) for n in sizes},
            {n: _values(e, n, operands) for n in sizes},
            {} if operands.in_pairs else {n: _values_in_pages(e, n, operands.kv_dtype) for n in sizes},
        )


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


def _pack_pairs(e: Emitter) -> ir.Function:
    """Emits the same for pairs of tokens, [../2, V] units. Values outside `first` and `end` become zeros."""
    t = e.function("pack_pairs", 7)
    values, ahead, out, V, W, first, end = t.arguments
    size = SIZE_OF["bfloat16"]
    lanes, nothing = t.integer(t.lanes), t.integer(0)
    neighbours = [lane + half for lane in range(t.lanes) for half in (0, t.lanes)]
    with t.loop(first // 2 * 2, end, 2) as token:
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
