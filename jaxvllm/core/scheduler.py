"""The scheduler: which tokens of which requests the next step computes.

There is no prefill phase and no decode phase. Each running request has tokens and computed tokens; a step lets
the second count catch up with the first, under one token budget: decode rows first, then the prefill chunks of
running requests, then new requests. The scheduler counts tokens, it does not wait for them: `schedule` may run
before the output of the last step is known (`slots.py` says how), and `update` brings the ids in later.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.page_pool import PagePool, Pages, pages_for
from jaxvllm.core.plan import NOT_SCORED, Admission, Emitted, Finished, Scored, StepOutput, StepPlan, StepUpdate
from jaxvllm.core.policy import Policy
from jaxvllm.core.request import FinishReason, QueueKey, Request
from jaxvllm.core.slots import SlotIds, SlotTable


@dataclass(frozen=True)
class _Chunk:
    """Part of a prompt to compute in this step."""

    slot: int
    start: int
    length: int
    ends_prompt: bool


class Scheduler:
    """Owns the queue, the slots and the pages. Calls are `add`, `schedule`, `update`, `finish`; none blocks."""

    def __init__(self, slots: SlotTable, pool: PagePool, policy: Policy, max_num_batched_tokens: int):
        check_token_budget(max_num_batched_tokens, slots.num_slots)
        self.slots = slots
        self.pool = pool
        self.policy = policy
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_preemptions = 0
        self._waiting: list[tuple[QueueKey, Request, bool]] = []  # heap; keys are unique
        self._waiting_ids: dict[str, Request] = {}
        self._slot_of: dict[str, int] = {}
        self._computing: set[bytes] = set()  # hashes of prompt pages that running requests are about to compute

    @property
    def num_waiting(self) -> int:
        return len(self._waiting_ids)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the waiting requests. Takes O(waiting)."""
        return sum(request.num_tokens for request in self._waiting_ids.values())

    @property
    def num_running(self) -> int:
        return len(self._slot_of)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting_ids or self._slot_of)

    def add(self, request: Request, watched: bool = False) -> None:
        """Queues `request`. `watched`: `update` reports each of its tokens, not only the end.

        Raises ValueError for an id that is in use and for a request that the whole pool could not hold.
        """
        if request.request_id in self._waiting_ids or request.request_id in self._slot_of:
            raise ValueError(f"request id {request.request_id!r} is in use: choose another")
        self.check_fits(request.num_tokens, request.limit)
        self._enqueue(request, watched)

    def check_fits(self, num_prompt_tokens: int, limit: int) -> None:
        """Raises ValueError for a request that could not finish even if it had every page."""
        needed, usable = pages_for(limit - 1, self.pool.page_size), self.pool.num_pages - 1
        if needed > usable:
            raise ParameterError(
                f"prompt of {num_prompt_tokens} tokens with up to {limit - num_prompt_tokens} new ones needs {needed} "
                f"pages of {self.pool.page_size} tokens, but the pool has {usable}: lower max_tokens, shorten the "
                "prompt, or give the engine more memory",
                "max_tokens",
            )

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens of `request` that would not be computed if it were admitted now: their KV is in the prefix cache."""
        return len(self._hits(request)) * self.pool.page_size

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed before an output in flight arrives or a request comes.

        Never plans more than `max_num_batched_tokens` tokens, and plans every decoding request, but under the
        policy v0 while prompts wait.
        """
        decode = self.slots.decoding()
        new_pages = self._grow(decode)
        preempts = new_pages is None
        if new_pages is None:
            decode, new_pages = self._grow_by_preemption()
        chunks: list[_Chunk] = []
        admissions: list[Admission] = []
        mixes = self.policy.mixes_phases
        budget = self.max_num_batched_tokens - (len(decode) if mixes else 0)
        if budget > 0 and (self._waiting or len(decode) < self.num_running):
            budget = self._continue_prefills(chunks, budget)
            if not preempts:
                # Or the victim takes back the pages it lost: under v0, where its prompt would go first, for ever.
                self._admit(chunks, admissions, budget)
        if chunks and not mixes:
            self._shrink(decode, new_pages)
            decode, new_pages = decode[:0], new_pages[:0]
        if not chunks and not len(decode):
            return None
        return self._plan(decode, new_pages, chunks, admissions)

    def update(self, plan: StepPlan, output: StepOutput) -> StepUpdate:
        """Brings in the sampled ids of `plan`: appends them, and ends requests that met a stop id or their limit."""
        slots = self.slots
        is_present = slots.epoch[plan.slots] == plan.epochs
        scored = tuple(self._scored(plan, is_present)) if plan.scores_prompts else ()
        rows = np.flatnonzero(plan.samples & is_present)
        at = plan.slots[rows]
        token_ids = output.token_ids[rows]
        num_outputs = slots.num_known[at] - slots.num_prompt[at]
        slots.append_tokens(at, token_ids)
        stops = (slots.stop_ids[at] == token_ids[:, None]).any(axis=1) & (num_outputs >= slots.min_tokens[at])
        ends = stops | (slots.num_known[at] >= slots.limit[at])
        started = tuple(self._tenant(slot) for slot in at[num_outputs == 0])
        watched = slots.watched[at]
        emitted = tuple(
            Emitted(self._tenant(slot), row, token)
            for slot, row, token in zip(
                at[watched].tolist(), rows[watched].tolist(), token_ids[watched].tolist(), strict=True
            )
        )
        finished = tuple(_ended(self._tenant(at[i]), int(token_ids[i]), bool(stops[i])) for i in np.flatnonzero(ends))
        for end in finished:
            self.finish(end.request.request_id)
        return StepUpdate(len(rows), started, emitted, finished, scored)

    def finish(self, request_id: str) -> Request | None:
        """Ends a waiting or running request now: its pages are free for the next step. None if there is none.

        Output of steps in flight is ignored. (Their KV writes are not: they land before any later step's, and
        whoever gets the pages next writes a position before reading it.)
        """
        waiting = self._waiting_ids.pop(request_id, None)
        if waiting is not None:
            return waiting
        slot = self._slot_of.get(request_id)
        return None if slot is None else self._release(slot)

    # Growing: one page for every decoding request that crosses a page boundary.

    def _grow(self, decode: SlotIds) -> Pages | None:
        """The page that each decoding slot opens in this step (0: none), or None when there are not enough."""
        slots = self.slots
        opens = slots.num_computed[decode] == slots.num_pages[decode] * slots.page_size
        count = int(np.count_nonzero(opens))
        if count > self.pool.num_available:
            return None
        new_pages = np.zeros(len(decode), np.int32)
        if count:
            at = decode[opens]
            new_pages[opens] = self.pool.allocate(count)
            slots.page_table[at, slots.num_pages[at]] = new_pages[opens]
            slots.num_pages[at] += 1
        return new_pages

    def _grow_by_preemption(self) -> tuple[SlotIds, Pages]:
        while True:
            victim = max(self._slot_of.values(), key=lambda slot: self._tenant(slot).key)
            watched = bool(self.slots.watched[victim])
            request = self._release(victim)
            request.num_preemptions += 1
            self.num_preemptions += 1
            self._enqueue(request, watched)
            decode = self.slots.decoding()
            new_pages = self._grow(decode)
            if new_pages is not None:
                return decode, new_pages

    def _shrink(self, decode: SlotIds, new_pages: Pages) -> None:
        """Undoes `_grow`: under v0 the decode rows wait while prompts are computed."""
        at = decode[new_pages > 0]
        self.slots.num_pages[at] -= 1
        self.pool.release(new_pages[new_pages > 0])

    # Prefill: chunks of running prompts first, then new requests in queue order.

    def _continue_prefills(self, chunks: list[_Chunk], budget: int) -> int:
        for slot in sorted(self.slots.prefilling().tolist(), key=lambda slot: self._tenant(slot).key):
            if budget == 0:
                break
            budget -= self._take_chunk(slot, chunks, budget)
        return budget

    def _take_chunk(self, slot: int, chunks: list[_Chunk], budget: int) -> int:
        start, end = int(self.slots.num_computed[slot]), int(self.slots.prefill_len[slot])
        length = min(budget, end - start)
        chunks.append(_Chunk(slot, start, length, start + length == end))
        return length

    def _admit(self, chunks: list[_Chunk], admissions: list[Admission], budget: int) -> None:
        if self._slot_of and not self.policy.joins_running:
            return
        postponed: list[tuple[QueueKey, Request, bool]] = []
        # No more are looked past than there are slots: thousands may wait for one new system prompt.
        while budget > 0 and self.slots.num_free and self._waiting and len(postponed) < self.slots.num_slots:
            key, request, watched = self._waiting[0]
            if self._waiting_ids.get(request.request_id) is not request:  # ended while it waited
                heapq.heappop(self._waiting)
                continue
            hits = self._hits(request)
            if self._soon_cached(request, len(hits)):
                postponed.append(heapq.heappop(self._waiting))
                continue
            pages = self._take_pages(request, hits)
            if pages is None:
                break
            heapq.heappop(self._waiting)
            del self._waiting_ids[request.request_id]
            slot = self.slots.occupy(request, pages, len(hits) * self.pool.page_size, watched)
            self._slot_of[request.request_id] = slot
            self._computing.update(self._uncomputed_hashes(slot))
            if request.num_cached_tokens is None:
                request.num_cached_tokens = len(hits) * self.pool.page_size
            admissions.append(Admission(slot, request, pages))
            budget -= self._take_chunk(slot, chunks, budget)
        for entry in postponed:
            heapq.heappush(self._waiting, entry)

    def _hits(self, request: Request) -> list[int]:
        """Cached pages that begin `request`. The last token is always computed: its logits are needed."""
        if not self.pool.enable_prefix_caching or request.wants_scores:
            return []
        page_size = self.pool.page_size
        return self.pool.match(request.hashes(page_size)[: (request.num_tokens - 1) // page_size])

    def _soon_cached(self, request: Request, num_hits: int) -> bool:
        """Whether a running request is computing this one's next page now: waiting for it saves the work.

        It makes `n` samples of one prompt, and a burst of requests under one new system prompt, cost one prefill.
        Not where only a new batch takes newcomers in: the wait would be longer than the work.
        """
        if not self.policy.joins_running or not self.pool.enable_prefix_caching or request.wants_scores:
            return False
        if num_hits >= (request.num_tokens - 1) // self.pool.page_size:
            return False
        return request.page_hashes[num_hits] in self._computing

    def _take_pages(self, request: Request, hits: list[int]) -> Pages | None:
        """Pages for all tokens that `request` has, cached ones first; None when there are not enough.

        A prompt takes all its pages at once, so a chunked prefill never waits for pages that a younger one holds.
        """
        target = request.limit - 1 if self.policy.reserves_limit else request.num_tokens
        count = pages_for(target, self.pool.page_size) - len(hits)
        if count + self.pool.num_cached(hits) > self.pool.num_available:
            return None
        self.pool.share(hits)
        return np.concatenate([np.array(hits, np.int32), self.pool.allocate(count)])

    # Bookkeeping.

    def _plan(self, decode: SlotIds, new_pages: Pages, chunks: list[_Chunk], admissions: list[Admission]) -> StepPlan:
        slots = self.slots
        num_decode = len(decode)
        rows = np.concatenate([decode, np.array([chunk.slot for chunk in chunks], np.int64)]).astype(np.int32)
        starts = slots.num_computed[rows]
        lengths = np.ones(len(rows), np.int32)
        samples = np.ones(len(rows), np.bool_)
        next_tokens = np.full(len(rows), NOT_SCORED, np.int32)
        for row, chunk in enumerate(chunks, num_decode):
            lengths[row] = chunk.length
            samples[row] = chunk.ends_prompt
            if self._tenant(chunk.slot).wants_scores:
                end = chunk.start + chunk.length
                next_tokens[row] = 0 if chunk.ends_prompt else slots.token_ids[chunk.slot, end]
        inputs = [slots.token_ids[c.slot, c.start : c.start + c.length] for c in chunks]
        plan = StepPlan(
            slots=rows,
            epochs=slots.epoch[rows],
            starts=starts,
            lengths=lengths,
            new_pages=np.concatenate([new_pages, np.zeros(len(chunks), np.int32)]),
            samples=samples,
            num_decode=num_decode,
            token_ids=np.concatenate(inputs) if inputs else np.empty(0, np.int32),
            next_tokens=next_tokens,
            wants_logprobs=bool(slots.wants_logprobs[rows].any()),
            admissions=tuple(admissions),
        )
        slots.num_computed[rows] += lengths
        slots.num_tokens[rows] += samples
        for chunk in chunks:
            self._register_computed(chunk.slot)
        return plan

    def _scored(self, plan: StepPlan, is_present: NDArray[np.bool_]) -> Iterator[Scored]:
        """What `plan` scored of the rows whose tenants are still there."""
        first = np.cumsum(plan.lengths) - plan.lengths
        for row in np.flatnonzero(is_present & (plan.next_tokens != NOT_SCORED)):
            request = self._tenant(plan.slots[row])
            start = int(plan.starts[row]) + 1  # the first token is behind none
            end = min(start + int(plan.lengths[row]), request.num_prompt_tokens)
            if start < end:
                yield Scored(request, range(start, end), int(first[row]))

    def _register_computed(self, slot: int) -> None:
        """Lets the prefix cache know the full pages of `slot` whose KV is computed and whose tokens are known."""
        if not self.pool.enable_prefix_caching:
            return
        slots = self.slots
        first = int(slots.num_registered[slot])
        last = int(min(slots.num_computed[slot], slots.num_known[slot])) // slots.page_size
        if last > first:
            hashes = self._tenant(slot).hashes(slots.page_size)[first:last]
            self.pool.register(slots.page_table[slot, first:last].tolist(), hashes)
            self._computing.difference_update(hashes)
            slots.num_registered[slot] = last

    def _uncomputed_hashes(self, slot: int) -> list[bytes]:
        return self._tenant(slot).page_hashes[int(self.slots.num_registered[slot]) :]

    def _release(self, slot: int) -> Request:
        """Frees slot and pages. Generated pages enter the prefix cache here, off the path of a decode step."""
        self._computing.difference_update(self._uncomputed_hashes(slot))
        request = self._tenant(slot)
        request.output_token_ids = self.slots.outputs(slot)
        self._register_computed(slot)
        self.pool.release(self.slots.pages(slot))
        self.slots.vacate(slot)
        del self._slot_of[request.request_id]
        return request

    def _enqueue(self, request: Request, watched: bool) -> None:
        self._waiting_ids[request.request_id] = request
        heapq.heappush(self._waiting, (request.key, request, watched))

    def _tenant(self, slot: int) -> Request:
        tenant = self.slots.tenants[slot]
        assert tenant is not None, f"slot {slot} is vacant"
        return tenant

    def running(self) -> Iterator[tuple[int, Request]]:
        """Slot and request of everything that runs, first in the queue first."""
        at = sorted(self._slot_of.values(), key=lambda slot: self._tenant(slot).key)
        return ((slot, self._tenant(slot)) for slot in at)

    def check_invariants(self) -> None:
        """Asserts that slots, pages and queue agree. For tests: costs O(pages)."""
        self.slots.check_invariants()
        self.pool.check_invariants(self.slots.pages(slot) for slot in self._slot_of.values())
        assert {rid: self._tenant(s).request_id for rid, s in self._slot_of.items()} == {r: r for r in self._slot_of}
        assert not self._waiting_ids.keys() & self._slot_of.keys(), "a request waits and runs"
        queued = {request.request_id for _, request, _ in self._waiting}
        assert self._waiting_ids.keys() <= queued, "a waiting request is not in the queue"
        if not self._slot_of:
            assert self.pool.num_owned == 0, "an idle scheduler holds pages"
            assert not self._computing, "an idle scheduler computes pages"


def _ended(request: Request, last_token: int, stopped: bool) -> Finished:
    """The end of `request` by its last token, a stop id if it `stopped`, or by its limit."""
    if not stopped:
        return Finished(request, FinishReason.LENGTH)
    asked_for = last_token in request.sampling_params.stop_token_ids
    return Finished(request, FinishReason.STOP, last_token if asked_for else None)


def check_token_budget(max_num_batched_tokens: int, max_num_seqs: int) -> None:
    """Raises ValueError for a step that could not hold a token of every running request."""
    if max_num_batched_tokens < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens {max_num_batched_tokens} must be at least max_num_seqs {max_num_seqs}, "
            "so that every running request can decode in every step: raise the one or lower the other"
        )
