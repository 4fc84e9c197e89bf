"""A device without a model: pages that remember which token was written where, and a next token read from them.

Every token that is computed reads what it sees through the page table of each group, so a page that is shared wrongly,
reused or freed too early, or never filled shows as a wrong (token, position), at the step where it happens.
"""

import zlib
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.kv_cache import GroupSize
from jaxvllm.core.page_pool import TRASH_PAGE
from jaxvllm.core.readout import DISTRIBUTIONS, SCORES, WIDE_SCORES, Readout, scored_tokens
from jaxvllm.core.request import Request
from jaxvllm.core.step_plan import NOT_SCORED, Fork, StepOutput, StepPlan, TopLogprobs

VOCAB_SIZE = 5
GARBAGE = VOCAB_SIZE - 1  # what a row does not yield: it must reach nobody, and looks like a stop id


def next_token(token_ids: Sequence[int]) -> int:
    """A deterministic model: the token after `token_ids`, whatever the batch."""
    return zlib.crc32(bytes(token_ids)) % VOCAB_SIZE


class Script:
    """A constraint that says which token outputs must be, at some indices, and nothing at others (None, or at its end).

    It knows a token before the one in front of it came, and forces it. `unforeseen(token)` it knows only then.
    """

    is_complete = False

    def __init__(self, tokens: Sequence[int | None]):
        self.tokens = tokens
        self.num_seen = 0

    def advance(self, token_ids: Sequence[int]) -> int:
        for index, token in enumerate(token_ids):
            if self.at(self.num_seen) not in (None, token):
                return index
            self.num_seen += 1
        return len(token_ids)

    def forced(self) -> list[int]:
        ahead = self.tokens[self.num_seen :]
        return [
            token for token in takewhile(lambda token: token is not None and token >= 0, ahead) if token is not None
        ]

    def fill(self, words: NDArray[np.int32]) -> None:
        raise AssertionError("a device without a model needs no masks")

    def at(self, index: int) -> int | None:
        """The token that output number `index` must be, if any."""
        token = self.tokens[index] if index < len(self.tokens) else None
        return token if token is None or token >= 0 else unforeseen(token)


def unforeseen(token: int) -> int:
    """`token` as one that a script does not force, and back."""
    return -1 - token


def next_logprobs(token_ids: Sequence[int]) -> np.ndarray:
    """The log-probabilities f32[VOCAB_SIZE] of the tokens after `token_ids`, whatever the batch."""
    logits = np.random.default_rng(zlib.crc32(bytes(token_ids))).normal(size=VOCAB_SIZE)
    return np.asarray(logits - np.log(np.exp(logits).sum()), np.float32)


class FakeGroup:
    """Pages of one group, and a page table for each slot."""

    def __init__(self, size: GroupSize, num_slots: int, page_size: int):
        self.window = size.window
        self.page_size = page_size
        self.pages: list[list[tuple[int, int] | None]] = [[None] * page_size for _ in range(size.num_pages)]
        self.tables: list[dict[int, int]] = [{} for _ in range(num_slots)]  # pages by column; what is freed stays

    def begin(self) -> None:
        """Takes note that another step begins."""

    def open(self, slot: int, column: int, page: int) -> None:
        """Enters a page into the table of `slot`."""
        assert column == max(self.tables[slot], default=-1) + 1, "a page opened elsewhere than at the end"
        self.tables[slot][column] = page

    def write(self, slot: int, position: int, entry: tuple[int, int] | None) -> tuple[int, int]:
        """Stores the KV at `position`, and returns where it is."""
        page, offset = self.tables[slot].get(position // self.page_size, TRASH_PAGE), position % self.page_size
        assert page != TRASH_PAGE, "a token goes to the trash page"
        self.pages[page][offset] = entry
        return page, offset

    def read(self, slot: int, start: int, length: int) -> list[int | None]:
        """The tokens that those from `start` to `length` see, by position; None before the window."""
        first = 0 if self.window is None else max(start - self.window + 1, 0)
        seen: list[int | None] = [None] * first
        for position in range(first, length):
            entry = self.pages[self.tables[slot][position // self.page_size]][position % self.page_size]
            assert entry is not None and entry[1] == position, f"slot {slot} reads {entry} at position {position}"
            seen.append(entry[0])
        return seen


class FakeStates(FakeGroup):
    """Pages that each remember all tokens up to the last that was computed in their column, in order.

    A token can only follow the one before it, and be computed once: nothing takes it out again.
    """

    def begin(self) -> None:
        self._computed: dict[int, list[Any]] = {}  # by slot, what the step has come to

    def open(self, slot: int, column: int, page: int) -> None:
        assert column > max(self.tables[slot], default=-1), "a page opened elsewhere than at the end"
        self.tables[slot][column] = page

    def write(self, slot: int, position: int, entry: tuple[int, int] | None) -> tuple[int, int]:
        page = self.tables[slot].get(position // self.page_size, TRASH_PAGE)
        if entry is not None:  # a draft that is not accepted leaves no trace
            state = self._computed[slot] = [*self._before(slot, position), entry]
            if page != TRASH_PAGE:
                self.pages[page] = state
        return (page, position) if page != TRASH_PAGE else (-1 - slot, position)

    def _before(self, slot: int, position: int) -> list[Any]:
        if slot in self._computed or not position:
            state = self._computed.get(slot, [])
        else:
            state = self.pages[self.tables[slot][(position - 1) // self.page_size]]
        assert [at for _, at in state] == list(range(position)), f"slot {slot} is at {state}, and {position} comes"
        return state

    def read(self, slot: int, start: int, length: int) -> list[int | None]:
        return [token for token, _ in self._before(slot, length)]


class FakeDevice:
    """Pages, and per slot what the device owns: page tables, its tokens and where it ends. Plans change it in order.

    With `rng`, a decode row yields fewer tokens than it might: as after speculation, the positions that the others
    would have had hold garbage until a later step writes there. No live row yields nothing three times in a row.
    """

    def __init__(
        self, num_slots: int, sizes: Sequence[GroupSize], page_size: int, rng: np.random.Generator | None = None
    ):
        self.groups = [(FakeStates if size.keeps_state else FakeGroup)(size, num_slots, page_size) for size in sizes]
        # A row that yields nothing computes its last token again, which no state could bear.
        self._least = int(any(size.keeps_state for size in sizes))
        self.tokens: list[list[int]] = [[] for _ in range(num_slots)]
        self.requests: list[Request | None] = [None] * num_slots
        self._num_idle = [0] * num_slots
        self._rng = rng

    def run(self, plan: StepPlan) -> StepOutput:
        """Writes the tokens of `plan`, then reads every row's context back and samples, up to `width` times."""
        for group in self.groups:
            group.begin()
        for admission in plan.admissions:
            for group, row in zip(self.groups, admission.pages.tolist(), strict=True):
                group.tables[admission.slot] = {column: page for column, page in enumerate(row) if page != TRASH_PAGE}
            self.tokens[admission.slot] = []
            self.requests[admission.slot] = admission.request
        assert plan.row_tokens == 1 or plan.num_decode == plan.num_rows, "a prompt is computed in several steps at once"
        tokens = np.full((plan.num_rows, plan.row_tokens), GARBAGE, np.int32)
        counts = np.zeros(plan.num_rows, np.int32)
        written: set[tuple[int, int, int]] = set()
        self._open_pages(plan)
        contexts: list[list[int]] = []
        first = 0
        for row, slot in enumerate(plan.slots.tolist()):
            if row < plan.num_decode:
                got = self._decode(plan, row, written)
                contexts.append([])
            else:
                start, length = int(plan.starts[row]), int(plan.lengths[row])
                inputs = plan.token_ids[first : first + length].tolist()
                first += length
                self._write(slot, start, inputs, written)
                if self.tokens[slot]:  # tokens of its own that the host knows already
                    request, mine = self.requests[slot], self.tokens[slot][start:]
                    assert request is not None
                    is_same = mine == inputs[: len(mine)]
                    assert is_same or request.constraint is not None, "the host knows other tokens than the device"
                    self.tokens[slot] = self.tokens[slot][:start] + inputs
                contexts.append(self._context(slot, start, start + length))
                got = []
                if plan.samples[row]:
                    got = [self._next_token(plan, row, contexts[row])]
                    self.tokens[slot] = contexts[row] + got
            tokens[row, : len(got)] = got
            counts[row] = len(got)
        assert first == len(plan.token_ids), "token ids and prefill rows differ in length"
        scores = self._scores(plan, contexts)
        reports: dict[str, Any] = {
            readout.name: self._of_rows(plan, readout, scores)
            for readout in (SCORES, WIDE_SCORES)
            if readout.name in plan.readouts
        }
        if (wanted := plan.readouts.get(DISTRIBUTIONS.name)) is not None:
            rows = np.flatnonzero(wanted).tolist()
            reports[DISTRIBUTIONS.name] = {row: next_logprobs(self.tokens[plan.slots[row]][:-1]) for row in rows}
        logprobs = self._logprobs(plan) if plan.wants_logprobs else None
        return StepOutput(tokens, counts, logprobs, reports)

    def fork(self, forks: Sequence[Fork]) -> None:
        """Makes slots copies of others: of their pages, those that the copies get are filled here."""
        for fork in forks:
            tokens = self.tokens[fork.source]
            for group, copy in zip(self.groups, fork.copies, strict=True):
                held = -(-(len(tokens) - 1) // group.page_size)
                table = {column: page for column, page in group.tables[fork.source].items() if column < held}
                if copy is not None:
                    assert fork.slot != fork.source and table[copy.column] == copy.source
                    group.pages[copy.page] = list(group.pages[copy.source])
                    table[copy.column] = copy.page
                if fork.slot != fork.source:
                    group.tables[fork.slot] = table
            self.tokens[fork.slot] = [*tokens[:-1], fork.token_id]
            self.requests[fork.slot] = self.requests[fork.source]

    def _logprobs(self, plan: StepPlan) -> TopLogprobs:
        """What each row proposes after the tokens that it has computed; garbage where it yields nothing."""
        top_ids = np.full((plan.num_rows, VOCAB_SIZE), GARBAGE, np.int32)
        top = np.zeros((plan.num_rows, VOCAB_SIZE), np.float32)
        for row in np.flatnonzero(plan.samples):
            values = next_logprobs(self.tokens[plan.slots[row]][:-1])
            top_ids[row] = np.argsort(-values, kind="stable")
            top[row] = values[top_ids[row]]
        return TopLogprobs(top[:, 0], np.ones(plan.num_rows, np.int32), top_ids, top)

    def _open_pages(self, plan: StepPlan) -> None:
        for group, entries in zip(self.groups, plan.new_pages, strict=True):
            assert set(entries.slots.tolist()) <= set(plan.slots.tolist()), "a slot without a row opens a page"
            for slot, column, page in zip(entries.slots, entries.columns, entries.pages, strict=True):
                group.open(slot, int(column), int(page))

    def _decode(self, plan: StepPlan, row: int, written: set[tuple[int, int, int]]) -> list[int]:
        slot = int(plan.slots[row])
        tokens, most = self.tokens[slot], int(plan.max_new[row])
        assert 1 <= most <= plan.row_tokens
        count = most
        request = self.requests[slot]
        assert request is not None
        if self._rng is not None and not self._is_masked(plan, row):
            count = int(self._rng.integers(max(self._least, self._num_idle[slot] >= 2), most + 1))
            self._num_idle[slot] = 0 if count else self._num_idle[slot] + 1
        if self._has_ended(slot):
            return []
        start = len(tokens) - 1
        assert start <= plan.starts[row], "a row is farther than the host takes it for"
        got: list[int] = []
        for step in range(most):
            if step < max(count, 1) and not self._has_ended(
                slot
            ):  # a row that yields nothing writes its token's KV too
                self._write(slot, start + step, tokens[-1:], written)
                if step < count:
                    got.append(self._next_token(plan, row, self._context(slot, start + step, start + step + 1)))
                    tokens.append(got[-1])
            elif self._rng is not None:  # a draft that was not accepted
                self._write(slot, start + step, [GARBAGE], written, valid=False)
        return got

    def _next_token(self, plan: StepPlan, row: int, context: Sequence[int]) -> int:
        request = self.requests[plan.slots[row]]
        assert request is not None
        only = None
        if self._is_masked(plan, row):
            assert request.constraint is not None, "a free row waits for a mask"
            script = request.constraint.unguarded
            assert isinstance(script, Script)
            only = script.at(len(context) - request.num_prompt_tokens)
        return next_token(context) if only is None else only

    @staticmethod
    def _is_masked(plan: StepPlan, row: int) -> bool:
        return plan.masked is not None and bool(plan.masked[row])

    def _has_ended(self, slot: int) -> bool:
        request, tokens = self.requests[slot], self.tokens[slot]
        assert request is not None
        num_outputs = len(tokens) - request.num_prompt_tokens
        return len(tokens) == request.limit or (
            num_outputs > request.sampling_params.min_tokens and tokens[-1] in request.stop_token_ids
        )

    def _write(
        self, slot: int, start: int, tokens: Sequence[int], written: set[tuple[int, int, int]], valid: bool = True
    ) -> None:
        for position, token in enumerate(tokens, start):
            for number, group in enumerate(self.groups):
                place = (number, *group.write(slot, position, (token, position) if valid else None))
                assert place not in written, "two rows write one place"
                written.add(place)

    def _scores(self, plan: StepPlan, contexts: Sequence[list[int]]) -> TopLogprobs:
        """Of each token that is scored, what the model would say next (`top_ids`) and what came (`ranks`)."""
        ranks = np.full(plan.num_tokens, GARBAGE, np.int32)
        top_ids = np.full((plan.num_tokens, 1), GARBAGE, np.int32)
        first = np.cumsum(plan.lengths) - plan.lengths
        for row in np.flatnonzero(plan.next_tokens != NOT_SCORED):
            assert row >= plan.num_decode, "a decode row is scored"
            at, length = int(first[row]), int(plan.lengths[row])
            context = contexts[row]
            inputs = plan.token_ids[at - plan.num_decode :][:length].tolist()
            ranks[at : at + length] = [*inputs[1:], plan.next_tokens[row]]
            top_ids[at : at + length, 0] = [next_token(context[: len(context) - i]) for i in reversed(range(length))]
        return TopLogprobs(np.zeros(plan.num_tokens, np.float32), ranks, top_ids, top_ids.astype(np.float32))

    @staticmethod
    def _of_rows(plan: StepPlan, readout: Readout[TopLogprobs], scores: TopLogprobs) -> TopLogprobs:
        """The scores of the tokens that want this readout, of those of all tokens of the step."""
        tokens, following = scored_tokens(plan, readout)
        assert following.tolist() == scores.ranks[tokens].tolist(), "other tokens follow"
        return TopLogprobs(scores.token[tokens], following, scores.top_ids[tokens], scores.top[tokens])

    def _context(self, slot: int, start: int, length: int) -> list[int]:
        """The tokens up to `length`, of which those from `start` on are computed now, as each group has them."""
        request = self.requests[slot]
        assert request is not None
        # What no group has any more: the prompt, and what the device sampled.
        context = [*request.token_ids().tolist(), *self.tokens[slot][request.num_tokens :]][:length]
        assert len(context) == length
        for group in self.groups:
            seen = group.read(slot, start, length)
            assert all(token in (None, of) for token, of in zip(seen, context, strict=True)), "a page of other tokens"
        return context
