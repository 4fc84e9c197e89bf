"""The online softmax of attention on CPU, in powers of two: logits of a block become weights."""

from llvmlite import ir

from pallas_kernels.cpu.emit import Emitter
from pallas_kernels.cpu.vectors import bfloat16s, exp2, maxima, shuffle, sums
from pallas_kernels.ragged_paged_attention.cpu.products import FLOAT, Operands

MASKED = -1e30  # a logit whose weight is 0
NO_PEAK = -1e29  # before the first logit. 2**(MASKED - NO_PEAK) is 0
# A query's weights are 2**(logit - peak). Its peak stays until a logit is larger by so much: weights up to 256 do no
# harm, and the sums need not be multiplied.
SLACK = 8.0


def weigh_functions(e: Emitter, vectors: int, operands: Operands) -> dict[int, ir.Function]:
    """Emits functions for so many queries at a time, whose rows have `vectors` vectors of logits."""
    return {count: _weigh(e, count, vectors, operands) for count in sorted({e.lanes, 4, 1}, reverse=True)}


def _weigh(e: Emitter, count: int, vectors: int, operands: Operands) -> ir.Function:
    """Emits (logits [count, block], peaks [count], totals [count], sums [count, V], V): logits become weights.

    What was summed before is brought to new peaks. The weights of a query are at the beginning of its row, as units.
    """
    t = e.function(f"weigh{count}", 5)
    logits, peaks, totals, out, V = t.arguments
    width = t.lanes * FLOAT
    row = vectors * width
    factors, parts = t.words(t.lanes // 2), t.words(count * t.lanes // 2)
    repeated = [lane % count for lane in range(t.lanes)]
    with t.loop(0, t.integer(count)) as m:
        most = t.load(logits + m * row)
        for i in range(1, vectors):
            most = t.max(most, t.load(logits + m * row + i * width))
        t.store(parts + m * width, most)
    most = maxima([t.load(parts + m * width) for m in range(count)])
    old = t.load(peaks)
    old = shuffle(old, old, repeated)
    peak = t.select(most > old + SLACK, most, old)
    with t.when(t.any(peak > old)):
        factor = exp2(old - peak)
        t.store(factors, factor)
        t.store(peaks, shuffle(peak, peak, range(count)))
        total = t.load(totals) * factor
        t.store(totals, shuffle(total, total, range(count)))
        with t.loop(0, t.integer(count)) as m:
            factor = t.load_float(factors + m * FLOAT)
            with t.when(factor < 1.0), t.loop(0, V, t.lanes) as d:
                place = out + (m * V + d) * FLOAT
                t.store(place, t.load(place) * t.splat(factor))
    with t.loop(0, t.integer(count)) as m:
        peak = t.splat(t.load_float(peaks + m * FLOAT))
        total = t.vector(0)
        for i in range(vectors):
            weight = exp2(t.load(logits + m * row + i * width) - peak)
            total = total + weight
            if operands.in_pairs:  # half as many bytes: logits that are still to be read stay
                t.store_halves(logits + m * row + i * width // 2, bfloat16s(weight))
            else:
                t.store(logits + m * row + i * width, weight)
        t.store(parts + m * width, total)
    total = t.load(totals) + sums([t.load(parts + m * width) for m in range(count)])
    t.store(totals, shuffle(total, total, range(count)))
    return t.finish()
