"""How long a call takes on a device: warmed up, many times, with the host out of the way."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax

SAMPLES = 11
# A sample is as many calls as this takes, dispatched back to back and waited for once: the device is never idle while
# the host prepares the next call, and what the host's clock and the wait cost (0.1 ms) is below a percent.
SAMPLE_SECONDS = 0.03
MAX_CALLS = 200


@dataclass(frozen=True)
class Timing:
    """Seconds of one unit (a layer's call, a copy), one figure a sample."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def best(self) -> float:
        return min(self.samples)

    @property
    def worst(self) -> float:
        return max(self.samples)


class TooSlow(Exception):
    """One call took longer than the caller wants to repeat. `seconds` is what it took."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"one call took {seconds:.2f} s")
        self.seconds = seconds


def time_calls(call: Callable[[], jax.Array], units: int, max_call_seconds: float = math.inf) -> Timing:
    """Seconds a unit of `call`, which dispatches `units` of them and returns the array to wait for.

    The first call warms up and the second says how many make a sample. TooSlow: one takes over `max_call_seconds`.
    """
    first = _seconds(call, 1)
    # Far above the limit, a warm one will be above it too.
    one = first if first > 4 * max_call_seconds else _seconds(call, 1)
    if one > max_call_seconds:
        raise TooSlow(one)
    calls = max(1, min(MAX_CALLS, math.ceil(SAMPLE_SECONDS / one)))
    return Timing(tuple(_seconds(call, calls) / (calls * units) for _ in range(SAMPLES)))


def _seconds(call: Callable[[], jax.Array], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        pending = call()
    pending.block_until_ready()
    return time.perf_counter() - start
