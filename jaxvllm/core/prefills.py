"""`Prefills`: the prompts that a step computes, first of running requests, then of those that get a slot."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxvllm.core.constrained_rows import ConstrainedRows
from jaxvllm.core.kv_cache import CachedPrefix, KVCache
from jaxvllm.core.lora import NO_ADAPTER, LoraSlots
from jaxvllm.core.policy import Policy
from jaxvllm.core.request import Request
from jaxvllm.core.running_requests import RunningRequests
from jaxvllm.core.running_searches import RunningSearches
from jaxvllm.core.shared_pages import SharedPages
from jaxvllm.core.side_store import SideStore
from jaxvllm.core.slots import SlotIds, SlotTable
from jaxvllm.core.step_plan import SCORE_BATCH, Admission, PageEntries, StepRoom
from jaxvllm.core.step_rows import Chunk
from jaxvllm.core.step_sizes import StepSizes
from jaxvllm.core.waiting_queue import Queued, WaitingQueue

# Of each group of the KV cache, the pages that rows open in a step.
type Opened = tuple[PageEntries, ...]


@dataclass
class StepPrompts:
    """The prompts of one step while they are chosen."""

    chunks: list[Chunk] = field(default_factory=list)
    opened: list[Opened] = field(default_factory=list)  # by the chunks of requests that run already
    admissions: list[Admission] = field(default_factory=list)


@dataclass
class _AdapterTurns:
    """Decides which adapters may get more requests in one step, while others wait for a slot.

    Requests whose adapter has a slot pass those whose adapter has none, so that the devices have work. Without a limit
    a steady stream of them would keep the slot. So only those pass that are among the next `most_passing` to arrive
    after the first one that waits: then slots empty, and it gets one.
    """

    slots: LoraSlots
    most_passing: int
    queue: WaitingQueue
    closed: set[bytes] = field(default_factory=set)  # the digests of adapters that get no more requests
    last_arrival: float = math.inf  # of the requests that may pass

    def may_begin(self, request: Request) -> bool:
        """Returns whether this request, the next in the queue's order, may run as far as its adapter is concerned."""
        adapter, arrival = request.adapter, request.key.arrival
        if adapter is None:
            return True
        has_room = self.slots.can_take(adapter)
        if has_room and arrival <= self.last_arrival:
            return True
        if has_room:
            self.closed.add(adapter.digest)
        else:  # nor has any other of its kind without a slot: a turn for each of thousands would take most of the step
            alike = {one.digest for one in self.queue.adapters if one.has_tables or not adapter.has_tables}
            self.closed |= alike - self.slots.digests
        self.last_arrival = min(self.last_arrival, arrival + self.most_passing)
        return False


@dataclass(frozen=True, eq=False)
class Prefills:
    """The scheduler's part for prompts: it chooses their chunks, and admits requests from the queue."""

    slots: SlotTable
    cache: KVCache
    policy: Policy
    queue: WaitingQueue
    running: RunningRequests
    shared: SharedPages
    side_store: SideStore
    constrained: ConstrainedRows
    beams: RunningSearches
    lora_slots: LoraSlots

    def num_uncomputed(self, prefilling: SlotIds) -> int:
        """Returns how many tokens of the prompts in these slots no step so far computes."""
        return int((self.slots.prefill_len[prefilling] - self.slots.num_computed[prefilling]).sum())

    def fit(self, sizes: StepSizes, budget: int, prefilling: SlotIds, num_decode_tokens: int, num_decode: int) -> int:
        """Returns the budget, or less where a smaller step and another one are quicker than one that is mostly padding.

        Prompts that are cached in part, or find no pages, need less than is counted here: then the cut is none. Where
        more wait than there are slots, the count is a guess.
        """
        num_tokens = self.num_uncomputed(prefilling)
        num_rows = num_decode + len(prefilling)
        most_rows = num_rows + self.slots.num_free
        for request in self.queue:
            if num_tokens >= budget or num_rows == most_rows:
                break
            num_tokens += request.num_tokens
            num_rows += 1
        if not 0 < num_tokens < budget:
            return budget
        cut = sizes.prompt_tokens(num_decode_tokens, num_tokens, num_rows)
        return cut if cut < num_tokens else budget

    def choose(self, prefilling: SlotIds, budget: int, room: StepRoom | None, *, admits: bool) -> StepPrompts:
        """Returns the prompts of a step with at most `budget` tokens of them.

        Slots in `prefilling` go on, in the queue's order. If it `admits` any, requests from the queue follow, where
        `room` has rows for them.
        """
        chosen = StepPrompts()
        budget = self._continue(chosen, prefilling, budget)
        if admits:
            self._admit(chosen, budget, room)
        return chosen

    def _continue(self, chosen: StepPrompts, prefilling: SlotIds, budget: int) -> int:
        """Chooses chunks of running prompts, and returns what is left of the budget."""
        for slot in sorted(prefilling.tolist(), key=lambda slot: self.slots.tenant(slot).key):
            if budget == 0:
                break
            chunk = self._next_chunk(slot, budget, chosen.chunks)
            if not chunk.length:  # it waits for room for its scores
                continue
            chosen.chunks.append(chunk)
            chosen.opened.append(self.cache.cover(slot, chunk.end))
            budget -= chunk.length
        return budget

    def _next_chunk(self, slot: int, budget: int, chunks: Sequence[Chunk]) -> Chunk:
        start, end = int(self.slots.num_computed[slot]), int(self.slots.prefill_len[slot])
        length = min(budget, end - start)
        if self.slots.tenant(slot).wants_wide_scores:
            length = min(length, self._score_room(chunks))
        return Chunk(slot, start, length, yields=start + length == end)

    def _score_room(self, chunks: Sequence[Chunk]) -> int:
        """Returns how many tokens may still be computed of prompts that want wide scores, beside `chunks`."""
        return SCORE_BATCH - sum(chunk.length for chunk in chunks if self.slots.tenant(chunk.slot).wants_wide_scores)

    def _num_rows_left(self, room: StepRoom | None) -> int:
        """Returns how many more slots may be taken."""
        num_free = self.slots.num_free
        return num_free if room is None else min(num_free, room.num_rows - self.slots.num_active)

    def _admit(self, chosen: StepPrompts, budget: int, room: StepRoom | None) -> None:
        """Gives slots to requests of the queue, in its order, and chooses the first chunk of each."""
        if self.running and not self.policy.joins_running:
            return
        postponed: list[Queued] = []
        turns = _AdapterTurns(self.lora_slots, self.slots.num_slots, self.queue)
        # No more are looked past than there are slots: thousands may wait for one new system prompt.
        while budget > 0 and len(postponed) < self.slots.num_slots:
            if (queued := self.queue.first(turns.closed)) is None:
                break
            # Requests that wait for their pages have rows, or these would be gone again before their turn.
            num_rows = self._num_rows_left(room) - len(self.shared.loads)
            if num_rows <= 0:
                break
            request = queued.request
            if not turns.may_begin(request):
                continue
            prefix = self.shared.prefix(request)
            has_no_room = request.wants_wide_scores and not self._score_room(chosen.chunks)
            if has_no_room or self._waits_for_others(request, prefix):
                self.queue.pop(queued)
                postponed.append(queued)
                continue
            # A prompt has room for all of it at once, so a chunk never waits for pages that a younger one holds.
            target = request.limit - 1 if self.policy.reserves_limit else request.num_tokens
            num_forks = 0 if request.num_beams is None else request.num_beams - 1
            # A search alone may have more beams than there are rows now, or it would wait, and nothing would run.
            has_rows = (num_rows if self.running else self.slots.num_free - len(self.shared.loads)) > num_forks
            if not has_rows or not self.cache.can_take(prefix, target, num_forks):
                break
            num_cached = prefix.num_pages * self.cache.page_size
            sides = [side for side in request.asked.prompt.side_inputs if side.end > num_cached]
            if not self.side_store.can_take(sides):
                break
            self.queue.pop(queued)
            if self.shared.begin_load(request, prefix):
                self.queue.set_aside(queued)
                continue
            slot = self._occupy(queued, prefix, target, num_cached)
            side_rows = self.side_store.take(slot, sides)
            chosen.chunks.append(chunk := self._next_chunk(slot, budget, chosen.chunks))
            self.cache.cover(slot, chunk.end)
            budget -= chunk.length
            of_adapter = self._take_adapter(request)
            chosen.admissions.append(
                Admission(slot, request, self.cache.tables(slot), num_cached, side_rows, *of_adapter)
            )
        for entry in postponed:
            self.queue.put_back(entry)

    def _take_adapter(self, request: Request) -> tuple[int, bool]:
        """Returns the slot of the request's adapter, and whether it has to be brought there."""
        if request.adapter is None:
            return NO_ADAPTER, False
        return self.lora_slots.take(request.request_id, request.adapter)

    def _occupy(self, queued: Queued, prefix: CachedPrefix, target: int, num_cached: int) -> int:
        """Gives a request a slot, with pages for `target` tokens, of which `prefix` has the first `num_cached`."""
        request = queued.request
        self.queue.admitted(request)
        slot = self.slots.occupy(request, num_cached, queued.watched)
        self.cache.take(slot, prefix, target)
        self.running.put(request.request_id, slot)
        self.shared.admitted(slot, prefix.num_pages)
        if request.constraint is not None:
            self.constrained.open(slot)
        if request.search is not None:
            self.beams.open(request, request.search, slot)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(num_cached, request.num_prompt_tokens)
        return slot

    def _waits_for_others(self, request: Request, prefix: CachedPrefix) -> bool:
        """Returns whether a request had better wait for pages that a running one computes.

        It is False where only a new batch takes newcomers in: the wait would be longer than the work.
        """
        return self.policy.joins_running and self.shared.are_coming(request, prefix.num_pages)
