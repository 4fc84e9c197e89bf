"""A device without a model: pages that remember which token was written where, and a next token read from them.

Every sampled row reads its whole context through its page table, so a page that is shared wrongly, reused too
early or never filled shows as a wrong (token, position), at the step where it happens.
"""

import zlib
from collections.abc import Sequence

import numpy as np

from jaxvllm.core.page_pool import TRASH_PAGE
from jaxvllm.core.plan import NOT_SCORED, StepOutput, StepPlan, TopLogprobs

VOCAB_SIZE = 5
GARBAGE = -7  # what rows that do not sample yield: it must reach nobody


def next_token(token_ids: Sequence[int]) -> int:
    """A deterministic model: the token after `token_ids`, whatever the batch."""
    return zlib.crc32(bytes(token_ids)) % VOCAB_SIZE


class FakeDevice:
    """Pages, and per slot a page table and the last sampled token, changed by plans in dispatch order."""

    def __init__(self, num_slots: int, num_pages: int, page_size: int):
        self.page_size = page_size
        self.pages: list[list[tuple[int, int] | None]] = [[None] * page_size for _ in range(num_pages)]
        self.page_tables: list[list[int]] = [[] for _ in range(num_slots)]
        self.last_token = [GARBAGE] * num_slots

    def run(self, plan: StepPlan) -> StepOutput:
        """Writes the tokens of `plan`, then reads every row's context back and samples."""
        for admission in plan.admissions:
            self.page_tables[admission.slot] = admission.pages.tolist()
        written: set[tuple[int, int]] = set()
        first = 0
        for row, slot in enumerate(plan.slots.tolist()):
            start, length = int(plan.starts[row]), int(plan.lengths[row])
            table = self.page_tables[slot]
            if row < plan.num_decode:
                inputs = [self.last_token[slot]]
                if plan.new_pages[row]:
                    assert start == len(table) * self.page_size, "a page opened elsewhere than at the end"
                    table.append(int(plan.new_pages[row]))
            else:
                assert not plan.new_pages[row], "only decode rows open pages"
                inputs = plan.token_ids[first : first + length].tolist()
                first += length
            for position, token in enumerate(inputs, start):
                page, offset = table[position // self.page_size], position % self.page_size
                assert page != TRASH_PAGE, "a token goes to the trash page"
                assert (page, offset) not in written, "two rows write one place"
                written.add((page, offset))
                self.pages[page][offset] = (token, position)
        assert first == len(plan.token_ids), "token ids and prefill rows differ in length"
        sampled = [self._sample(plan, row) for row in range(plan.num_rows)]
        return StepOutput(np.array(sampled, np.int32), scores=self._scores(plan) if plan.scores_prompts else None)

    def _scores(self, plan: StepPlan) -> TopLogprobs:
        """Of each token that is scored, what the model would say next (`top_ids`) and what came (`ranks`)."""
        ranks = np.full(plan.num_tokens, GARBAGE, np.int32)
        top_ids = np.full((plan.num_tokens, 1), GARBAGE, np.int32)
        first = np.cumsum(plan.lengths) - plan.lengths
        for row in np.flatnonzero(plan.next_tokens != NOT_SCORED):
            assert row >= plan.num_decode, "a decode row is scored"
            at, length = int(first[row]), int(plan.lengths[row])
            context = self._context(plan, row)
            inputs = plan.token_ids[at - plan.num_decode :][:length].tolist()
            ranks[at : at + length] = [*inputs[1:], plan.next_tokens[row]]
            top_ids[at : at + length, 0] = [next_token(context[: len(context) - i]) for i in reversed(range(length))]
        return TopLogprobs(np.zeros(plan.num_tokens, np.float32), ranks, top_ids, top_ids.astype(np.float32))

    def _sample(self, plan: StepPlan, row: int) -> int:
        slot = int(plan.slots[row])
        context = self._context(plan, row)
        if not plan.samples[row]:
            return GARBAGE
        self.last_token[slot] = next_token(context)
        return self.last_token[slot]

    def _context(self, plan: StepPlan, row: int) -> list[int]:
        slot = int(plan.slots[row])
        context = []
        for position in range(int(plan.starts[row] + plan.lengths[row])):
            entry = self.pages[self.page_tables[slot][position // self.page_size]][position % self.page_size]
            assert entry is not None and entry[1] == position, f"slot {slot} reads {entry} at position {position}"
            context.append(entry[0])
        return context
