"""The steps of several requests side by side: who shared a step, and who shared pages."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxvllm.core.explanation import ExplainedStep, Explanation, WholeStep
from jaxvllm.explainer.words import count, listed


@dataclass(frozen=True)
class Column:
    """One step of a replica, with what it did for each request in it, by the request's index."""

    batch: WholeStep
    steps: Mapping[int, ExplainedStep]


def columns(explanations: Sequence[Explanation]) -> list[Column]:
    """Returns the steps in which at least one of the requests was, in order, replica after replica."""
    steps: defaultdict[tuple[int, int], dict[int, ExplainedStep]] = defaultdict(dict)
    for index, explanation in enumerate(explanations):
        for step in explanation.steps:
            steps[step.batch.replica, step.batch.number][index] = step
    return [Column(next(iter(found.values())).batch, found) for _, found in sorted(steps.items())]


def notes(explanations: Sequence[Explanation]) -> list[str]:
    """Returns, in the order of the steps, who found whose pages in the prefix cache, and who was preempted."""
    written: dict[tuple[int, int], int] = {}  # who wrote a page of a replica last
    found = []
    for column in columns(explanations):
        for index, step in column.steps.items():
            if step.admitted is None:
                continue
            num_cached, size = step.admitted.num_cached_tokens, explanations[index].page_size
            pages = step.admitted.pages[: num_cached // size]
            if step.admitted.num_preemptions:
                found.append(
                    f"[{index}] had lost its slot and its pages before step {column.batch.number}: it was preempted"
                )
            if pages:
                sources = sorted({written.get((column.batch.replica, page), -1) for page in pages})
                by = " and ".join("earlier requests" if source < 0 else f"[{source}]" for source in sources)
                which = f"{'page' if len(pages) == 1 else 'pages'} {listed(pages)}"
                tokens = count(num_cached, "token")
                found.append(f"[{index}] found {tokens} in the prefix cache: {which}, written by {by}")
        for index, step in column.steps.items():
            size = explanations[index].page_size
            for write in step.writes:
                for page in range(write.first_place // size, (write.first_place + write.num_tokens - 1) // size + 1):
                    written[column.batch.replica, page] = index
    return found


def mark(step: ExplainedStep) -> str:
    """Returns what a step did for a request, in a few characters: the legend of the timeline explains them."""
    if step.is_dropped:
        return "x"
    if step.kind == "prefill":
        return f"P{step.query_length}"
    if step.kind == "forced":
        return f"F{step.query_length}"
    return f"{step.num_tokens}" + (f"d{step.num_accepted}" if step.num_accepted else "")
