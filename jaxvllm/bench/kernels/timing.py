"""Measures how long a call takes on a device: warmed up, many times, without waiting for the host."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax

SAMPLES = 11
# A sample is as many calls as take this long, dispatched back to back and waited for once. The device is never idle
# while the host prepares the next call, and the cost of the host's clock and the wait (0.1 ms) is below a percent.
SAMPLE_SECONDS = 0.03
MAX_CALLS = 200


@dataclass(frozen=True)
class Timing:
    """The seconds of one unit (a layer's call, a copy), with one figure for each sample."""

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
    """Raised when one call took longer than the caller wants to repeat. `seconds` is its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"one call took {seconds:.2f} s")
        self.seconds = seconds


def time_calls(call: Callable[[], jax.Array], units: int, max_call_seconds: float = math.inf) -> Timing:
    """Times a unit of `call`, which dispatches `units` of them and returns the array to wait for.

    The first call warms up, and the second decides how many make a sample. Raises TooSlow if one takes longer than
    `max_call_seconds`.
    """
    first = _seconds(call, 1)
    # If the cold call is far above the limit, a warm one will be above it too.
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
