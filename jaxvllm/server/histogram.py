"""Counts of values by upper bound, as Prometheus reads them, and the bounds that vLLM's dashboards expect."""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client.utils import floatToGoString


def _one_two_five(first: int, last: int) -> tuple[float, ...]:
    return tuple(float(f"{factor}e{power}") for power in range(first, last) for factor in (1, 2, 5))


# From vllm/v1/metrics/buckets.py. Seconds, unless the name says otherwise.
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COMPLETIONS = (1, 2, 5, 10, 20)
# vLLM's series ends at the model's length, and is shown up to there: see `Histogram.buckets`.
REQUEST_TOKENS = _one_two_five(0, 8)
# Ours: planning a step takes 0.1 ms at best, and a step that waits for a compiler takes seconds.
STEP_SECONDS = _one_two_five(-4, 1)


class Histogram:
    """How many values were at most each bound, and their sum.

    Without the locks of prometheus_client's own, since the whole server is one event loop: 0.2 us a value instead of 1,
    and a request that ends brings twelve.
    """

    def __init__(self, name: str, documentation: str, bounds: Iterable[float]):
        self.name = name
        self.documentation = documentation
        self.sum = 0.0
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Counts `value`, as often as it was seen."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def buckets(self, limit: float = float("inf")) -> list[tuple[str, float]]:
        """(bound as Prometheus writes it, number of values up to there): the bounds up to `limit`, then infinity."""
        upper = [*(bound for bound in self._bounds if bound <= limit), float("inf")]
        counts = [*accumulate(self._counts)]
        return list(zip(map(floatToGoString, upper), [*counts[: len(upper) - 1], counts[-1]], strict=True))
