"""Computes the results of `vllm bench serve` from records, by the same formulas."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxvllm.bench.load import LoadOutcome
from jaxvllm.bench.recording import Record

# The latencies in the order of the table: the name in JSON, the short name and the headline.
LATENCIES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
}


@dataclass(frozen=True)
class Goodput:
    """Service level objectives: milliseconds by name of the latency. A request that meets all of them is good."""

    limits: Mapping[str, float]

    NAMES = ("ttft", "tpot", "e2el")

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Goodput":
        """Parses words such as `ttft:100` and `tpot:50`."""
        limits = {}
        for word in words:
            name, _, text = word.partition(":")
            try:
                limits[name] = float(text)
            except ValueError:
                limits[name] = -1.0
            if name not in cls.NAMES or not limits[name] >= 0:
                raise ValueError(f"--goodput takes NAME:MILLISECONDS with a name of {', '.join(cls.NAMES)}, not {word}")
        return cls(limits)

    def is_met(self, record: Record) -> bool:
        """Returns whether a request meets all objectives. With one token it has no TPOT, and meets any for it."""
        seconds = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
        return all(seconds[name] * 1000 <= limit for name, limit in self.limits.items())


@dataclass(frozen=True)
class Latency:
    """The distribution of one latency in milliseconds. All values are zero when nothing was measured."""

    mean: float
    median: float
    std: float
    percentiles: Mapping[float, float]

    @classmethod
    def of(cls, seconds: Sequence[float], percentiles: Sequence[float]) -> "Latency":
        values = np.asarray(seconds or [0.0]) * 1000
        wanted = {p: float(np.percentile(values, p)) for p in percentiles}
        return cls(float(values.mean()), float(np.median(values)), float(values.std()), wanted)


@dataclass(frozen=True)
class Summary:
    """The results of a run. Failed requests are only counted."""

    completed: int
    failed: int
    duration: float  # seconds
    total_input: int  # tokens
    total_output: int
    good: int | None  # requests within the objectives; None without any
    peak_output_tokens: float  # in the best second
    peak_concurrency: int
    latencies: Mapping[str, Latency]

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration

    @property
    def request_goodput(self) -> float | None:
        return None if self.good is None else self.good / self.duration

    @property
    def output_throughput(self) -> float:
        return self.total_output / self.duration

    @property
    def total_token_throughput(self) -> float:
        return (self.total_input + self.total_output) / self.duration


def measure(outcome: LoadOutcome, percentiles: Sequence[float], goodput: Goodput | None = None) -> Summary:
    """Computes the results of a run."""
    done = [record for record in outcome.records if record.succeeded]
    seconds: dict[str, list[float]] = {
        "ttft": [record.ttft for record in done],
        "tpot": [record.tpot for record in done if record.tpot is not None],
        "itl": [gap for record in done for gap in record.itl],
        "e2el": [record.latency for record in done],
        "client_queue_time": [record.queued for record in done],
        "e2el_including_client_queue": [record.queued + record.latency for record in done],
    }
    return Summary(
        completed=len(done),
        failed=len(outcome.records) - len(done),
        duration=outcome.duration,
        total_input=sum(record.num_prompt_tokens for record in done),
        total_output=sum(record.num_output_tokens for record in done),
        good=None if goodput is None else sum(map(goodput.is_met, done)),
        peak_output_tokens=_peak_output_tokens(done),
        peak_concurrency=_peak_concurrency(done),
        latencies={name: Latency.of(values, percentiles) for name, values in seconds.items()},
    )


def _peak_output_tokens(records: Sequence[Record]) -> float:
    """Returns the most tokens in a second of the run. A request's tokens are divided evenly among its chunks.

    vLLM counts chunks, which is the same if each chunk is one token.
    """
    if not records:
        return 0.0
    times = [np.cumsum([record.start + record.ttft, *record.itl]) for record in records]
    shares = [
        np.full(len(chunks), record.num_output_tokens / len(chunks))
        for record, chunks in zip(records, times, strict=True)
    ]
    since = np.concatenate(times) - min(record.start for record in records)
    return float(np.bincount(since.astype(int), weights=np.concatenate(shares)).max())


def _peak_concurrency(records: Sequence[Record]) -> int:
    """Returns the most simultaneous requests. One that ends just as another begins does not overlap with it."""
    changes = [(record.start, 1) for record in records] + [(record.start + record.latency, -1) for record in records]
    running = peak = 0
    for _, change in sorted(changes):
        running += change
        peak = max(peak, running)
    return peak
