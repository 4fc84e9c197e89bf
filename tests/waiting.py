"""How tests wait: for what must happen, and not for a time in which it should have."""

import asyncio
import selectors
import time
from collections.abc import Callable

# Seconds after which a test gives up: only a hang takes as long. The longest test took 393 s at a load of 15 on 2 cores
# (tests/runtime/multihost/test_two_processes.py). pytest's own timeout (pyproject.toml) is longer, so that a test that
# gives up says what it was waiting for.
PATIENCE = 600.0
# Between two looks at a condition.
PAUSE = 0.01


def wait_until[T](condition: Callable[[], T], missing: Callable[[], object] = lambda: "it never became true") -> T:
    """Returns the first true value of `condition`. AssertionError with `missing()` when there is none."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, missing()
        time.sleep(PAUSE)
    return found


async def until(condition: Callable[[], object]) -> None:
    """The same in an event loop. TimeoutError when the condition does not become true."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(PAUSE)


class IdleClockLoop(asyncio.SelectorEventLoop):
    """An event loop in which time passes only while nothing else happens: a slow machine misses no deadline.

    When no handle is ready and no socket has news, the clock jumps to the next timer. So an hour of sleep takes no
    time, and everything that one loop serves, both ends of its connections for instance, sees the same clock. What
    other threads and processes do counts as nothing: do not wait for them here.
    """

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_IdleSelector(self))

    def time(self) -> float:
        return self.now


class _IdleSelector(selectors.DefaultSelector):
    """Turns waiting into a jump of the clock. The kernel gets a moment to deliver what is on its way, in real time."""

    MOMENT = 0.005

    def __init__(self, loop: IdleClockLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not timeout or timeout <= 0:
            return super().select(timeout)
        events = super().select(min(timeout, self.MOMENT))
        if not events:
            self._loop.now += timeout
        return events
