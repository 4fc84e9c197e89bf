"""The figures of a rung, and what changed from one rung to the next."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean, median

import numpy as np

from jaxvllm.bench.ladder.run import RungRun
from jaxvllm.bench.ladder.rung import Rung

# A change that is smaller, or smaller than the runs of either rung differ, is none.
LEAST_CHANGE = 1.1
# From so many runs on, the lowest and the highest of a rung do not count: something else had the machine, or nothing.
ENOUGH_TO_TRIM = 4


@dataclass(frozen=True)
class Figure:
    """Something to measure of a run."""

    name: str  # in JSON
    label: str  # for people
    unit: str  # of what is shown
    scale: float  # of what is shown
    is_better_high: bool
    of: Callable[[RungRun], float | None]  # None: the run has none
    least: float = 0.0  # a difference that is smaller means nothing

    def text(self, value: float | None) -> str:
        """Returns a value as it is shown, with its unit."""
        if value is None:
            return "-"
        shown = value * self.scale
        if self.unit == "ms" and shown >= 1000:
            return f"{shown / 1000:.1f} s"
        digits = 1 if self.unit == "ms" and shown < 99.95 else 0
        return f"{shown:,.{digits}f}{'%' if self.unit == '%' else f' {self.unit}' if self.unit else ''}"


TOKENS_PER_SECOND = Figure("tokens_per_second", "tokens per second", "", 1, True, lambda run: run.tokens_per_second)
FIRST_TOKEN = Figure(
    "ttft_seconds", "time to first token", "ms", 1e3, False, lambda run: fmean(run.times_to_first_token)
)
GAP = Figure("itl_seconds", "time between tokens", "ms", 1e3, False, lambda run: _mean(run.gaps))
LONG_GAP = Figure(
    "itl_p99_seconds",
    "... 99th percentile",
    "ms",
    1e3,
    False,
    lambda run: float(np.percentile(run.gaps, 99)) if run.gaps else 0.0,
)
WASTED = Figure("wasted_kv", "KV memory wasted", "%", 100, False, lambda run: run.wasted, least=0.1)
STEPS = Figure("planned_steps", "steps planned", "", 1, False, lambda run: float(run.num_calls))
FIGURES = (TOKENS_PER_SECOND, FIRST_TOKEN, GAP, LONG_GAP, WASTED, STEPS)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


class Verdict(Enum):
    """The meaning of a change of a figure."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"  # as far as these runs can tell


@dataclass(frozen=True)
class Change:
    """A figure beside that of the rung below."""

    factor: float  # of the value below
    verdict: Verdict

    @property
    def text(self) -> str:
        """Returns how many times as much it is, or as little."""
        if self.verdict is Verdict.SAME:
            return "≈"
        larger = self.factor >= 1
        times = self.factor if larger else 1 / self.factor
        return f"{'×' if larger else '÷'}{times:.{0 if times >= 9.95 else 1}f}"


@dataclass(frozen=True)
class MeasuredRung:
    """The runs of a rung that count."""

    rung: Rung
    runs: tuple[RungRun, ...]

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError(f"the rung {self.rung.name} has no run")

    def values(self, figure: Figure) -> list[float]:
        """Returns the figure of each run, or nothing where runs have none."""
        return [value for value in map(figure.of, self.runs) if value is not None]

    def range(self, figure: Figure) -> tuple[float, float] | None:
        """Returns between which values the runs are; of many runs, all but the lowest and the highest."""
        values = sorted(self.values(figure))
        if len(values) >= ENOUGH_TO_TRIM:
            values = values[1:-1]
        return (values[0], values[-1]) if values else None

    def value(self, figure: Figure) -> float | None:
        """Returns the median of the runs."""
        values = self.values(figure)
        return median(values) if values else None

    @property
    def most_running(self) -> int:
        return max(run.most_running for run in self.runs)

    def change(self, below: "MeasuredRung", figure: Figure) -> Change | None:
        """Returns how the figure changed from the rung `below`; None where one of them has none.

        It is a change if the ranges of the two do not meet, and the medians differ by a tenth.
        """
        here, there = self.range(figure), below.range(figure)
        value, before = self.value(figure), below.value(figure)
        if here is None or there is None or not value or not before:
            return None
        factor = value / before
        is_clear = max(factor, 1 / factor) >= LEAST_CHANGE and abs(value - before) >= figure.least
        if not is_clear or (here[0] <= there[1] and there[0] <= here[1]):
            return Change(factor, Verdict.SAME)
        return Change(factor, Verdict.BETTER if (factor > 1) == figure.is_better_high else Verdict.WORSE)
