"""The scheduler: which tokens of which requests the next step computes.

There is no prefill phase and no decode phase. Each running request has tokens and computed tokens; a step lets
the second count catch up with the first, under one token budget: decode rows first, then the prefill chunks of
running requests, then new requests. The scheduler counts tokens, it does not wait for them: `schedule` may run
before the output of the last step is known (`slots.py` says how), and `update` brings the ids in later.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from jaxvllm.core import step_outcome
from jaxvllm.core.constrained_rows import ConstrainedRows
from jaxvllm.core.errors import ParameterError
from jaxvllm.core.kv_cache import KVCache
from jaxvllm.core.lora import LoraSlots
from jaxvllm.core.page_loads import PageLoad, PageSave, PageSource
from jaxvllm.core.pause import PauseState
from jaxvllm.core.policy import Policy
from jaxvllm.core.prefills import Opened, Prefills, StepPrompts
from jaxvllm.core.request import FinishReason, Request
from jaxvllm.core.running_requests import RunningRequests
from jaxvllm.core.running_searches import RunningSearches
from jaxvllm.core.shared_pages import SharedPages
from jaxvllm.core.side_store import SideStore
from jaxvllm.core.slots import SlotIds, SlotTable, some
from jaxvllm.core.step_plan import (
    Finished,
    Fork,
    Ints,
    PageEntries,
    StepOutput,
    StepPlan,
    StepRoom,
    StepUpdate,
)
from jaxvllm.core.step_rows import Chunk, StepRows
from jaxvllm.core.step_sizes import StepSizes
from jaxvllm.core.waiting_queue import WaitingQueue
from jaxvllm.core.weight_version import begin_version


class Scheduler:
    """Owns the queue, the slots and the KV cache. Calls are `add`, `schedule`, `update`, `finish`; none blocks."""

    def __init__(
        self,
        slots: SlotTable,
        cache: KVCache,
        policy: Policy,
        max_num_batched_tokens: int,
        source: PageSource | None = None,
        side_store: SideStore | None = None,
        lora_slots: LoraSlots | None = None,
    ):
        """Begins without requests. `source` may have pages that the prefix cache does not have.

        Without a `side_store` no prompt may have side inputs, and without `lora_slots` no request an adapter.
        """
        check_token_budget(max_num_batched_tokens, slots.num_slots)
        self.slots = slots
        self.cache = cache
        self.policy = policy
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_preemptions = 0
        self.queue = WaitingQueue()
        self._running = RunningRequests(slots)
        self._beams = RunningSearches(slots, cache)
        self._constrained = ConstrainedRows(slots, may_guess=not cache.has_states)
        self._shared = SharedPages(slots, cache, source)
        self.side_store = SideStore(0) if side_store is None else side_store
        self.lora_slots = LoraSlots(0) if lora_slots is None else lora_slots
        parts = self._running, self._shared, self.side_store, self._constrained, self._beams, self.lora_slots
        self._prefills = Prefills(slots, cache, policy, self.queue, *parts)
        self._may_leave_out = False  # rows that wait for masks, of the next step: they were in the last one
        self._failed: dict[str, Finished] = {}  # requests that have ended since the last update, by id
        self._pause = PauseState.UNPAUSED

    @property
    def num_waiting(self) -> int:
        return len(self.queue)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the waiting requests."""
        return self.queue.num_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens of the running requests' prompts that no step so far computes."""
        return self._prefills.num_uncomputed(self.slots.prefilling())

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_decoding(self) -> int:
        """The number of rows that decode in the next step, if it computes no prompt."""
        return len(self._next_rows(self.slots.decoding()))

    @property
    def has_work(self) -> bool:
        """Whether a step may compute something, now or when pages or outputs have come."""
        match self._pause:
            case PauseState.UNPAUSED:
                return bool(self.queue or self._running)
            case PauseState.PAUSED_NEW:
                return bool(self._running) or self.queue.has_turns
            case PauseState.PAUSED_ALL:
                return False

    @property
    def pause_state(self) -> PauseState:
        return self._pause

    @pause_state.setter
    def pause_state(self, state: PauseState) -> None:
        """Pauses from the next `schedule` on. Requests that are added meanwhile wait; those that run keep their pages.

        A request that was preempted has begun, so that it goes on under PAUSED_NEW.
        """
        self._pause = state
        self.queue.hold(state is PauseState.PAUSED_NEW)

    def __contains__(self, request_id: str) -> bool:
        """Returns whether it has this request, waiting or running, or one whose end no update has told yet."""
        return any(request_id in of for of in (self.queue, self._running, self._failed))

    def add(self, request: Request, watched: bool = False) -> None:
        """Queues `request`. `watched`: `update` reports each of its tokens, not only the end.

        Tokens with which its constraint begins are known from now on, and computed with its prompt.

        Raises ValueError for an id that is in use and for a request that the whole pool could not hold.
        """
        if request.request_id in self.queue or request.request_id in self._running:
            raise ValueError(f"request id {request.request_id!r} is in use: choose another")
        num_side_rows = sum(map(len, request.asked.prompt.side_inputs))
        self.check_fits(request.num_tokens, request.limit, request.num_beams, num_side_rows)
        self.queue.push(request, watched)

    def check_fits(
        self, num_prompt_tokens: int, limit: int, num_beams: int | None = None, num_side_rows: int = 0
    ) -> None:
        """Raises ValueError for a request that could not finish even if it had every page and slot."""
        if num_beams is not None and num_beams > self.slots.num_slots:
            raise ParameterError(
                f"beam_width (n over HTTP) {num_beams} exceeds the {self.slots.num_slots} sequences that run at once: "
                "lower it, or raise max_num_seqs",
                "n",
            )
        if num_side_rows > self.side_store.num_rows:
            raise ParameterError(
                f"side inputs for {num_side_rows} positions need as many rows, and the store has "
                f"{self.side_store.num_rows}: shorten them, or raise max_model_len"
            )
        if (shortage := self.cache.shortage(limit - 1, num_prompt_tokens, num_beams)) is not None:
            beams = "" if num_beams is None else f" for each of {num_beams} beams"
            raise ParameterError(
                f"prompt of {num_prompt_tokens} tokens with up to {limit - num_prompt_tokens} new ones{beams} needs "
                f"{shortage.needed} pages of {self.cache.page_size} tokens, but the pool{shortage.layers} has "
                f"{shortage.usable}: lower max_tokens, shorten the prompt, or give the engine more memory",
                "max_tokens",
            )

    def num_cached_tokens(self, request: Request) -> int:
        """Returns how many tokens of `request` are in the prefix cache, so that they would not be computed."""
        return self._shared.prefix(request).num_pages * self.cache.page_size

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
        if self._pause is PauseState.PAUSED_ALL:
            return None
        self._free_unseen()
        self._release_side_rows()
        most = self.max_num_batched_tokens if room is None else min(self.max_num_batched_tokens, room.num_tokens)
        decoding = self.slots.decoding()
        decode = self._next_rows(decoding)
        leaves_out = len(decode) < len(decoding)
        is_constrained = self.slots.is_constrained
        constrained = decode[is_constrained[decode]] if some(is_constrained) else decode[:0]
        forced = self._constrained.forced(constrained, max(most - len(decode), 0))
        most_of_row = (1, 0) if forced else self._most_of_row(decode, num_steps, num_drafts)
        # Waiting requests get pages before those that only a wide step needs.
        num_first = 1 if self.queue else most_of_row[0]
        new_pages = self._grow(decode, num_first, forced)
        if new_pages is None and (num_first > 1 or forced):
            most_of_row, forced = (1, 0), {}
            new_pages = self._grow(decode, 1)
        preempts = new_pages is None
        if new_pages is None:
            decode, new_pages = self._grow_by_preemption()
        prompts = StepPrompts()
        mixes = self.policy.mixes_phases
        num_decode_tokens = len(decode) + self._constrained.num_extra(forced)
        budget = most - (num_decode_tokens if mixes else 0)
        if budget > 0 and (self.queue or len(decode) < self.slots.num_active):
            running = self.slots.prefilling()
            if sizes is not None:
                rows = (num_decode_tokens, len(decode)) if mixes else (0, 0)
                budget = self._prefills.fit(sizes, budget, running, *rows)
            # None is admitted beside a preemption, or the victim takes back the pages it lost: under v0, where its
            # prompt would go first, for ever.
            prompts = self._prefills.choose(running, budget, room, admits=not preempts)
        chunks, opened = prompts.chunks, prompts.opened
        if chunks and not mixes:
            self.cache.undo(new_pages)  # decode rows wait while prompts are computed
            decode, new_pages, forced = decode[:0], self.cache.no_entries, {}
        if not chunks and not len(decode):
            return None
        if preempts or chunks:
            most_of_row = (1, 0)
        elif most_of_row[0] > num_first:
            if (more := self._grow(decode, most_of_row[0])) is None:
                most_of_row = (1, 0)
            else:
                opened.append(more)
        if opened:
            new_pages = tuple(map(PageEntries.joined, zip(new_pages, *opened, strict=True)))
        if len(constrained) and (given := self._constrained.given(decode, forced)):
            decode = decode[[slot not in given for slot in decode.tolist()]]
            chunks = [*(self._take_forced(slot, tokens) for slot, tokens in given.items()), *chunks]
        computed = StepRows(decode, chunks, new_pages, prompts.admissions, *most_of_row)
        plan = computed.plan(self.slots, self._constrained, self.side_store)
        if self._beams:
            self.slots.is_undecided[plan.slots] = self.slots.is_beam[plan.slots] & plan.samples
        for chunk in chunks:
            if chunk.of_prompt:
                self._shared.register_computed(chunk.slot)
        self._may_leave_out = plan.is_masked and not leaves_out
        return plan

    def _next_rows(self, decode: SlotIds) -> SlotIds:
        """Returns which of the slots `decode`, all that could, do decode in the next step.

        A row that waits for a mask allows no drafts and no bursts, and the step waits for the host. So after such a
        step the other rows have one for themselves, where they are not fewer: 15 rows beside one got two to four times
        as many tokens this way, and the one half to a third (by hand, demo model, bursts of 8, two busy cores).
        """
        if not self._may_leave_out or self.queue or self._beams or len(self.slots.prefilling()):
            return decode
        waits = self._constrained.waits(decode)
        return decode if 2 * int(waits.sum()) > len(decode) else decode[~waits]

    def _take_forced(self, slot: int, tokens: list[int]) -> Chunk:
        """Makes `tokens` known, so that the row computes them as it would compute a prompt."""
        self._constrained.take_forced(slot, tokens)
        start, end = int(self.slots.num_computed[slot]), int(self.slots.num_known[slot])
        return Chunk(slot, start, end - start, yields=True, of_prompt=False)

    def _most_of_row(self, decode: SlotIds, num_steps: int, num_drafts: int) -> tuple[int, int]:
        """Returns the most tokens that a row of `decode` may get in this step, and its drafts in each decode step.

        Where a prompt is computed, or somebody wants more of each token, that is one token.
        """
        slots = self.slots
        if self.queue:  # for a slot or pages, which this step may free
            num_steps = 1
        if num_steps == 1 + num_drafts == 1 or self._beams or slots.have_tokens_read(decode):
            return 1, 0
        if len(slots.prefilling()):
            return 1, 0
        row_tokens = self._constrained.row_tokens(decode, num_steps * (1 + num_drafts))
        if row_tokens <= num_drafts:  # not even one step with all of its drafts
            return min(row_tokens, num_steps), 0
        return row_tokens - row_tokens % (1 + num_drafts), num_drafts

    def update(self, plan: StepPlan, output: StepOutput) -> StepUpdate:
        """Brings in what `plan` yielded: appends the tokens, and ends requests that met a stop id or their limit.

        A row that yielded fewer tokens than it might have is that much shorter than `schedule` took it for.
        """
        outcome = step_outcome.bring_in(self.slots, self._constrained, plan, output, has_beams=bool(self._beams))
        for end in outcome.finished:
            self.finish(end.request.request_id)
        searched, forks = self._search(outcome.rows, outcome.at, output) if self._beams else ((), ())
        finished = (*outcome.finished, *self._failed.values(), *searched)
        self._failed.clear()
        return StepUpdate(
            outcome.num_new_tokens,
            outcome.started,
            outcome.emitted,
            finished,
            outcome.scored,
            outcome.pooled,
            forks,
            outcome.routed,
        )

    def _search(self, rows: SlotIds, at: SlotIds, output: StepOutput) -> tuple[tuple[Finished, ...], tuple[Fork, ...]]:
        """Lets the searches choose among what the beams at `at` propose, whose rows of `output` are `rows`."""
        row_of = {slot: row for slot, row in zip(at.tolist(), rows.tolist(), strict=True) if self.slots.is_beam[slot]}
        searches = {request.request_id: request for request in map(self.slots.tenant, row_of)}
        finished: list[Finished] = []
        forks: dict[str, list[Fork]] = {}
        for request_id, request in searches.items():
            beams = self._beams.of(request)
            if beams is None:  # preempted by another search
                continue
            candidates = [step_outcome.proposed(beams, output, row_of[slot]) for slot in beams.slots]
            survivors = beams.search.advance(candidates)
            if beams.search.is_over:
                finished.append(Finished(request, FinishReason.STOP, beams=tuple(beams.search.best())))
                self.finish(request_id)
                continue
            sources = self._beams.keep(beams, survivors)
            self._running.put(request_id, sources[0])
            while not self._beams.can_fork(sources):
                forks.pop(self._preempt_last().request_id, None)
                if self._beams.of(request) is None:
                    break
            else:
                forks[request_id] = self._beams.fork(beams, sources, survivors)
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

    def finish(self, request_id: str) -> Request | None:
        """Ends a waiting or running request now: its pages are free for the next step. None if there is none.

        Output of steps in flight is ignored. (Their KV writes are not: they land before any later step's, and
        whoever gets the pages next writes a position before reading it.)
        """
        if (failed := self._failed.pop(request_id, None)) is not None:
            return failed.request
        waiting, was_loading = self.queue.end(request_id)
        if was_loading:
            self._shared.drop_load(request_id)
        if waiting is not None:
            self._shared.loads.forget(waiting)
            return waiting
        slot = self._running.slot(request_id)
        return None if slot is None else self._release(slot)

    def _release_side_rows(self) -> None:
        """Frees the rows of positions that are computed. What rows compute again are tokens after their prompts."""
        for slot, end in self.side_store.holders():
            if self.slots.num_computed[slot] >= end:
                self.side_store.release(slot)

    # Growing: the pages for the most tokens that every decoding request may get in a step.

    def _free_unseen(self) -> None:
        """Frees pages that left a window. A row's next token is at least the one after those that the host knows."""
        if not self.cache.has_windows:
            return
        slots = self.slots
        at = np.flatnonzero(slots.active)
        self.cache.free_unseen(at, np.minimum(slots.num_computed[at], slots.num_known[at] - 1))

    def _grow(self, decode: SlotIds, num_tokens: int, forced: Mapping[int, list[int]] | None = None) -> Opened | None:
        """Returns the pages that decoding slots may open for `num_tokens` each, or None when there are not enough.

        A row with `forced` tokens opens what it needs to compute them.
        """
        slots = self.slots
        # The last token's KV is not computed by the step that yields it.
        ends = np.minimum(slots.num_computed[decode] + num_tokens, slots.limit[decode] - 1)
        for index, slot in enumerate(decode.tolist() if forced else ()):
            if forced and slot in forced:
                ends[index] = slots.num_known[slot] + len(forced[slot])
        return self.cache.grow(decode, ends)

    def _grow_by_preemption(self) -> tuple[SlotIds, Opened]:
        while True:
            victim = self._running.last
            if self.num_running == 1 and self.slots.num_known[victim] < self.slots.num_tokens[victim]:
                # Its tokens in flight will free pages that leave its window. Preempted, it would lose these tokens,
                # compute them again, and come to this point again, for ever.
                return self.slots.decoding()[:0], self.cache.no_entries
            self._preempt_last()
            decode = self.slots.decoding()
            new_pages = self._grow(decode, 1)
            if new_pages is not None:
                return decode, new_pages

    def _preempt_last(self) -> Request:
        """Takes slot and pages from the last running request in the queue's order, and returns it to the queue."""
        victim = self._running.last
        watched = bool(self.slots.watched[victim])
        num_saves = self._shared.num_saves
        request = self._release(victim)
        self._shared.forget_saves(num_saves)  # the step that is planned now may write into these pages
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.queue.push(request, watched)
        return request

    def preempt_all(self) -> None:
        """Returns all running requests to the queue, without their pages. Their tokens stay the same."""
        while self._running:
            self._preempt_last()

    # Weights that are replaced.

    def keep_old_pages(self) -> None:
        """Lets running requests go on with pages of weights that were replaced. Nobody else gets these pages."""
        for slot in np.flatnonzero(self.slots.active).tolist():
            self._shared.keep_old(slot)

    def begin_version(self, name: str) -> None:
        """Takes note that the outputs which updates bring in from now on are of weights of that name."""
        for request in self.queue.requests:
            begin_version(request.weight_starts, len(request.output_token_ids), name)
        for slot, request in self.running():
            num_outputs = int(self.slots.num_known[slot] - self.slots.num_prompt[slot])
            begin_version(request.weight_starts, num_outputs, name)

    # Pages that come from elsewhere, and go there.

    @property
    def num_asked_pages(self) -> int:
        """Pages that were looked for elsewhere."""
        return self._shared.loads.num_asked

    @property
    def num_loaded_pages(self) -> int:
        """Pages that came from elsewhere."""
        return self._shared.loads.num_loaded

    def take_loads(self) -> list[PageLoad]:
        """Returns the loads that began since the last call. Each ends with `loaded`, whatever becomes of it."""
        return self._shared.loads.take_new()

    def is_wanted(self, load: PageLoad) -> bool:
        """Returns whether the request of `load` still waits for it.

        Elsewhere its pages may be somebody else's by now.
        """
        return self._shared.loads.is_open(load)

    def loaded(self, load: PageLoad, num_loaded: int) -> None:
        """Ends `load`, whose first `num_loaded` pages are filled: its request is admitted next, or has ended."""
        if self._shared.end_load(load, num_loaded):
            self.queue.bring_back(load.request.request_id)

    def take_saves(self) -> list[PageSave]:
        """Returns the pages that became full since the last call. Steps that were dispatched compute them.

        It is called before the next step is dispatched, which may write other tokens into them.
        """
        return self._shared.take_saves()

    # Bookkeeping.

    def _release(self, slot: int) -> Request:
        """Frees slot and pages. Generated pages enter the prefix cache here, off the path of a decode step."""
        self._shared.leaving(slot)
        request = self.slots.tenant(slot)
        beams = self._beams.of(request)
        if beams is None:
            request.output_token_ids = self.slots.outputs(slot)
            request.num_unreported = int(self.slots.num_unreported[slot])
        self._shared.register_computed(slot)
        request.has_old_pages = False  # it computes all of them again, if it goes on
        self.side_store.release(slot)
        if beams is not None:  # all beams together: a preempted search starts again
            self._beams.close(beams)
        else:
            self.cache.release(slot)
            self.slots.vacate(slot)
        self._running.remove(request.request_id)
        self.lora_slots.release(request.request_id)
        return request

    def running(self) -> Iterator[tuple[int, Request]]:
        """Returns the slot and request of all that runs, in the queue's order, with one slot of a beam search."""
        return self._running.in_order()

    def check_invariants(self) -> None:
        """Asserts that slots, pages and queue agree. For tests: costs O(pages)."""
        self.slots.check_invariants()
        self.cache.check_invariants(np.flatnonzero(self.slots.active).tolist())
        self._beams.check_invariants()
        self.side_store.check_invariants()
        self.lora_slots.check_invariants()
        using = {request.request_id for _, request in self.running() if request.adapter is not None}
        assert using == self.lora_slots.held.keys(), "an adapter is held by others than those that run with it"
        self._running.check_invariants()
        self.queue.check_invariants()
        assert not any(request_id in self.queue for request_id in self._running), "a request waits and runs"
        loads, aside = self._shared.loads, self.queue.aside
        assert all(request_id in loads for request_id in aside), "a request waits for no load"
        assert len(aside) == len(loads), "a load is nobody's"
        if not self._running and not aside:
            assert self.cache.is_empty, "an idle scheduler holds pages"
            assert not self.side_store.num_held, "an idle scheduler holds rows of side inputs"
            self._shared.check_idle()


def check_token_budget(max_num_batched_tokens: int, max_num_seqs: int) -> None:
    """Raises ValueError for a step that could not hold a token of every running request."""
    if max_num_batched_tokens < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens {max_num_batched_tokens} must be at least max_num_seqs {max_num_seqs}, "
            "so that every running request can decode in every step: raise the one or lower the other"
        )
