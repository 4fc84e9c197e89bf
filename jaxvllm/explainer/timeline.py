"""The steps of several requests side by side: who shared a step, and who shared pages."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxvllm.core.explanation import Batch, ExplainedStep, Explanation


@dataclass(frozen=True)
class Column:
    """One step of a replica, with what it did for each request in it, by the request's index."""

    batch: Batch
    steps: Mapping[int, ExplainedStep]


def columns(explanations: Sequence[Explanation]) -> list[Column]:
    """Returns the steps in which at least one of the requests was, in order, replica after replica."""
    steps: defaultdict[tuple[int, int], dict[int, ExplainedStep]] = defaultdict(dict)
    for index, explanation in enumerate(explanations):
        for step in explanation.steps:
            steps[step.batch.replica, step.batch.number][index] = step
    return [Column(next(iter(found.values())).batch, found) for _, found in sorted(steps.items())]


@dataclass(frozen=True)
class Sharing:
    """Pages that a request found in the prefix cache when it left the queue."""

    index: int  # of the request
    num_tokens: int
    pages: tuple[int, ...]
    sources: tuple[int, ...]  # indices of the requests that computed them; none: others did, before


def sharings(explanations: Sequence[Explanation]) -> list[Sharing]:
    """Returns what the requests found in the prefix cache, in the order of the steps."""
    written: dict[tuple[int, int], int] = {}  # who wrote a page of a replica last
    found = []
    for column in columns(explanations):
        for index, step in column.steps.items():
            size = explanations[index].page_size
            if step.admitted is not None and step.admitted.num_cached_tokens:
                pages = step.admitted.pages[: step.admitted.num_cached_tokens // size]
                sources = {written.get((column.batch.replica, page)) for page in pages} - {None}
                others = tuple(sorted(one for one in sources if one is not None))
                found.append(Sharing(index, step.admitted.num_cached_tokens, pages, others))
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
