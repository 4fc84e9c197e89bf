"""The rows of a step, which become its `StepPlan`: slots that decode, then chunks of known tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxvllm.core.constrained_rows import ConstrainedRows
from jaxvllm.core.side_store import SideStore
from jaxvllm.core.slots import SlotIds, SlotTable, some
from jaxvllm.core.step_plan import NOT_SCORED, Admission, PageEntries, StepPlan


@dataclass(frozen=True)
class Chunk:
    """Known tokens to compute in this step: part of a prompt, or tokens that a constraint forced."""

    slot: int
    start: int
    length: int
    yields: bool  # a token, which the end of a prompt does, and the end of forced tokens
    of_prompt: bool = True

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class StepRows:
    """The rows that a step computes.

    A row of `decode` gets `row_tokens` at most. It has `num_drafts` guesses in each decode step.
    """

    decode: SlotIds
    chunks: Sequence[Chunk]
    new_pages: tuple[PageEntries, ...]  # one a group
    admissions: Sequence[Admission]
    row_tokens: int
    num_drafts: int

    def plan(self, slots: SlotTable, constrained: ConstrainedRows, side_store: SideStore) -> StepPlan:
        """Returns the plan of these rows, whose tokens count as computed from now on."""
        decode, chunks = self.decode, self.chunks
        num_decode, num_rows = len(decode), len(decode) + len(chunks)
        rows = np.concatenate([decode, [chunk.slot for chunk in chunks]], dtype=np.intp) if chunks else decode
        starts = slots.num_computed[rows]
        lengths = np.ones(num_rows, np.int32)
        max_new = lengths.copy()
        if self.row_tokens > 1:
            most = constrained.most(decode, self.row_tokens)
            max_new[:num_decode] = np.minimum(most, slots.limit[decode] - slots.num_tokens[decode])
        next_tokens = np.full(num_rows, NOT_SCORED, np.int32)
        are_prompts = np.zeros(num_rows, np.bool_)
        for row, chunk in enumerate(chunks, num_decode):
            lengths[row] = chunk.length
            max_new[row] = chunk.yields
            are_prompts[row] = chunk.of_prompt
            if chunk.of_prompt and slots.tenant(chunk.slot).wants_scores:
                next_tokens[row] = 0 if chunk.yields else slots.token_ids[chunk.slot, chunk.end]
        inputs = [
            side_store.inputs(
                chunk.slot,
                chunk.start,
                slots.token_ids[chunk.slot, chunk.start : chunk.end],
                slots.tenant(chunk.slot).asked.prompt.side_inputs,
            )
            for chunk in chunks
        ]
        plan = StepPlan(
            slots=rows.astype(np.int32),
            epochs=slots.epoch[rows],
            starts=starts,
            lengths=lengths,
            new_pages=self.new_pages,
            max_new=max_new,
            num_decode=num_decode,
            token_ids=np.concatenate(inputs) if inputs else np.empty(0, np.int32),
            next_tokens=next_tokens,
            wants_logprobs=some(slots.wants_logprobs) and some(slots.wants_logprobs[rows]),
            has_logit_rules=some(slots.has_rules) and some(slots.has_rules[rows]),
            has_adapters=some(slots.has_adapter) and some(slots.has_adapter[rows]),
            row_tokens=self.row_tokens,
            num_drafts=self.num_drafts,
            masked=constrained.masked(rows, num_decode, max_new),
            readouts=slots.readouts(rows, are_prompts, max_new > 0),
            admissions=tuple(self.admissions),
        )
        slots.num_computed[rows] += lengths if self.row_tokens == 1 else max_new
        slots.num_tokens[rows] += max_new
        return plan
