"""Searches the options of an engine with which it takes the most requests in a second and still keeps its promises."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from jaxvllm.bench.summary import Goodput, Summary
from jaxvllm.core.scheduler import check_token_budget
from jaxvllm.simulator.simulation import Simulation
from jaxvllm.simulator.workload import Workload

# Halvings of the range of rates, after which the rate is known to 1% of the most that the engine can do.
_HALVINGS = 8
PERCENTILES = (50.0, 99.0)


@dataclass(frozen=True)
class Promise:
    """The promise of a service: so large a share of the requests keeps all limits."""

    goodput: Goodput
    attainment: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.attainment <= 1:
            raise ValueError(f"--attainment must be above 0 and at most 1, not {self.attainment}")

    def is_kept(self, summary: Summary) -> bool:
        return good_share(summary) >= self.attainment


def good_share(summary: Summary) -> float:
    """Returns the share of all requests that were within the limits."""
    assert summary.good is not None, "the summary was made without limits"
    return summary.good / (summary.completed + summary.failed)


@dataclass(frozen=True)
class Options:
    """The options that are searched.

    `pools` counts replicas that compute prompts and that decode; None: all do both.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    pools: tuple[int, int] | None = None

    def __str__(self) -> str:
        pools = "" if self.pools is None else f", pools {self.pools[0]}+{self.pools[1]}"
        return f"max_num_seqs {self.max_num_seqs}, max_num_batched_tokens {self.max_num_batched_tokens}{pools}"


@dataclass(frozen=True)
class Tuned:
    """The highest rate at which an engine with these options kept the promise, in requests per second, and its figures.

    The rate is 0 where it keeps the promise at no rate.
    """

    options: Options
    rate: float
    summary: Summary


def all_options(
    seqs: Iterable[int], tokens: Iterable[int], pools: Sequence[tuple[int, int] | None]
) -> Iterator[Options]:
    """Yields every combination that an engine takes: a step must have a token for each request that runs."""
    for num_seqs, num_tokens, pool in itertools.product(seqs, tokens, pools):
        try:
            check_token_budget(num_tokens, num_seqs)
        except ValueError:
            continue
        yield Options(num_seqs, num_tokens, pool)


def tune(
    options: Iterable[Options],
    simulation_of: Callable[[Options], Simulation],
    workload: Workload,
    promise: Promise,
    tell: Callable[[Tuned], object],
) -> list[Tuned]:
    """Simulates `workload` at several rates with each of `options`, and returns the results, the best first.

    `tell` gets each result at once.
    """
    found = []
    for one in options:
        tuned = best_rate(one, simulation_of(one), workload, promise)
        tell(tuned)
        found.append(tuned)
    return sorted(found, key=lambda tuned: tuned.rate, reverse=True)


def best_rate(options: Options, simulation: Simulation, workload: Workload, promise: Promise) -> Tuned:
    """Searches the highest rate at which `simulation` keeps the promise. Raises ValueError if no request can run."""
    count = workload.traffic.num_prompts

    def at(rate: float) -> Summary:
        result = simulation.run(workload.at_rate(rate, count))
        result.check_served()
        return result.ledger.summary(PERCENTILES, promise.goodput)

    everything = at(math.inf)
    if promise.is_kept(everything):
        return Tuned(options, everything.request_throughput, everything)
    # In a short run many of the requests are those of its end, when fewer and fewer run: it can do more than this.
    low, high, best = 0.0, 2 * everything.request_throughput, None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        summary = at(middle)
        if promise.is_kept(summary):
            low, best = middle, summary
        else:
            high = middle
    return Tuned(options, low, everything if best is None else best)


def row(tuned: Tuned, measured: Summary | None = None) -> str:
    """Returns a line under `heading`: the simulated figures, and those of a real run after them if there was one."""
    cells = [str(tuned.options.max_num_seqs), str(tuned.options.max_num_batched_tokens)]
    cells.append("-" if tuned.options.pools is None else "{}+{}".format(*tuned.options.pools))
    cells.append(f"{tuned.rate:.2f}")
    for summary in (tuned.summary, measured):
        if summary is not None:
            latencies = [summary.latencies[name].percentiles[99.0] for name in ("ttft", "tpot")]
            cells += [f"{100 * good_share(summary):.1f}", *(f"{value:.1f}" for value in latencies)]
    return " ".join(f"{cell:>10}" for cell in cells)


def heading(is_measured: bool = False) -> str:
    cells = ["seqs", "tokens", "pools", "req/s"]
    for kind in ("sim", "real")[: 1 + is_measured]:
        cells += [f"{kind} good%", "TTFT P99", "TPOT P99"]
    return " ".join(f"{cell:>10}" for cell in cells)
