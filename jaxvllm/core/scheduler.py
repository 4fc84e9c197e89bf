"""The scheduler: which tokens of which requests the next step computes.

There is no prefill phase and no decode phase. Each running request has tokens and computed tokens; a step lets
the second count catch up with the first, under one token budget: decode rows first, then the prefill chunks of
running requests, then new requests. The scheduler counts tokens, it does not wait for them: `schedule` may run
before the output of the last step is known (`slots.py` says how), and `update` brings the ids in later.
"""

import heapq
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.beam import Candidates
from jaxvllm.core.beam_groups import BeamGroup, BeamGroups
from jaxvllm.core.constrained_rows import ConstrainedRows
from jaxvllm.core.errors import ParameterError
from jaxvllm.core.kv_cache import CachedPrefix, KVCache
from jaxvllm.core.page_loads import PageLoad, PageLoads, PageSave, PageSource
from jaxvllm.core.policy import Policy
from jaxvllm.core.readout import DISTRIBUTIONS, POOLED, WIDE_SCORES
from jaxvllm.core.request import FinishReason, QueueKey, Request
from jaxvllm.core.slots import SlotIds, SlotTable, some
from jaxvllm.core.step_plan import (
    NOT_SCORED,
    SCORE_BATCH,
    Admission,
    Emitted,
    Finished,
    Fork,
    Ints,
    PageEntries,
    Pooled,
    Scored,
    StepOutput,
    StepPlan,
    StepRoom,
    StepUpdate,
)
from jaxvllm.core.step_sizes import StepSizes

logger = logging.getLogger(__name__)

# A request in the queue, and whether `update` reports each of its tokens.
type _Queued = tuple[QueueKey, Request, bool]
# Of each group of the KV cache, the pages that rows open in a step.
type Opened = tuple[PageEntries, ...]


@dataclass(frozen=True)
class _Chunk:
    """Known tokens to compute in this step: part of a prompt, or tokens that a constraint forced."""

    slot: int
    start: int
    length: int
    yields: bool  # a token, which the end of a prompt does, and the end of forced tokens
    of_prompt: bool = True

    @property
    def end(self) -> int:
        return self.start + self.length


class Scheduler:
    """Owns the queue, the slots and the KV cache. Calls are `add`, `schedule`, `update`, `finish`; none blocks."""

    def __init__(
        self,
        slots: SlotTable,
        cache: KVCache,
        policy: Policy,
        max_num_batched_tokens: int,
        source: PageSource | None = None,
    ):
        """Begins without requests. `source` may have pages that the prefix cache does not have."""
        check_token_budget(max_num_batched_tokens, slots.num_slots)
        self.slots = slots
        self.cache = cache
        self.policy = policy
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_preemptions = 0
        self._waiting: list[_Queued] = []  # heap; keys are unique
        self._waiting_ids: dict[str, Request] = {}
        self._num_waiting_tokens = 0
        self._slot_of: dict[str, int] = {}
        self._beams = BeamGroups(slots, cache)
        self._constrained = ConstrainedRows(slots)
        # Hashes of prompt pages that running requests are about to compute, or that are being loaded.
        self._computing: set[bytes] = set()
        self._loads = PageLoads(cache, source)
        self._loading: dict[str, _Queued] = {}  # requests that wait for their load, by id
        self._saves: list[PageSave] = []
        self._may_leave_out = False  # rows that wait for masks, of the next step: they were in the last one
        self._failed: dict[str, Finished] = {}  # requests that have ended since the last update, by id

    @property
    def num_waiting(self) -> int:
        return len(self._waiting_ids)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the waiting requests."""
        return self._num_waiting_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens of the running requests' prompts that no step so far computes."""
        return self._num_uncomputed(self.slots.prefilling())

    @property
    def num_running(self) -> int:
        return len(self._slot_of)

    @property
    def num_decoding(self) -> int:
        """The number of rows that decode in the next step, if it computes no prompt."""
        return len(self._next_rows(self.slots.decoding()))

    @property
    def has_work(self) -> bool:
        return bool(self._waiting_ids or self._slot_of)

    def __contains__(self, request_id: str) -> bool:
        """Returns whether it has this request, waiting or running, or one whose end no update has told yet."""
        return any(request_id in of for of in (self._waiting_ids, self._slot_of, self._failed))

    def add(self, request: Request, watched: bool = False) -> None:
        """Queues `request`. `watched`: `update` reports each of its tokens, not only the end.

        Tokens with which its constraint begins are known from now on, and computed with its prompt.

        Raises ValueError for an id that is in use and for a request that the whole pool could not hold.
        """
        if request.request_id in self._waiting_ids or request.request_id in self._slot_of:
            raise ValueError(f"request id {request.request_id!r} is in use: choose another")
        self.check_fits(request.num_tokens, request.limit, request.num_beams)
        self._enqueue(request, watched)

    def check_fits(self, num_prompt_tokens: int, limit: int, num_beams: int | None = None) -> None:
        """Raises ValueError for a request that could not finish even if it had every page and slot."""
        if num_beams is not None and num_beams > self.slots.num_slots:
            raise ParameterError(
                f"beam_width (n over HTTP) {num_beams} exceeds the {self.slots.num_slots} sequences that run at once: "
                "lower it, or raise max_num_seqs",
                "n",
            )
        if (shortage := self.cache.shortage(limit - 1, num_prompt_tokens, num_beams)) is not None:
            of = "" if shortage.window is None else f" of layers with a window of {shortage.window} tokens"
            beams = "" if num_beams is None else f" for each of {num_beams} beams"
            raise ParameterError(
                f"prompt of {num_prompt_tokens} tokens with up to {limit - num_prompt_tokens} new ones{beams} needs "
                f"{shortage.needed} pages of {self.cache.page_size} tokens, but the pool{of} has {shortage.usable}: "
                "lower max_tokens, shorten the prompt, or give the engine more memory",
                "max_tokens",
            )

    def num_cached_tokens(self, request: Request) -> int:
        """Returns how many tokens of `request` are in the prefix cache, so that they would not be computed."""
        return self._cached_prefix(request).num_pages * self.cache.page_size

    def schedule(
        self,
        num_steps: int = 1,
        sizes: StepSizes | None = None,
        room: StepRoom | None = None,
        num_drafts: int = 0,
    ) -> StepPlan | None:
        """Returns the next step, or None when nothing can be computed before an output or a request arrives.

        Never plans more than `max_num_batched_tokens` tokens, and plans every decoding request, but under the policy v0
        while prompts wait, and but for rows that wait for masks, which may be left out of every other step. Where no
        prompt is computed and no row waits for the host, the step is up to `num_steps` decode steps in one, each with
        `num_drafts` draft tokens a row, which are not counted as computed: if there are pages for all these tokens
        without a preemption. While requests wait that found no room, it is one decode step, with drafts too. Tokens
        that a constraint forces are computed at once, if the budget and the free pages have room for them.

        With `sizes` the last chunk may be shorter than the budget allows, so that the step fills one of them. With
        `room`, which may grow from call to call but not shrink, the step has no more tokens and rows than that, but for
        the beams of a search. So requests get slots only while there are rows for them.
        """
        self._free_unseen()
        most = self.max_num_batched_tokens if room is None else min(self.max_num_batched_tokens, room.num_tokens)
        decoding = self.slots.decoding()
        decode = self._next_rows(decoding)
        leaves_out = len(decode) < len(decoding)
        is_constrained = self.slots.is_constrained
        constrained = decode[is_constrained[decode]] if some(is_constrained) else decode[:0]
        forced = self._constrained.forced(constrained, max(most - len(decode), 0))
        widest = (1, 0) if forced else self._widest(decode, num_steps, num_drafts)
        # Waiting requests get pages before those that only a wide step needs.
        num_first = 1 if self._waiting_ids else widest[0]
        new_pages = self._grow(decode, num_first, forced)
        if new_pages is None and (num_first > 1 or forced):
            widest, forced = (1, 0), {}
            new_pages = self._grow(decode, 1)
        preempts = new_pages is None
        if new_pages is None:
            decode, new_pages = self._grow_by_preemption()
        chunks: list[_Chunk] = []
        opened: list[Opened] = []  # by chunks of running prompts
        admissions: list[Admission] = []
        mixes = self.policy.mixes_phases
        num_decode_tokens = len(decode) + self._constrained.num_extra(forced)
        budget = most - (num_decode_tokens if mixes else 0)
        if budget > 0 and (self._waiting or len(decode) < self.slots.num_active):
            running = self.slots.prefilling()
            if sizes is not None:
                rows = (num_decode_tokens, len(decode)) if mixes else (0, 0)
                budget = self._fit(sizes, budget, running, *rows)
            budget = self._continue_prefills(chunks, opened, running, budget)
            if not preempts:
                # Or the victim takes back the pages it lost: under v0, where its prompt would go first, for ever.
                self._admit(chunks, admissions, budget, room)
        if chunks and not mixes:
            self.cache.undo(new_pages)  # decode rows wait while prompts are computed
            decode, new_pages, forced = decode[:0], self.cache.no_entries, {}
        if not chunks and not len(decode):
            return None
        if preempts or chunks:
            widest = (1, 0)
        elif widest[0] > num_first:
            if (more := self._grow(decode, widest[0])) is None:
                widest = (1, 0)
            else:
                opened.append(more)
        if opened:
            new_pages = tuple(map(PageEntries.joined, zip(new_pages, *opened, strict=True)))
        if len(constrained) and (given := self._constrained.given(decode, forced)):
            decode = decode[[slot not in given for slot in decode.tolist()]]
            chunks = [*(self._take_forced(slot, tokens) for slot, tokens in given.items()), *chunks]
        plan = self._plan(decode, new_pages, chunks, admissions, *widest)
        self._may_leave_out = plan.is_masked and not leaves_out
        return plan

    def _next_rows(self, decode: SlotIds) -> SlotIds:
        """Returns which of the slots `decode`, all that could, do decode in the next step.

        A row that waits for a mask allows no drafts and no bursts, and the step waits for the host. So after such a
        step the other rows have one for themselves, where they are not fewer: 15 rows beside one got two to four times
        as many tokens this way, and the one half to a third (by hand, demo model, bursts of 8, two busy cores).
        """
        if not self._may_leave_out or self._waiting_ids or self._beams or len(self.slots.prefilling()):
            return decode
        waits = self._constrained.waits(decode)
        return decode if 2 * int(waits.sum()) > len(decode) else decode[~waits]

    def _take_forced(self, slot: int, tokens: list[int]) -> _Chunk:
        """Makes `tokens` known, so that the row computes them as it would compute a prompt."""
        self._constrained.take_forced(slot, tokens)
        start, end = int(self.slots.num_computed[slot]), int(self.slots.num_known[slot])
        return _Chunk(slot, start, end - start, yields=True, of_prompt=False)

    def _widest(self, decode: SlotIds, num_steps: int, num_drafts: int) -> tuple[int, int]:
        """Returns the most tokens that a row of `decode` may get in this step, and its drafts in each decode step.

        Where a prompt is computed, or somebody wants more of each token, that is one token.
        """
        slots = self.slots
        if self._waiting_ids:  # for a slot or pages, which this step may free
            num_steps = 1
        if num_steps == 1 + num_drafts == 1 or self._beams or slots.have_tokens_read(decode):
            return 1, 0
        if len(slots.prefilling()):
            return 1, 0
        width = self._constrained.width(decode, num_steps * (1 + num_drafts))
        if width <= num_drafts:  # not even one step with all of its drafts
            return min(width, num_steps), 0
        return width - width % (1 + num_drafts), num_drafts

    def update(self, plan: StepPlan, output: StepOutput) -> StepUpdate:
        """Brings in what `plan` yielded: appends the tokens, and ends requests that met a stop id or their limit.

        A row that yielded fewer tokens than it might have is that much shorter than `schedule` took it for.
        """
        slots = self.slots
        of_rows = plan.slots.astype(np.intp)  # numpy would do it again wherever the slots are an index
        is_present = slots.epoch[of_rows] == plan.epochs
        scored = tuple(self._scored(plan, is_present)) if plan.scores_prompts else ()
        pooled = tuple(self._pooled(plan, is_present)) if POOLED.name in plan.readouts else ()
        rows = (is_present & plan.samples).nonzero()[0]
        at = of_rows[rows]
        tokens, counts = output.tokens[rows], output.counts[rows]  # copies
        refused: dict[int, Finished] = {}
        if is_constrained := some(slots.is_constrained):
            refused = self._constrained.take(plan, rows, at, tokens, counts)
        missing = plan.max_new[rows] - counts
        if np.count_nonzero(missing):
            slots.num_tokens[at] -= missing
            slots.num_computed[at] -= missing
        num_outputs = slots.num_known[at] - slots.num_prompt[at]
        slots.append_tokens(at, tokens, counts)
        if is_constrained:
            self._constrained.rewind(at)
        # The device ends a row after its first stop id, so only the last token can be one.
        last = tokens[:, 0] if plan.width == 1 else tokens[np.arange(len(rows)), np.maximum(counts, 1) - 1]
        yields = counts > 0
        stops = slots.stops(at, last) & yields
        if some(stops):
            stops &= num_outputs + counts > slots.min_tokens[at]
            # The device computes no KV of a stop token, although a step in flight was planned to.
            slots.num_computed[at[stops]] = slots.num_known[at[stops]] - 1
        ends = stops | (slots.num_known[at] >= slots.limit[at])
        if self._beams:
            ends &= ~slots.is_beam[at]  # their search says when they end
        repeats = self._cut_repetitions(at, tokens, counts, ends)
        reports = yields
        if refused:  # a request may end after forced tokens
            reports = yields.copy()
            reports[list(refused)] = True
        num_forced = slots.num_unreported[at] * reports
        started = tuple([self._tenant(slot) for slot in at[reports & (num_outputs == num_forced)].tolist()])
        emitted = tuple(self._emitted(rows, at, tokens, counts, num_forced)) if some(slots.watched) else ()
        if np.count_nonzero(num_forced):
            slots.num_unreported[at[reports]] = 0
        finished = [
            _repeated(self._tenant(at[i])) if repeats[i] else _ended(self._tenant(at[i]), int(last[i]), bool(stops[i]))
            for i in (ends | repeats).nonzero()[0]
        ]
        finished += [end for index, end in refused.items() if not (ends | repeats)[index]]
        for end in finished:
            self.finish(end.request.request_id)
        searched, forks = self._search(rows, at, output) if self._beams else ((), ())
        finished += (*self._failed.values(), *searched)
        self._failed.clear()
        num_new = int(counts.sum() + num_forced.sum())
        return StepUpdate(num_new, started, emitted, tuple(finished), scored, pooled, forks)

    def _search(self, rows: SlotIds, at: SlotIds, output: StepOutput) -> tuple[tuple[Finished, ...], tuple[Fork, ...]]:
        """Lets the searches choose among what the beams at `at` propose, whose rows of `output` are `rows`."""
        row_of = {slot: row for slot, row in zip(at.tolist(), rows.tolist(), strict=True) if self.slots.is_beam[slot]}
        searches = {request.request_id: request for request in map(self._tenant, row_of)}
        finished: list[Finished] = []
        forks: dict[str, list[Fork]] = {}
        for request_id, request in searches.items():
            group = self._beams.of(request)
            if group is None:  # preempted by another group
                continue
            survivors = group.search.advance([_proposed(group, output, row_of[slot]) for slot in group.slots])
            if group.search.is_over:
                finished.append(Finished(request, FinishReason.STOP, beams=tuple(group.search.best())))
                self.finish(request_id)
                continue
            sources = self._beams.keep(group, survivors)
            self._slot_of[request_id] = sources[0]
            while not self._beams.can_fork(sources):
                forks.pop(self._preempt_last().request_id, None)
                if self._beams.of(request) is None:
                    break
            else:
                forks[request_id] = self._beams.fork(group, sources, survivors)
        return tuple(finished), tuple(fork for of_one in forks.values() for fork in of_one)

    def masks(self, plan: StepPlan, num_words: int) -> list[tuple[int, Ints]]:
        """Returns the slots of `plan` that wait for a mask and still have their tenant, with the masks i32[num_words].

        A request whose constraint fails ends, and the next update says so.
        """
        masks, failed = self._constrained.masks(plan, num_words)
        for end in failed:
            self.finish(end.request.request_id)
            self._failed[end.request.request_id] = end
        return masks

    def _cut_repetitions(self, at: SlotIds, tokens: Ints, counts: Ints, ends: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Returns which rows repeat themselves, bool[len(at)], and lowers their `counts` to the end of the repetition.

        A row whose last token `ends` it anyhow ends for that reason.
        """
        repeats = np.zeros(len(at), np.bool_)
        if not some(self.slots.detects_repetition):
            return repeats
        for index in np.flatnonzero(self.slots.detects_repetition[at]):
            request, count = self._tenant(at[index]), int(counts[index])
            assert request.repetition is not None
            end = request.repetition.first_end(tokens[index, :count].tolist(), request.sampling_params.min_tokens)
            if end is not None and not (end == count and ends[index]):
                repeats[index] = True
                self.slots.num_known[at[index]] -= count - end
                counts[index] = end
        return repeats

    def _emitted(
        self, rows: SlotIds, at: SlotIds, tokens: Ints, counts: Ints, num_forced: NDArray[np.int32]
    ) -> Iterator[Emitted]:
        """Yields the new tokens of requests that somebody watches, row by row in order, forced ones first."""
        width = tokens.shape[1]
        watched = self.slots.watched[at]
        row, index = np.nonzero(watched[:, None] & (np.arange(width) < counts[:, None]))
        found = (at[row].tolist(), (rows[row] * width + index).tolist(), tokens[row, index].tolist())
        unreported = self.slots.num_unreported
        for slot, place, token in zip(*found, strict=True):
            if unreported[slot]:
                yield from self._emitted_forced(slot, place, 1)  # its row yields one token
            yield Emitted(self._tenant(slot), place, token)
        for ended in np.flatnonzero(watched & (counts == 0) & (num_forced > 0)).tolist():
            yield from self._emitted_forced(int(at[ended]), int(rows[ended]) * width, 0)

    def _emitted_forced(self, slot: int, place: int, num_behind: int) -> Iterator[Emitted]:
        """Yields the tokens of `slot` that no update has reported. So many others follow them."""
        end = int(self.slots.num_known[slot]) - num_behind
        for token in self.slots.token_ids[slot, end - self.slots.num_unreported[slot] : end].tolist():
            yield Emitted(self._tenant(slot), place, token)

    def finish(self, request_id: str) -> Request | None:
        """Ends a waiting or running request now: its pages are free for the next step. None if there is none.

        Output of steps in flight is ignored. (Their KV writes are not: they land before any later step's, and
        whoever gets the pages next writes a position before reading it.)
        """
        if (failed := self._failed.pop(request_id, None)) is not None:
            return failed.request
        waiting = self._waiting_ids.pop(request_id, None)
        if self._loading.pop(request_id, None) is not None:
            self._computing.difference_update(self._loads.drop(request_id).hashes)
        if waiting is not None:
            self._num_waiting_tokens -= waiting.num_tokens
            self._loads.forget(waiting)
            return waiting
        slot = self._slot_of.get(request_id)
        return None if slot is None else self._release(slot)

    # Growing: the pages for the most tokens that every decoding request may get in a step.

    def _free_unseen(self) -> None:
        """Frees pages that left a window. A row's next token is at least the one after those that the host knows."""
        if not self.cache.has_windows:
            return
        slots = self.slots
        at = np.flatnonzero(slots.active)
        self.cache.free_unseen(at, np.minimum(slots.num_computed[at], slots.num_known[at] - 1))

    def _grow(self, decode: SlotIds, width: int, forced: Mapping[int, list[int]] | None = None) -> Opened | None:
        """Returns the pages that decoding slots may open for `width` tokens each, or None when there are not enough.

        A row with `forced` tokens opens what it needs to compute them.
        """
        slots = self.slots
        # The last token's KV is not computed by the step that yields it.
        ends = np.minimum(slots.num_computed[decode] + width, slots.limit[decode] - 1)
        for index, slot in enumerate(decode.tolist() if forced else ()):
            if forced and slot in forced:
                ends[index] = slots.num_known[slot] + len(forced[slot])
        return self.cache.grow(decode, ends)

    def _grow_by_preemption(self) -> tuple[SlotIds, Opened]:
        while True:
            victim = max(self._slot_of.values(), key=lambda slot: self._tenant(slot).key)
            if self.num_running == 1 and self.slots.num_known[victim] < self.slots.num_tokens[victim]:
                # Its tokens in flight will free pages that leave its window. Preempted, it would lose these tokens,
                # compute them again, and come to this point again, for ever.
                return self.slots.decoding()[:0], self.cache.no_entries
            self._preempt_last()
            decode = self.slots.decoding()
            new_pages = self._grow(decode, width=1)
            if new_pages is not None:
                return decode, new_pages

    def _preempt_last(self) -> Request:
        """Takes slot and pages from the last running request in the queue's order, and returns it to the queue."""
        victim = max(self._slot_of.values(), key=lambda slot: self._tenant(slot).key)
        watched = bool(self.slots.watched[victim])
        num_saves = len(self._saves)
        request = self._release(victim)
        del self._saves[num_saves:]  # the step that is planned now may write into these pages
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(request, watched)
        return request

    def preempt_all(self) -> None:
        """Returns all running requests to the queue, without their pages. Their tokens stay the same."""
        while self._slot_of:
            self._preempt_last()

    # Prefill: chunks of running prompts first, then new requests in queue order.

    def _fit(self, sizes: StepSizes, budget: int, prefilling: SlotIds, num_decode_tokens: int, num_decode: int) -> int:
        """Returns the budget, or less where a smaller step and another one are quicker than one that is mostly padding.

        Prompts that are cached in part, or find no pages, need less than is counted here: then the cut is none. Where
        more wait than there are slots, the count is a guess.
        """
        num_tokens = self._num_uncomputed(prefilling)
        num_rows = num_decode + len(prefilling)
        most_rows = num_rows + self.slots.num_free
        for _, request, _ in self._waiting:
            if num_tokens >= budget or num_rows == most_rows:
                break
            if self._waiting_ids.get(request.request_id) is request:  # it has not ended while it waited
                num_tokens += request.num_tokens
                num_rows += 1
        if not 0 < num_tokens < budget:
            return budget
        cut = sizes.prompt_tokens(num_decode_tokens, num_tokens, num_rows)
        return cut if cut < num_tokens else budget

    def _num_uncomputed(self, prefilling: SlotIds) -> int:
        return int((self.slots.prefill_len[prefilling] - self.slots.num_computed[prefilling]).sum())

    def _continue_prefills(self, chunks: list[_Chunk], opened: list[Opened], prefilling: SlotIds, budget: int) -> int:
        for slot in sorted(prefilling.tolist(), key=lambda slot: self._tenant(slot).key):
            if budget == 0:
                break
            chunk = self._next_chunk(slot, budget, chunks)
            if not chunk.length:  # it waits for room for its scores
                continue
            chunks.append(chunk)
            opened.append(self.cache.cover(slot, chunks[-1].end))
            budget -= chunks[-1].length
        return budget

    def _next_chunk(self, slot: int, budget: int, chunks: Sequence[_Chunk]) -> _Chunk:
        start, end = int(self.slots.num_computed[slot]), int(self.slots.prefill_len[slot])
        length = min(budget, end - start)
        if self._tenant(slot).wants_wide_scores:
            length = min(length, self._score_room(chunks))
        return _Chunk(slot, start, length, yields=start + length == end)

    def _score_room(self, chunks: Sequence[_Chunk]) -> int:
        """Returns how many tokens may still be computed of prompts that want wide scores, beside `chunks`."""
        return SCORE_BATCH - sum(chunk.length for chunk in chunks if self._tenant(chunk.slot).wants_wide_scores)

    def _num_rows_left(self, room: StepRoom | None) -> int:
        """Returns how many more slots may be taken."""
        num_free = self.slots.num_free
        return num_free if room is None else min(num_free, room.num_rows - self.slots.num_active)

    def _admit(self, chunks: list[_Chunk], admissions: list[Admission], budget: int, room: StepRoom | None) -> None:
        if self._slot_of and not self.policy.joins_running:
            return
        postponed: list[_Queued] = []
        # No more are looked past than there are slots: thousands may wait for one new system prompt.
        while budget > 0 and self._waiting and len(postponed) < self.slots.num_slots:
            # Requests that wait for their pages have rows, or these would be gone again before their turn.
            num_rows = self._num_rows_left(room) - len(self._loads)
            if num_rows <= 0:
                break
            key, request, watched = self._waiting[0]
            if self._waiting_ids.get(request.request_id) is not request:  # ended while it waited
                heapq.heappop(self._waiting)
                continue
            prefix = self._cached_prefix(request)
            has_no_room = request.wants_wide_scores and not self._score_room(chunks)
            if has_no_room or self._soon_cached(request, prefix.num_pages):
                postponed.append(heapq.heappop(self._waiting))
                continue
            # A prompt has room for all of it at once, so a chunk never waits for pages that a younger one holds.
            target = request.limit - 1 if self.policy.reserves_limit else request.num_tokens
            num_forks = 0 if request.num_beams is None else request.num_beams - 1
            # A search alone may have more beams than there are rows now, or it would wait, and nothing would run.
            has_rows = (num_rows if self._slot_of else self.slots.num_free - len(self._loads)) > num_forks
            if not has_rows or not self.cache.can_take(prefix, target, num_forks):
                break
            queued = heapq.heappop(self._waiting)
            if self._begin_load(queued, prefix):
                continue
            del self._waiting_ids[request.request_id]
            self._num_waiting_tokens -= request.num_tokens
            num_cached = prefix.num_pages * self.cache.page_size
            slot = self.slots.occupy(request, num_cached, watched)
            self.cache.take(slot, prefix, target)
            self._slot_of[request.request_id] = slot
            self._offer_pages(slot, 0, request.page_hashes[: prefix.num_pages])
            if request.constraint is not None:
                self._constrained.open(slot)
            if request.search is not None:
                self._beams.open(request, request.search, slot)
            self._computing.update(self._uncomputed_hashes(slot))
            if request.num_cached_tokens is None:
                request.num_cached_tokens = min(num_cached, request.num_prompt_tokens)
            chunks.append(self._next_chunk(slot, budget, chunks))
            self.cache.cover(slot, chunks[-1].end)
            budget -= chunks[-1].length
            admissions.append(Admission(slot, request, self.cache.tables(slot), num_cached))
        for entry in postponed:
            heapq.heappush(self._waiting, entry)

    def _cached_prefix(self, request: Request) -> CachedPrefix:
        """Returns the pages that begin `request` and are cached."""
        return self.cache.match(self._shared_hashes(request))

    def _shared_hashes(self, request: Request) -> list[bytes]:
        """Returns the hashes of pages that `request` may have from others.

        The last token is always computed, because its logits are needed.
        """
        if not self.cache.enable_prefix_caching or not request.reads_prefix_cache:
            return []
        page_size = self.cache.page_size
        return request.hashes(page_size)[: (request.num_tokens - 1) // page_size]

    # Pages that come from elsewhere, and go there.

    def _begin_load(self, queued: _Queued, prefix: CachedPrefix) -> bool:
        """Begins to load what follows the cached `prefix` of a request that could be admitted now, if that is possible.

        Others that need the same pages wait for them.
        """
        request = queued[1]
        load = self._loads.begin(request, prefix, self._shared_hashes(request))
        if load is None:
            return False
        self._loading[request.request_id] = queued
        self._computing.update(load.hashes)
        return True

    @property
    def num_asked_pages(self) -> int:
        """Pages that were looked for elsewhere."""
        return self._loads.num_asked

    @property
    def num_loaded_pages(self) -> int:
        """Pages that came from elsewhere."""
        return self._loads.num_loaded

    def take_loads(self) -> list[PageLoad]:
        """Returns the loads that began since the last call. Each ends with `loaded`, whatever becomes of it."""
        return self._loads.take_new()

    def is_wanted(self, load: PageLoad) -> bool:
        """Returns whether the request of `load` still waits for it.

        Elsewhere its pages may be somebody else's by now.
        """
        return self._loads.is_open(load)

    def loaded(self, load: PageLoad, num_loaded: int) -> None:
        """Ends `load`, whose first `num_loaded` pages are filled: its request is admitted next, or has ended."""
        if self._loads.is_open(load):
            self._loads.end(load, num_loaded)
            self._computing.difference_update(load.hashes)
            heapq.heappush(self._waiting, self._loading.pop(load.request.request_id))

    def take_saves(self) -> list[PageSave]:
        """Returns the pages that became full since the last call. Steps that were dispatched compute them.

        It is called before the next step is dispatched, which may write other tokens into them.
        """
        saves, self._saves = self._saves, []
        return saves

    def _soon_cached(self, request: Request, num_hits: int) -> bool:
        """Returns whether a running request is computing this one's next page now, so that waiting saves the work.

        It makes `n` samples of one prompt, and a burst of requests under one new system prompt, cost one prefill.
        It is False where only a new batch takes newcomers in: the wait would be longer than the work.
        """
        if not self.policy.joins_running or not self.cache.enable_prefix_caching or not request.reads_prefix_cache:
            return False
        if num_hits >= (request.num_tokens - 1) // self.cache.page_size:
            return False
        return request.page_hashes[num_hits] in self._computing

    # Bookkeeping.

    def _plan(
        self,
        decode: SlotIds,
        new_pages: Opened,
        chunks: list[_Chunk],
        admissions: list[Admission],
        width: int,
        num_drafts: int,
    ) -> StepPlan:
        slots = self.slots
        num_decode, num_rows = len(decode), len(decode) + len(chunks)
        rows = np.concatenate([decode, [chunk.slot for chunk in chunks]], dtype=np.intp) if chunks else decode
        starts = slots.num_computed[rows]
        lengths = np.ones(num_rows, np.int32)
        max_new = lengths.copy()
        if width > 1:
            most = self._constrained.most(decode, width)
            max_new[:num_decode] = np.minimum(most, slots.limit[decode] - slots.num_tokens[decode])
        next_tokens = np.full(num_rows, NOT_SCORED, np.int32)
        are_prompts = np.zeros(num_rows, np.bool_)
        for row, chunk in enumerate(chunks, num_decode):
            lengths[row] = chunk.length
            max_new[row] = chunk.yields
            are_prompts[row] = chunk.of_prompt
            if chunk.of_prompt and self._tenant(chunk.slot).wants_scores:
                next_tokens[row] = 0 if chunk.yields else slots.token_ids[chunk.slot, chunk.end]
        inputs = [slots.token_ids[c.slot, c.start : c.end] for c in chunks]
        plan = StepPlan(
            slots=rows.astype(np.int32),
            epochs=slots.epoch[rows],
            starts=starts,
            lengths=lengths,
            new_pages=new_pages,
            max_new=max_new,
            num_decode=num_decode,
            token_ids=np.concatenate(inputs) if inputs else np.empty(0, np.int32),
            next_tokens=next_tokens,
            wants_logprobs=some(slots.wants_logprobs) and some(slots.wants_logprobs[rows]),
            width=width,
            num_drafts=num_drafts,
            masked=self._constrained.masked(rows, num_decode, max_new),
            readouts=slots.readouts(rows, are_prompts, max_new > 0),
            admissions=tuple(admissions),
        )
        slots.num_computed[rows] += lengths if width == 1 else max_new
        slots.num_tokens[rows] += max_new
        if self._beams:
            slots.is_held[rows] = slots.is_beam[rows] & (max_new > 0)
        for chunk in chunks:
            if chunk.of_prompt:
                self._register_computed(chunk.slot)
        return plan

    def _scored(self, plan: StepPlan, is_present: NDArray[np.bool_]) -> Iterator[Scored]:
        """Returns what `plan` scored of the rows whose tenants are still there."""
        first = np.cumsum(plan.lengths) - plan.lengths
        if (is_wide := plan.readouts.get(WIDE_SCORES.name)) is not None:
            wide_lengths = plan.lengths * is_wide
            first = np.where(is_wide, np.cumsum(wide_lengths) - wide_lengths, first)
        for row in np.flatnonzero(is_present & (plan.next_tokens != NOT_SCORED)):
            request = self._tenant(plan.slots[row])
            start = int(plan.starts[row]) + 1  # the first token is after none
            end = min(start + int(plan.lengths[row]), request.num_prompt_tokens)
            if start < end:
                yield Scored(request, range(start, end), int(first[row]))

    def _pooled(self, plan: StepPlan, is_present: NDArray[np.bool_]) -> Iterator[Pooled]:
        """Returns the rows of `plan` that are pooled and whose tenants are still there."""
        for row in np.flatnonzero(is_present & plan.readouts[POOLED.name]).tolist():
            yield Pooled(self._tenant(plan.slots[row]), int(plan.starts[row]), row)

    def _register_computed(self, slot: int) -> None:
        """Lets the prefix cache know the full pages of `slot` whose KV is computed and whose tokens are known."""
        known = self.slots.num_prompt if self.slots.is_beam[slot] else self.slots.num_known  # not what beams try out
        count = int(min(self.slots.num_computed[slot], known[slot]))
        first = int(self.cache.num_registered[slot])
        hashes = self.cache.register(slot, count, self._tenant(slot))
        self._computing.difference_update(hashes)
        self._offer_pages(slot, first, hashes)

    def _offer_pages(self, slot: int, first: int, hashes: list[bytes]) -> None:
        """Lets pages of `slot` with these hashes be saved, from column `first` on."""
        if hashes and self._loads.has_source:
            pages = self.cache.pages(slot, first, len(hashes))
            self._saves.append(PageSave(self._tenant(slot), tuple(hashes), pages))

    def _uncomputed_hashes(self, slot: int) -> list[bytes]:
        return self._tenant(slot).page_hashes[int(self.cache.num_registered[slot]) :]

    def _release(self, slot: int) -> Request:
        """Frees slot and pages. Generated pages enter the prefix cache here, off the path of a decode step."""
        self._computing.difference_update(self._uncomputed_hashes(slot))
        request = self._tenant(slot)
        group = self._beams.of(request)
        if group is None:
            request.output_token_ids = self.slots.outputs(slot)
            request.num_unreported = int(self.slots.num_unreported[slot])
        self._register_computed(slot)
        if group is not None:  # all beams together: a preempted search starts again
            self._beams.close(group)
        else:
            self.cache.release(slot)
            self.slots.vacate(slot)
        del self._slot_of[request.request_id]
        return request

    def _enqueue(self, request: Request, watched: bool) -> None:
        if forced := request.forced(request.limit - request.num_tokens - 1):
            assert request.constraint is not None
            request.constraint.take_forced(forced)
            request.output_token_ids = np.concatenate([request.output_token_ids, np.array(forced, np.int32)])
            request.num_unreported += len(forced)
        self._waiting_ids[request.request_id] = request
        self._num_waiting_tokens += request.num_tokens
        heapq.heappush(self._waiting, (request.key, request, watched))

    def _tenant(self, slot: int) -> Request:
        tenant = self.slots.tenants[slot]
        assert tenant is not None, f"slot {slot} is vacant"
        return tenant

    def running(self) -> Iterator[tuple[int, Request]]:
        """Returns the slot and request of all that runs, in the queue's order, with one slot of a beam search."""
        at = sorted(self._slot_of.values(), key=lambda slot: self._tenant(slot).key)
        return ((slot, self._tenant(slot)) for slot in at)

    def check_invariants(self) -> None:
        """Asserts that slots, pages and queue agree. For tests: costs O(pages)."""
        self.slots.check_invariants()
        self.cache.check_invariants(np.flatnonzero(self.slots.active).tolist())
        self._beams.check_invariants()
        assert {rid: self._tenant(s).request_id for rid, s in self._slot_of.items()} == {r: r for r in self._slot_of}
        assert not self._waiting_ids.keys() & self._slot_of.keys(), "a request waits and runs"
        queued = {request.request_id for _, request, _ in self._waiting} | self._loading.keys()
        assert self._loading.keys() <= self._waiting_ids.keys(), "a request that has ended is loaded"
        assert all(request_id in self._loads for request_id in self._loading), "a request waits for no load"
        assert len(self._loading) == len(self._loads), "a load is nobody's"
        waiting_tokens = sum(request.num_tokens for request in self._waiting_ids.values())
        assert self._num_waiting_tokens == waiting_tokens, "the tokens that wait are miscounted"
        assert self._waiting_ids.keys() <= queued, "a waiting request is not in the queue"
        if not self._slot_of and not self._loading:
            assert self.cache.is_empty, "an idle scheduler holds pages"
            assert not self._computing, "an idle scheduler computes pages"


def _proposed(group: BeamGroup, output: StepOutput, row: int) -> Candidates:
    """Returns the next tokens that the beam of `row` proposes."""
    if group.request.sampling_params.wants_distributions:
        distributions = DISTRIBUTIONS.of(output.reports)
        assert distributions is not None, "a step with beams was planned without distributions"
        return Candidates.best(distributions[row], group.search.params.num_candidates)
    assert output.logprobs is not None, "a step with beams was planned without log-probabilities"
    return Candidates(output.logprobs.top_ids[row], output.logprobs.top[row])


def _ended(request: Request, last_token: int, stopped: bool) -> Finished:
    """Returns the end of `request` by its last token, a stop id if it `stopped`, or by its limit."""
    if not stopped:
        return Finished(request, FinishReason.LENGTH)
    # As in vLLM, an EOS that counts is never reported, even if the caller gave it as a stop token, too.
    is_eos = last_token in request.eos_token_ids and not request.sampling_params.ignore_eos
    asked_for = last_token in request.sampling_params.stop_token_ids and not is_eos
    return Finished(request, FinishReason.STOP, last_token if asked_for else None, hides_last=True)


def _repeated(request: Request) -> Finished:
    """Returns the end of `request` by a repetition, told as vLLM tells it."""
    return Finished(request, FinishReason.REPETITION, "repetition_detected")


def check_token_budget(max_num_batched_tokens: int, max_num_seqs: int) -> None:
    """Raises ValueError for a step that could not hold a token of every running request."""
    if max_num_batched_tokens < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens {max_num_batched_tokens} must be at least max_num_seqs {max_num_seqs}, "
            "so that every running request can decode in every step: raise the one or lower the other"
        )
