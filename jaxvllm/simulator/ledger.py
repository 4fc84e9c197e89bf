"""`Ledger`: the times of all requests of a run, simulated or real, and the figures that follow."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxvllm.bench.summary import LATENCIES, Goodput, Latency, Summary

# Times between tokens are counted in bins that are 0.2% wide, from a nanosecond to a day: a percentile is at most that
# far off, and 128 million of them take no memory.
_RATIO = 1.002
_LEAST = 1e-9
_BINS = math.ceil(math.log(1e5 / _LEAST) / math.log(_RATIO))
_PENDING = 1 << 16  # gaps that are counted at once


class Ledger:
    """Takes down when each request arrived and got its tokens. Requests have numbers, in the order of their arrival."""

    def __init__(self, count: int):
        self._arrived = np.full(count, np.nan)
        self._first = np.full(count, np.nan)
        self._last = np.full(count, np.nan)  # when its latest tokens came
        self._ended = np.zeros(count, np.bool_)
        self._num_prompt = np.zeros(count, np.int64)
        self._num_output = np.zeros(count, np.int64)
        self._gaps = np.zeros(_BINS, np.int64)
        self._gap_sums = np.zeros(2)  # of the gaps and of their squares
        self._pending: list[tuple[NDArray[np.float64], int]] = []  # gaps, and how many requests had each
        self._num_pending = 0
        self._per_second = np.zeros(64)

    @property
    def num_arrived(self) -> int:
        return int((~np.isnan(self._arrived)).sum())

    @property
    def num_ended(self) -> int:
        return int(self._ended.sum())

    def arrive(self, number: int, at: float, num_prompt: int, num_output: int) -> None:
        self._arrived[number] = at
        self._num_prompt[number] = num_prompt
        self._num_output[number] = num_output

    def take(self, numbers: NDArray[np.int64], times: NDArray[np.float64], num_tokens: int) -> None:
        """Takes down that each of the requests `numbers` got tokens at each of `times`, `num_tokens` all together."""
        before = self._last[numbers]
        is_first = np.isnan(before)
        if np.count_nonzero(is_first):
            self._first[numbers[is_first]] = times[0]
            before = before[~is_first]
        if len(before):
            self._count(times[0] - before, 1)
        if len(times) > 1:
            self._count(np.diff(times), len(numbers))
        self._last[numbers] = times[-1]
        self._count_tokens(times, num_tokens)

    def end(self, number: int) -> None:
        self._ended[number] = True

    def last(self, number: int) -> float:
        """Returns the second at which the latest tokens of a request came."""
        return float(self._last[number])

    def summary(self, percentiles: Sequence[float], goodput: Goodput | None = None) -> Summary:
        """Returns the figures under vLLM's names. Requests that did not end count as failed."""
        done = self._ended
        start = np.nanmin(self._arrived) if self.num_arrived else 0.0
        ttft, latency = (self._first - self._arrived)[done], (self._last - self._arrived)[done]
        rest = self._num_output[done] - 1
        has_rest = rest > 0
        tpot = (latency - ttft)[has_rest] / rest[has_rest]
        waited = np.zeros(len(ttft))
        seconds = {
            "ttft": ttft,
            "tpot": tpot,
            "e2el": latency,
            "client_queue_time": waited,
            "e2el_including_client_queue": latency,
        }
        latencies = {name: Latency.of(values.tolist(), percentiles) for name, values in seconds.items()}
        latencies["itl"] = self._gap_latency(percentiles)
        good = None
        if goodput is not None:
            tpots = np.zeros(len(ttft))
            tpots[has_rest] = tpot
            values = {"ttft": ttft, "tpot": tpots, "e2el": latency}
            met = [values[name] * 1000 <= limit for name, limit in goodput.limits.items()]
            good = int(np.logical_and.reduce(met).sum())
        return Summary(
            completed=int(done.sum()),
            failed=self.num_arrived - int(done.sum()),
            duration=float(np.nanmax(self._last) - start) if done.any() else 0.0,
            total_input=int(self._num_prompt[done].sum()),
            total_output=int(self._num_output[done].sum()),
            good=good,
            peak_output_tokens=float(self._per_second.max()),
            peak_concurrency=self._peak_concurrency(),
            latencies={name: latencies[name] for name in LATENCIES},
        )

    def ttfts(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns the arrivals of the requests that ended, and their times to the first token, f64[ended] each."""
        return self._arrived[self._ended], (self._first - self._arrived)[self._ended]

    def _count(self, gaps: NDArray[np.float64], count: int) -> None:
        self._pending.append((gaps, count))
        self._num_pending += len(gaps)
        if self._num_pending >= _PENDING:
            self._count_pending()

    def _count_pending(self) -> None:
        if not self._pending:
            return
        gaps = np.concatenate([gaps for gaps, _ in self._pending])
        counts = np.repeat([count for _, count in self._pending], [len(gaps) for gaps, _ in self._pending])
        self._pending.clear()
        self._num_pending = 0
        bins = np.log(np.maximum(gaps, _LEAST) / _LEAST) / math.log(_RATIO)
        np.add.at(self._gaps, np.minimum(bins.astype(np.int64), _BINS - 1), counts)
        self._gap_sums += (float((gaps * counts).sum()), float((gaps * gaps * counts).sum()))

    def _gap_latency(self, percentiles: Sequence[float]) -> Latency:
        self._count_pending()
        total = int(self._gaps.sum())
        if not total:
            return Latency.of([], percentiles)
        mean, square = self._gap_sums / total
        below = np.cumsum(self._gaps)

        def at(percentile: float) -> float:
            bin_ = int(np.searchsorted(below, max(percentile / 100 * total, 1)))
            return float(1000 * _LEAST * _RATIO ** (bin_ + 0.5))

        std = math.sqrt(max(square - mean * mean, 0.0))
        return Latency(1000 * float(mean), at(50), 1000 * std, {p: at(p) for p in percentiles})

    def _count_tokens(self, times: NDArray[np.float64], num_tokens: int) -> None:
        last = int(times[-1])
        if last >= len(self._per_second):
            self._per_second = np.concatenate([self._per_second, np.zeros(max(last, 64))])
        if len(times) == 1:
            self._per_second[last] += num_tokens
        else:
            np.add.at(self._per_second, times.astype(np.int64), num_tokens / len(times))

    def _peak_concurrency(self) -> int:
        """Returns the most simultaneous requests. One that ends just as another begins does not overlap with it."""
        begins, ends = np.sort(self._arrived[self._ended]), np.sort(self._last[self._ended])
        if not len(begins):
            return 0
        return int((np.arange(1, len(begins) + 1) - np.searchsorted(ends, begins, side="right")).max())
