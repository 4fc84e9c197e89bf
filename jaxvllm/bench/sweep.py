"""Runs one benchmark at several loads."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxvllm.bench.benchmark import Benchmark
from jaxvllm.bench.report import BenchRun
from jaxvllm.bench.traffic import Traffic
from jaxvllm.client.api import Api

COLUMNS = ("load", "req/s", "tok/s", "TTFT median", "TTFT P99", "TPOT median", "TPOT P99", "failed")


@dataclass(frozen=True)
class Point:
    """The run at one load, and its name: `4 req/s` or `16 at a time`."""

    name: str
    run: BenchRun

    def row(self) -> str:
        """Returns the point as a line under `heading`. Times are in milliseconds."""
        summary = self.run.summary
        ttft, tpot = summary.latencies["ttft"], summary.latencies["tpot"]
        figures = (summary.request_throughput, summary.output_throughput, ttft.median, ttft.percentiles[99.0])
        rest = (tpot.median, tpot.percentiles[99.0])
        cells = [f"{figure:.2f}" for figure in (*figures, *rest)]
        return " ".join(f"{cell:>12}" for cell in (self.name, *cells, summary.failed))


def heading() -> str:
    return " ".join(f"{column:>12}" for column in COLUMNS)


def loads(traffic: Traffic, rates: Sequence[float], concurrencies: Sequence[int]) -> list[tuple[str, Traffic]]:
    """Returns each point's name and traffic. Raises ValueError unless exactly one of the two lists has entries."""
    if bool(rates) == bool(concurrencies):
        raise ValueError("give one of --request-rates and --max-concurrencies, such as --max-concurrencies 1 4 16")
    if rates:
        return [(f"{rate:g} req/s", replace(traffic, request_rate=rate)) for rate in rates]
    return [(f"{most} at a time", replace(traffic, max_concurrency=most)) for most in concurrencies]


def sweep(benchmark: Benchmark, api: Api, points: Sequence[tuple[str, Traffic]], output: Path) -> Iterator[Point]:
    """Runs each point and writes its line to `output` at once, so that a stopped sweep keeps its earlier points.

    Each point has a different seed, because the server's prefix cache would have the prompts of the point before. The
    results always include the 99th percentile, which the rows show.
    """
    percentiles = sorted({*benchmark.percentiles, 99.0})
    with output.open("w", encoding="utf-8") as file:
        for index, (name, traffic) in enumerate(points):
            seed = benchmark.seed + index
            run = replace(benchmark, traffic=traffic, percentiles=percentiles, seed=seed).run(api)
            line: dict[str, Any] = {"model_id": benchmark.target.model, "seed": seed}
            line |= {"num_prompts": traffic.num_prompts, **run.figures()}
            file.write(json.dumps(line) + "\n")
            file.flush()
            yield Point(name, run)
