"""Kernels for CPUs of what comes before products of groups: the largest numbers of rows, and the order of rows."""

from collections.abc import Sequence

from pallas_kernels.cpu.emit import Emitter
from pallas_kernels.cpu.frame import Frame
from pallas_kernels.cpu.pool import parallel_loop
from pallas_kernels.cpu.values import Value
from pallas_kernels.cpu.vectors import first_lanes, largest

ROWS = 64  # of an item of work
_INT, _WORD = 4, 8  # bytes of an int32 or float32, and of a counter
_LEAST, _MOST = -(2**63), 2**63 - 1
_MASK = 2**31 - 1


def largest_of_rows(e: Emitter, frame: Frame) -> None:
    """Emits the handler. Its argument is x; its results are the numbers and their places."""
    x, values, places = frame.argument(0), frame.result(0), frame.result(1)
    captured = (x.data, values.data, places.data, x.size(0), x.size(1), values.size(1))
    parallel_loop(e, frame, (x.size(0) + (ROWS - 1)) // ROWS, captured, _find)


def _find(t: Emitter, item: Value, captured: Sequence[Value]) -> None:
    x, values, places, num_rows, size, k = captured
    with t.loop(item * ROWS, t.min(item * ROWS + ROWS, num_rows)) as row:
        numbers = x + row * size * _INT
        last = t.variable(t.integer(_MOST))
        with t.loop(0, k) as rank:
            # No two keys are equal. So the next one is the largest of those below the last.
            best = t.variable(t.splat(t.integer(_LEAST)))
            with t.loop(0, size, t.lanes) as at:
                keys = _keys(t, numbers, at, size)
                best.set(t.max(t.select(keys < t.splat(last.get()), keys, t.splat(t.integer(_LEAST))), best.get()))
            last.set(largest(best.get()))
            place = t.integer(_MASK) - (last.get() & _MASK)
            to = (row * k + rank) * _INT
            t.store_int(places + to, place, 32)
            t.store_float(values + to, t.load_float(numbers + place * _INT))


def _keys(t: Emitter, numbers: Value, at: Value, size: Value) -> Value:
    """Returns integers i64 in the order of the numbers from `at` on; of equal numbers, the first has the largest."""
    is_here = first_lanes(size - at, t.lanes)
    words = t.bits(t.load(numbers + at * _INT, mask=is_here))
    ordered = t.select(words < 0, words ^ _MASK, words)
    keys = (t.wide(ordered) << 32) | (t.splat(t.integer(_MASK)) - t.numbered(at))
    return t.select(is_here, keys, t.splat(t.integer(_LEAST)))


def counting_sort(e: Emitter, frame: Frame) -> None:
    """Emits the handler of `order_rows`. It is one thread's: 2,048 rows take less than the others need to begin."""
    groups, rows, places, starts = frame.argument(0), *(frame.result(number) for number in range(3))
    num_rows, num_starts = groups.size(0), starts.size(0)
    counts = e.call_c("malloc", num_starts * _WORD)  # of each group and of none, then the next place of each
    with e.loop(0, num_starts) as group:
        e.store_int(counts + group * _WORD, 0)
    with e.loop(0, num_rows) as row:
        count = counts + e.load_int(groups.data + row * _INT, 32) * _WORD
        e.store_int(count, e.load_int(count) + 1)
    before = e.variable(e.integer(0))
    with e.loop(0, num_starts) as group:
        count = e.load_int(counts + group * _WORD)
        e.store_int(starts.data + group * _INT, before.get(), 32)
        e.store_int(counts + group * _WORD, before.get())
        before.set(before.get() + count)
    with e.loop(0, num_rows) as row:
        following = counts + e.load_int(groups.data + row * _INT, 32) * _WORD
        place = e.load_int(following)
        e.store_int(following, place + 1)
        e.store_int(rows.data + place * _INT, row, 32)
        e.store_int(places.data + row * _INT, place, 32)
    e.call_c("free", counts)
