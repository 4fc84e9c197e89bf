"""Work on all of XLA's threads: a loop whose turns any thread takes, the calling one too."""

from collections.abc import Callable, Sequence

from llvmlite import ir

from pallas_kernels.cpu.emit import Emitter
from pallas_kernels.cpu.frame import NUM_THREADS, SCHEDULE, Frame
from pallas_kernels.cpu.values import Value

_WORD = 8
_LINE = 8  # words of a line of a cache
# The state that all threads share, in words; what the body needs follows, and then a counter for each run.
_NEXT, _DONE, _HOLDERS, _COUNT, _THREADS, _CAPTURED = range(6)
# How often a thread looks whether the others are done before it lets the system run something else.
SPINS = 2000

Body = Callable[[Emitter, Value, Sequence[Value]], None]


def parallel_loop(e: Emitter, frame: Frame, count: Value, captured: Sequence[Value], body: Body) -> None:
    """Emits a loop over `count` items, which ends when all are done; `body(emitter, item, captured)` emits an item.

    A thread that is free takes the next item, so items of unequal size balance. The caller waits only for items that
    some thread has taken, so it makes progress even if no other thread ever comes. A thread that comes late finds
    nothing to do and touches nothing but the state, which the last holder frees.
    """
    _loop(e, frame, count, captured, _take(e, len(captured), body))


def parallel_runs(e: Emitter, frame: Frame, count: Value, captured: Sequence[Value], body: Body) -> None:
    """Emits the same for items that lie in memory one after another, of which each thread has a run of its own.

    So a thread reads memory from one end to the other, and what fetches in advance is right about the next item, too.
    A thread that has done its run takes items of the next one.
    """
    _loop(e, frame, count, captured, _take_runs(e, len(captured), body))


def _loop(e: Emitter, frame: Frame, count: Value, captured: Sequence[Value], take: ir.Function) -> None:
    threads = e.max(e.min(num_threads(e, frame), count), e.integer(1))
    counters = _CAPTURED + len(captured)
    state = e.call_c("malloc", (threads * _LINE + counters) * _WORD)
    for number, word in enumerate((e.integer(0), e.integer(0), threads, count, threads, *captured)):
        e.store_int(state + number * _WORD, word)
    with e.loop(0, threads) as run:
        e.store_int(state + (run * _LINE + counters) * _WORD, 0)
    with e.loop(1, threads):
        _schedule(e, frame, e.address_of(_help(e, take)), state)
    e.call(take, state)
    spins = e.variable(e.integer(0))
    with e.forever() as end_when:
        end_when(e.fetch_add(state + _DONE * _WORD, 0).equals(count))
        spins.set(spins.get() + 1)
        e.relax()
        with e.when(spins.get() > SPINS):
            e.call_c("sched_yield")
    _let_go(e, state)


def _take(e: Emitter, num_captured: int, body: Body) -> ir.Function:
    """Emits a function that takes items until there are none."""
    t = e.function("take", 1)
    state = t.arguments[0]
    count = t.load_int(state + _COUNT * _WORD)
    captured = [t.load_int(state + (_CAPTURED + number) * _WORD) for number in range(num_captured)]
    with t.forever() as end_when:
        item = t.fetch_add(state + _NEXT * _WORD, 1)
        end_when(item >= count)
        body(t, item, captured)
        t.fetch_add(state + _DONE * _WORD, 1)
    return t.finish()


def _take_runs(e: Emitter, num_captured: int, body: Body) -> ir.Function:
    """Emits a function that takes items of one run after another, and begins with one that no other thread does."""
    t = e.function("take_runs", 1)
    state = t.arguments[0]
    count, threads = (t.load_int(state + word * _WORD) for word in (_COUNT, _THREADS))
    captured = [t.load_int(state + (_CAPTURED + number) * _WORD) for number in range(num_captured)]
    first = t.fetch_add(state + _NEXT * _WORD, 1)
    with t.loop(first, first + threads) as number:
        run = number % threads
        begin, end = run * count // threads, (run + 1) * count // threads
        counter = state + (run * _LINE + (_CAPTURED + num_captured)) * _WORD
        with t.forever() as end_when:
            item = begin + t.fetch_add(counter, 1)
            end_when(item >= end)
            body(t, item, captured)
            t.fetch_add(state + _DONE * _WORD, 1)
    return t.finish()


def _help(e: Emitter, take: ir.Function) -> ir.Function:
    """Emits what another thread runs."""
    h = e.function("help", 1)
    h.call(take, h.arguments[0])
    _let_go(h, h.arguments[0])
    return h.finish()


def _let_go(e: Emitter, state: Value) -> None:
    with e.when(e.fetch_add(state + _HOLDERS * _WORD, -1).equals(1)):
        e.call_c("free", state)


def num_threads(e: Emitter, frame: Frame) -> Value:
    """Returns the number of XLA's threads."""
    answer, arguments = e.words(1), e.words(4)
    e.store_int(answer, 1)
    for number, word in enumerate((e.integer(4 * _WORD), e.integer(0), frame.context, answer)):
        e.store_int(arguments + number * _WORD, word)
    e.call_address(frame.function(NUM_THREADS), arguments)
    return e.load_int(answer)


def _schedule(e: Emitter, frame: Frame, task: Value, state: Value) -> None:
    arguments = e.words(5)
    for number, word in enumerate((e.integer(5 * _WORD), e.integer(0), frame.context, task, state)):
        e.store_int(arguments + number * _WORD, word)
    e.call_address(frame.function(SCHEDULE), arguments)
