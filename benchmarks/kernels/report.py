"""Reports a run of `benchmarks.kernels`: the figures of each case, whether goals were met, a table and a record."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxvllm.bench.kernels.ceilings import Ceilings
from jaxvllm.bench.kernels.contender import LayerOutcome
from jaxvllm.bench.kernels.counts import Work
from pallas_kernels.ragged_paged_attention.cases import RaggedCase

# The goals of issue 3, for 32 query heads of 128.
DECODE_GOAL, DECODE_FROM_TOKENS = 0.90, 64 * 4096  # of the copy bandwidth, at so many tokens of context together
PREFILL_GOAL, PREFILL_FROM_TOKENS = 0.65, 2048  # of the matmul rate
GOAL_HEADS, GOAL_HEAD_SIZE = 32, 128


@dataclass(frozen=True)
class Goal:
    """A share of one measured ceiling to reach."""

    share: float
    ceiling: str  # "copy" or "matmul"

    @classmethod
    def of(cls, case: RaggedCase) -> "Goal | None":
        """Returns the goal of `case`, if it has one."""
        if (case.num_heads, case.head_size) != (GOAL_HEADS, GOAL_HEAD_SIZE) or case.kv_dtype is not None:
            return None
        context = sum(row.kv_len for row in case.rows)
        if case.is_decode and context >= DECODE_FROM_TOKENS:
            return cls(DECODE_GOAL, "copy")
        if case.name.startswith("prefill-") and context >= PREFILL_FROM_TOKENS:
            return cls(PREFILL_GOAL, "matmul")
        return None


@dataclass(frozen=True)
class CaseResult:
    """The outcomes of all contenders in one case, ours first."""

    case: RaggedCase
    work: Work
    ceilings: Ceilings
    outcomes: Mapping[str, LayerOutcome]

    def share(self, seconds: float, ceiling: str) -> float:
        """Returns the share of a ceiling that a layer's call reaches in `seconds`."""
        if ceiling == "copy":
            return self.work.bytes / seconds / self.ceilings.copy
        return self.work.flops / seconds / self.ceilings.matmul

    @property
    def ours(self) -> LayerOutcome:
        return next(iter(self.outcomes.values()))

    def verdict(self) -> str:
        """Returns, in a word or two, whether ours reached the goal of the case. It is empty without a goal."""
        goal = Goal.of(self.case)
        if goal is None:
            return ""
        if self.ours.timing is None:
            return "FAIL"
        share = self.share(self.ours.timing.median, goal.ceiling)
        return f"{'pass' if share >= goal.share else 'FAIL'} ({share:.0%} of {goal.ceiling}, goal {goal.share:.0%})"

    def line(self) -> str:
        """Returns one line for a person who watches. The table has the rest."""
        parts = []
        for name, outcome in self.outcomes.items():
            if outcome.timing is not None:
                error = "" if outcome.error is None else f", error {outcome.error:.1e}"
                parts.append(f"{name} {_microseconds(outcome)} us{error}")
            elif outcome is self.ours:
                parts.append(f"{name} FAILED: {outcome.problem}")
        return f"{self.case.name}: " + "; ".join(parts) + (f"; {verdict}" if (verdict := self.verdict()) else "")

    def record(self) -> dict[str, Any]:
        goal = Goal.of(self.case)
        return {
            "case": self.case.name,
            "bytes": self.work.bytes,
            "flops": self.work.flops,
            "binding_ceiling": self.ceilings.binding(self.work),
            "goal": None if goal is None else asdict(goal),
            "verdict": self.verdict(),
            "contenders": {name: self._contender_record(outcome) for name, outcome in self.outcomes.items()},
        }

    def _contender_record(self, outcome: LayerOutcome) -> dict[str, Any]:
        record: dict[str, Any] = {"error": outcome.error, "problem": outcome.problem} | dict(outcome.details)
        if outcome.timing is not None:
            seconds = outcome.timing.median
            record |= {
                "seconds_a_layer": outcome.timing.samples,
                "seconds_a_layer_median": seconds,
                "bytes_per_second": self.work.bytes / seconds,
                "flops_per_second": self.work.flops / seconds,
                "share_of_binding_ceiling": self.ceilings.seconds(self.work) / seconds,
            }
        return record


def _microseconds(outcome: LayerOutcome) -> str:
    """Returns median (range), with only the digits that mean something."""
    assert outcome.timing is not None
    values = [1e6 * seconds for seconds in (outcome.timing.median, outcome.timing.best, outcome.timing.worst)]
    median, best, worst = (np.format_float_positional(v, 4, fractional=False, trim="-") for v in values)
    return f"{median} ({best}-{worst})"


def markdown(results: Sequence[CaseResult]) -> str:
    """Returns a table with a row for each case: ours in full, others by their times. Failures and reasons follow."""
    if not results:
        return "no case was measured"
    names = list(results[0].outcomes)
    timed = [name for name in names[1:] if any(result.outcomes[name].timing for result in results)]
    head = ["case", f"{names[0]}, us a layer", "GB/s", "TFLOP/s", "of the ceiling", "goal"]
    head += [f"{name}, us" for name in timed]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for result in results:
        others = [result.outcomes[name] for name in timed]
        cells = [result.case.name, *_own_cells(result), result.verdict()]
        cells += [_microseconds(outcome) if outcome.timing else "-" for outcome in others]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *_problems(results)])


def _own_cells(result: CaseResult) -> list[str]:
    timing = result.ours.timing
    if timing is None:
        return ["FAILED", "", "", ""]
    seconds, work = timing.median, result.work
    share = result.ceilings.seconds(work) / seconds
    return [
        _microseconds(result.ours),
        f"{work.bytes / seconds / 1e9:.4g}",
        f"{work.flops / seconds / 1e12:.3g}",
        f"{share:.0%} of {result.ceilings.binding(work)}",
    ]


def _problems(results: Sequence[CaseResult]) -> Iterator[str]:
    """Yields one line for each contender and reason, with the cases that it concerns."""
    cases: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for name, outcome in result.outcomes.items():
            if outcome.problem is not None:
                cases.setdefault((name, outcome.problem), []).append(result.case.name)
    for (name, problem), where in cases.items():
        which = "every case" if len(where) == len(results) else ", ".join(where)
        yield f"- {name}, {which}: {problem}"
