"""Tells the figures of a ladder: a table for people, and a record for JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from jaxvllm.bench.ladder.figures import FIGURES, TOKENS_PER_SECOND, Verdict
from jaxvllm.bench.ladder.measure import Ladder

HEADS = ("tok/s", "TTFT", "ITL", "ITL p99", "KV wasted", "steps")
_COLUMN = 16


def heading(ladder: Ladder) -> str:
    """Returns what was done, in a line."""
    return (
        f"The same {ladder.options.requests} requests on every rung, {ladder.num_prompt_tokens:,} prompt tokens and "
        f"{ladder.num_output_tokens:,} output tokens, on {ladder.device}. Every rung gave the same tokens."
    )


def lines(ladder: Ladder) -> list[str]:
    """Returns the table, what each rung is, and why some brought little here."""
    width = max(len(measured.rung.name) for measured in ladder.rungs)
    table = [f"{'rung':{width}}" + "".join(f"{head:>{_COLUMN}}" for head in (*HEADS, "at once"))]
    for place, measured in enumerate(ladder.rungs):
        cells = []
        for figure in FIGURES:
            change = measured.change(ladder.rungs[place - 1], figure) if place else None
            cells.append(f"{figure.text(measured.value(figure))} {'' if change is None else change.text:>5}")
        cells.append(str(measured.most_running))
        table.append(f"{measured.rung.name:{width}}" + "".join(f"{cell:>{_COLUMN}}" for cell in cells))
    return [
        heading(ladder),
        "",
        *table,
        "",
        "× and ÷: beside the rung above; ≈: the runs do not tell a difference. Figures are medians of runs.",
        "TTFT: time to first token, mean. ITL: time between tokens, mean and 99th percentile.",
        "KV wasted: the share of the KV memory that requests had taken and that held no token.",
        "steps: planned by the host. at once: the most requests that ran.",
        "",
        *(f"{measured.rung.name:{width}}  {measured.rung.idea} ({measured.rung.source})" for measured in ladder.rungs),
        "",
        *(f"{name:{width}}  not clearly faster here. {why}" for name, why in slow(ladder)),
        f"{ladder.seconds:.0f} s in all, {ladder.start_seconds:.0f} s of them to compile or load programs.",
    ]


def slow(ladder: Ladder) -> Iterator[tuple[str, str]]:
    """Yields the rungs that gave no more tokens per second than the one below, and when such an idea brings little."""
    for below, measured in zip(ladder.rungs, ladder.rungs[1:], strict=False):
        change = measured.change(below, TOKENS_PER_SECOND)
        if change is not None and change.verdict is not Verdict.BETTER and measured.rung.limits:
            yield measured.rung.name, measured.rung.limits


def record(ladder: Ladder) -> dict[str, Any]:
    """Returns all figures of all runs for JSON, in tokens, seconds and shares of 1."""
    return {
        "options": asdict(ladder.options),
        "measured_on": ladder.device,
        "num_prompt_tokens": ladder.num_prompt_tokens,
        "num_output_tokens": ladder.num_output_tokens,
        "identical_tokens": True,  # or there would be no record
        "start_seconds": ladder.start_seconds,
        "seconds": ladder.seconds,
        "rungs": [
            {
                "name": measured.rung.name,
                "idea": measured.rung.idea,
                "source": measured.rung.source,
                "engine": dict(measured.rung.options),
                "step_token_budget_is_that_of_chunks": measured.rung.has_chunks,
                "way": measured.rung.way.value,
                **{figure.name: measured.value(figure) for figure in FIGURES},
                "device_steps": [run.num_steps for run in measured.runs],
                "most_running": measured.most_running,
                "runs": [{figure.name: figure.of(run) for figure in FIGURES} for run in measured.runs],
            }
            for measured in ladder.rungs
        ],
    }
