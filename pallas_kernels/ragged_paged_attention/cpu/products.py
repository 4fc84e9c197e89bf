"""The inner loops of attention on CPU, each a function of machine code: all that is hot is here.

A block has `VECTORS` vectors of tokens. The products take a few queries at a time, so that their sums stay in
registers, and there is a function for each such number.
"""

from dataclasses import dataclass

from llvmlite import ir

from pallas_kernels.cpu.emit import SIZE_OF, Emitter
from pallas_kernels.cpu.vectors import transposed

VECTORS = 4  # of tokens in a block, and of a head that are accumulated at a time
FLOAT = 4  # bytes


@dataclass(frozen=True)
class Products:
    """The functions of one handler. Pages have W elements of a token: its key first, its value last."""

    transpose: ir.Function
    dots: dict[int, ir.Function]
    values: dict[int, ir.Function]

    @classmethod
    def emit(cls, e: Emitter, dtype: str) -> "Products":
        numbers = e.chip.group_sizes
        return cls(_transpose(e, dtype), {n: _dots(e, n) for n in numbers}, {n: _values(e, n, dtype) for n in numbers})


def _transpose(e: Emitter, dtype: str) -> ir.Function:
    """Emits (kv, kv of the tokens to come, buffer, D, W): keys of `lanes` tokens become columns of [D, block].

    So the logits of neighbouring tokens are the lanes of a vector, and no sum goes across lanes.
    """
    t = e.function("transpose", 5)
    kv, ahead, out, D, W = t.arguments
    size = SIZE_OF[dtype]
    with t.loop(0, D, t.lanes) as d:
        for i in range(t.lanes):
            # Pages are anywhere in memory: 64 rows of 192 tokens took 1.8 ms without this and 1.0 with it, and sixteen
            # of 256 0.30 with the first cache and 0.20 with the second (Zen 4, float32). These tokens' values are
            # wanted next, and the next block's keys are fetched while the values pass by: with all of it at once, a
            # core has more misses than it can wait for. 64 rows took 0.77 ms so, and 0.68 in turns.
            t.prefetch(ahead + (W * i + d) * size, level=2)
            t.prefetch(kv + (W * (i + 1) - D + d) * size, level=2)
        rows = [t.load(kv + (W * i + d) * size, dtype) for i in range(t.lanes)]
        for i, column in enumerate(transposed(rows)):
            t.store(out + (d + i) * (VECTORS * t.lanes * FLOAT), column)
    return t.finish()


def _dots(e: Emitter, count: int) -> ir.Function:
    """Emits (queries [count, D], keys [D, block], logits [count, block], D): the logits become their products."""
    t = e.function(f"dots{count}", 4)
    queries, keys, out, D = t.arguments
    width = t.lanes * FLOAT
    sums = {(m, i): t.variable(t.vector(0)) for m in range(count) for i in range(VECTORS)}
    with t.loop(0, D) as d:
        k = [t.load(keys + d * (VECTORS * width) + i * width) for i in range(VECTORS)]
        for m in range(count):
            q = t.splat(t.load_float(queries + (D * m + d) * FLOAT))
            for i in range(VECTORS):
                sums[m, i].set(t.fma(q, k[i], sums[m, i].get()))
    for (m, i), total in sums.items():
        t.store(out + (m * VECTORS + i) * width, total.get())
    return t.finish()


def _values(e: Emitter, count: int, dtype: str) -> ir.Function:
    """Emits (values, kv to come, weights [count, block], sums [count, V], V, W, first, end): adds weighted values.

    `values` and `weights` begin at the same token, and those from `first` to before `end` count.
    """
    t = e.function(f"values{count}", 8)
    values, ahead, weights, out, V, W, first, end = t.arguments
    size = SIZE_OF[dtype]
    # Of the value, a few vectors at a time, and what is left of it one by one.
    for width, d in t.groups((VECTORS * t.lanes, t.lanes), V):
        vectors = width // t.lanes
        at = {(m, i): out + (V * m + d + i * t.lanes) * FLOAT for m in range(count) for i in range(vectors)}
        sums = {place: t.variable(t.load(address)) for place, address in at.items()}
        with t.loop(first, end) as token:
            v = [t.load(values + (token * W + d + i * t.lanes) * size, dtype) for i in range(vectors)]
            for i in range(vectors):
                t.prefetch(ahead + (token * W + d + i * t.lanes) * size, level=2)
            for m in range(count):
                weight = t.splat(t.load_float(weights + (token + m * (VECTORS * t.lanes)) * FLOAT))
                for i in range(vectors):
                    sums[m, i].set(t.fma(weight, v[i], sums[m, i].get()))
        for place, address in at.items():
            t.store(address, sums[place].get())
    return t.finish()
