"""The meaning of a step's output for its requests: new tokens, ends, and reports."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.beam import Candidates
from jaxvllm.core.constrained_rows import ConstrainedRows
from jaxvllm.core.readout import DISTRIBUTIONS, POOLED, ROUTED, SCORES, WIDE_SCORES
from jaxvllm.core.request import FinishReason, Request
from jaxvllm.core.running_searches import RunningSearch
from jaxvllm.core.slots import SlotIds, SlotTable, some
from jaxvllm.core.step_plan import Emitted, Finished, Ints, Pooled, Routed, Scored, StepOutput, StepPlan


@dataclass(frozen=True, eq=False)
class StepOutcome:
    """The consequences of an output for the rows whose tenants are still there."""

    rows: SlotIds  # of the output, those that were sampled
    at: SlotIds  # their slots
    num_new_tokens: int
    started: tuple[Request, ...]  # got their first token
    emitted: tuple[Emitted, ...]
    finished: tuple[Finished, ...]  # their slots are still theirs
    scored: tuple[Scored, ...]
    pooled: tuple[Pooled, ...]
    routed: tuple[Routed, ...]


def bring_in(
    slots: SlotTable, constrained: ConstrainedRows, plan: StepPlan, output: StepOutput, *, has_beams: bool
) -> StepOutcome:
    """Appends the tokens that `plan` yielded, and finds the requests that met a stop id, their limit or a repetition.

    A row that yielded fewer tokens than it might have is that much shorter than its plan took it for. Beams never end
    here, because their search says when they do.
    """
    of_rows = plan.slots.astype(np.intp)  # numpy would do it again wherever the slots are an index
    is_present = slots.epoch[of_rows] == plan.epochs
    of_prompts = tuple(scored(slots, plan, is_present)) if plan.readouts else ()
    of_pools = tuple(pooled(slots, plan, is_present)) if POOLED.name in plan.readouts else ()
    of_experts = tuple(routed(slots, plan, is_present)) if ROUTED.name in plan.readouts else ()
    rows = (is_present & plan.samples).nonzero()[0]
    at = of_rows[rows]
    tokens, counts = output.tokens[rows], output.counts[rows]  # copies
    refused: dict[int, Finished] = {}
    if is_constrained := some(slots.is_constrained):
        refused = constrained.take(plan, rows, at, tokens, counts)
    missing = plan.max_new[rows] - counts
    if np.count_nonzero(missing):
        slots.num_tokens[at] -= missing
        slots.num_computed[at] -= missing
    num_outputs = slots.num_known[at] - slots.num_prompt[at]
    slots.append_tokens(at, tokens, counts)
    if is_constrained:
        constrained.rewind(at)
    # The device ends a row after its first stop id, so only the last token can be one.
    last = tokens[:, 0] if plan.row_tokens == 1 else tokens[np.arange(len(rows)), np.maximum(counts, 1) - 1]
    yields = counts > 0
    stops = slots.stops(at, last) & yields
    if some(stops):
        stops &= num_outputs + counts > slots.min_tokens[at]
        # The device computes no KV of a stop token, although a step in flight was planned to.
        slots.num_computed[at[stops]] = slots.num_known[at[stops]] - 1
    ends = stops | (slots.num_known[at] >= slots.limit[at])
    if has_beams:
        ends &= ~slots.is_beam[at]  # their search says when they end
    repeats = cut_repetitions(slots, at, tokens, counts, ends)
    reports = yields
    if refused:  # a request may end after forced tokens
        reports = yields.copy()
        reports[list(refused)] = True
    num_forced = slots.num_unreported[at] * reports
    started = tuple([slots.tenant(slot) for slot in at[reports & (num_outputs == num_forced)].tolist()])
    reported: tuple[Emitted, ...] = ()
    if some(slots.watched):
        reported = tuple(emitted(slots, rows, at, tokens, counts, num_forced))
    if np.count_nonzero(num_forced):
        slots.num_unreported[at[reports]] = 0
    finished = [
        repeated(slots.tenant(at[i])) if repeats[i] else ended(slots.tenant(at[i]), int(last[i]), bool(stops[i]))
        for i in (ends | repeats).nonzero()[0]
    ]
    finished += [end for index, end in refused.items() if not (ends | repeats)[index]]
    num_new = int(counts.sum() + num_forced.sum())
    return StepOutcome(rows, at, num_new, started, reported, tuple(finished), of_prompts, of_pools, of_experts)


def scored(slots: SlotTable, plan: StepPlan, is_present: NDArray[np.bool_]) -> Iterator[Scored]:
    """Yields what `plan` scored of the rows whose tenants are still there, bool[R]."""
    wanted = [plan.readouts[readout.name] for readout in (SCORES, WIDE_SCORES) if readout.name in plan.readouts]
    for are_scored in wanted:
        lengths = plan.lengths * are_scored
        first = np.cumsum(lengths) - lengths
        for row in np.flatnonzero(is_present & are_scored):
            request = slots.tenant(plan.slots[row])
            start = int(plan.starts[row]) + 1  # the first token is after none
            end = min(start + int(plan.lengths[row]), request.num_prompt_tokens)
            if start < end:
                yield Scored(request, range(start, end), int(first[row]))


def pooled(slots: SlotTable, plan: StepPlan, is_present: NDArray[np.bool_]) -> Iterator[Pooled]:
    """Yields the rows of `plan` that are pooled and whose tenants are still there, bool[R]."""
    for row in np.flatnonzero(is_present & plan.readouts[POOLED.name]).tolist():
        yield Pooled(slots.tenant(plan.slots[row]), int(plan.starts[row]), row)


def routed(slots: SlotTable, plan: StepPlan, is_present: NDArray[np.bool_]) -> Iterator[Routed]:
    """Yields the rows of `plan` whose experts are told and whose tenants are still there, bool[R]."""
    ends = np.cumsum(plan.lengths)
    for row in np.flatnonzero(is_present & plan.readouts[ROUTED.name]).tolist():
        rows = slice(int(ends[row] - plan.lengths[row]), int(ends[row]))
        yield Routed(slots.tenant(plan.slots[row]), int(plan.starts[row]), rows)


def cut_repetitions(
    slots: SlotTable, at: SlotIds, tokens: Ints, counts: Ints, ends: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Returns which rows repeat themselves, bool[len(at)], and lowers their `counts` to the end of the repetition.

    A row whose last token `ends` it anyhow ends for that reason.
    """
    repeats = np.zeros(len(at), np.bool_)
    if not some(slots.detects_repetition):
        return repeats
    for index in np.flatnonzero(slots.detects_repetition[at]):
        request, count = slots.tenant(at[index]), int(counts[index])
        assert request.repetition is not None
        end = request.repetition.first_end(tokens[index, :count].tolist(), request.sampling_params.min_tokens)
        if end is not None and not (end == count and ends[index]):
            repeats[index] = True
            slots.num_known[at[index]] -= count - end
            counts[index] = end
    return repeats


def emitted(
    slots: SlotTable, rows: SlotIds, at: SlotIds, tokens: Ints, counts: Ints, num_forced: NDArray[np.int32]
) -> Iterator[Emitted]:
    """Yields the new tokens of requests that somebody watches, row by row in order, forced ones first."""
    row_tokens = tokens.shape[1]
    watched = slots.watched[at]
    row, index = np.nonzero(watched[:, None] & (np.arange(row_tokens) < counts[:, None]))
    found = (at[row].tolist(), (rows[row] * row_tokens + index).tolist(), tokens[row, index].tolist())
    for slot, place, token in zip(*found, strict=True):
        if slots.num_unreported[slot]:
            yield from _forced(slots, slot, place, 1)  # its row yields one token
        yield Emitted(slots.tenant(slot), place, token)
    for ended_at in np.flatnonzero(watched & (counts == 0) & (num_forced > 0)).tolist():
        yield from _forced(slots, int(at[ended_at]), int(rows[ended_at]) * row_tokens, 0)


def _forced(slots: SlotTable, slot: int, place: int, num_after: int) -> Iterator[Emitted]:
    """Yields the tokens of `slot` that no update has reported. So many others follow them."""
    end = int(slots.num_known[slot]) - num_after
    for token in slots.token_ids[slot, end - slots.num_unreported[slot] : end].tolist():
        yield Emitted(slots.tenant(slot), place, token)


def proposed(beams: RunningSearch, output: StepOutput, row: int) -> Candidates:
    """Returns the next tokens that the beam of `row` proposes."""
    if beams.request.sampling_params.wants_distributions:
        distributions = DISTRIBUTIONS.of(output.reports)
        assert distributions is not None, "a step with beams was planned without distributions"
        return Candidates.best(distributions[row], beams.search.params.num_candidates)
    assert output.logprobs is not None, "a step with beams was planned without log-probabilities"
    return Candidates(output.logprobs.top_ids[row], output.logprobs.top[row])


def ended(request: Request, last_token: int, stopped: bool) -> Finished:
    """Returns the end of `request` by its last token, a stop id if it `stopped`, or by its limit."""
    if not stopped:
        return Finished(request, FinishReason.LENGTH)
    # As in vLLM, an EOS that counts is never reported, even if the caller gave it as a stop token, too.
    is_eos = last_token in request.eos_token_ids and not request.sampling_params.ignore_eos
    asked_for = last_token in request.sampling_params.stop_token_ids and not is_eos
    return Finished(request, FinishReason.STOP, last_token if asked_for else None, hides_last=True)


def repeated(request: Request) -> Finished:
    """Returns the end of `request` by a repetition, told as vLLM tells it."""
    return Finished(request, FinishReason.REPETITION, "repetition_detected")
