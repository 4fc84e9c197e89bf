"""The scheduler beside a brute-force oracle: one plain object a request, and loops instead of arrays.

`Simulation` drives a real `Scheduler` the way `Engine.step` does, over a `FakeDevice`, and predicts each plan
and each update from its own counters. It raises where the two differ.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from jaxvllm.core import prefills
from jaxvllm.core.kv_cache import GroupSize, KVCache
from jaxvllm.core.kv_events import KVEventLog
from jaxvllm.core.page_pool import TRASH_PAGE, PagePool
from jaxvllm.core.policy import POLICIES
from jaxvllm.core.readout import SCORES, WIDE_SCORES
from jaxvllm.core.request import FinishReason, GenerationRequest, Prompt, QueueKey, Request
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.core.slots import SlotTable
from jaxvllm.core.step_plan import Admission, StepOutput, StepPlan, StepRoom, StepUpdate
from jaxvllm.core.step_sizes import StepSizes
from jaxvllm.core.token_constraint import GuardedConstraint
from tests.core.fake_device import FakeDevice, Script, next_token

EOS = 4  # a stop id that the caller did not ask for


@dataclass(frozen=True)
class Setup:
    """An engine without a model. `depth` is how many steps may be dispatched before one is read.

    A step may be `decode_steps` in one, each with `num_drafts` drafts; with `seed` a row yields fewer tokens than that
    at random, else none is missing but after its end. The first group has `num_pages` and `window`; `more_groups` are
    the others. A step may be cut to one of `sizes`. The first `num_tight_steps` steps have no more than `room`.
    """

    policy: str = "v1"
    num_slots: int = 4
    num_pages: int = 32
    page_size: int = 4
    budget: int = 16
    caching: bool = True
    depth: int = 2
    decode_steps: int = 1
    num_drafts: int = 0
    seed: int | None = None
    window: int | None = None
    more_groups: tuple[GroupSize, ...] = ()
    sizes: StepSizes | None = None
    room: StepRoom | None = None
    num_tight_steps: int = 0

    @property
    def groups(self) -> tuple[GroupSize, ...]:
        return (GroupSize(self.num_pages, self.window), *self.more_groups)


@dataclass(frozen=True)
class Job:
    """What a caller asks for."""

    prompt: tuple[int, ...]
    max_tokens: int = 4
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = True
    salt: str | None = None
    priority: int = 0
    watched: bool = False
    scored: bool = False
    wide: bool = False  # it wants more of its prompt's tokens than the best few
    script: tuple[int | None, ...] | None = None  # of its constraint; None: there is no constraint

    def __post_init__(self) -> None:
        assert self.scored or not self.wide

    @property
    def limit(self) -> int:
        return len(self.prompt) + self.max_tokens

    @property
    def stops(self) -> tuple[int, ...]:
        return self.stop_token_ids if self.ignore_eos else (EOS, *self.stop_token_ids)

    def answer(self) -> tuple[list[int], FinishReason, int | None]:
        """Output, finish reason and stop reason, computed alone and without a cache."""
        outputs: list[int] = []
        while True:
            script = Script(self.script or ())
            forced = script.at(len(outputs))
            token = next_token([*self.prompt, *outputs]) if forced is None else forced
            outputs.append(token)
            if token in self.stops and len(outputs) > self.min_tokens:
                return outputs, FinishReason.STOP, token if token in self.stop_token_ids else None
            if len(self.prompt) + len(outputs) == self.limit:
                return outputs, FinishReason.LENGTH, None


@dataclass(eq=False)
class Shadow:
    """What the oracle knows of one request. `tokens` is the truth: the prompt and the whole answer."""

    job: Job
    request: Request
    tokens: list[int]
    state: str = "waiting"  # then running, waiting again after a preemption, ended or aborted
    tenancy: int = 0  # counts its stays in a slot
    slot: int | None = None
    pages: list[list[int]] = field(default_factory=list)  # of each group, by column; trash where it left the window
    target: int = 0  # tokens for which it was promised room
    prefill_len: int = 0
    computed: int = 0  # the most positions that have been computed
    planned: int = 0  # the most tokens it may have, those in flight included
    known: int = 0
    unreported: int = 0  # the last of the known ones, which were forced
    starts_again: bool = False  # after a guess that its constraint did not allow
    emitted: list[int] = field(default_factory=list)
    num_started: int = 0
    scores: dict[int, tuple[int, int]] = field(default_factory=dict)  # by position: what was likely, what came

    @property
    def key(self) -> QueueKey:
        return self.request.key

    @property
    def decoding(self) -> bool:
        return self.state == "running" and self.computed >= self.prefill_len and self.planned < self.job.limit

    @property
    def prefilling(self) -> bool:
        return self.state == "running" and self.computed < self.prefill_len

    def forced(self, most: int) -> int:
        """How many of the tokens after the known ones are forced, `most` at most, none of which may end it."""
        count, first = 0, self.known - len(self.job.prompt)
        for token in (self.job.script or ())[first:]:
            if count >= most or token is None or token < 0 or token in self.job.stops:
                break
            count += 1
        return count

    def forget_flights(self) -> None:
        """What is in flight is known, or wrong."""
        self.tenancy += self.planned > self.known
        self.computed = min(self.computed, self.known)
        self.planned = self.known

    def take_forced(self, count: int) -> None:
        self.known += count
        self.unreported += count
        self.planned = self.known

    def leave(self, state: str) -> None:
        self.state, self.slot, self.pages, self.starts_again = state, None, [], False
        self.tenancy += 1
        self.planned = self.known


@dataclass(frozen=True)
class InFlight:
    plan: StepPlan
    output: StepOutput
    rows: list[tuple[Shadow, int]]  # with the tenancy they were planned in


class Simulation:
    """Scheduler, fake device and oracle in step. `add`, `step`, `abort` and `drain` check all they do."""

    def __init__(self, setup: Setup, max_model_len: int = 64, events: KVEventLog | None = None):
        self.setup = setup
        self.policy = POLICIES[setup.policy]
        self.cache = KVCache(
            setup.groups,
            num_slots=setup.num_slots,
            max_model_len=max_model_len,
            page_size=setup.page_size,
            max_chunk=setup.budget,
            enable_prefix_caching=setup.caching,
            events=events,
        )
        self.slots = SlotTable(setup.num_slots, max_model_len)
        self.scheduler = Scheduler(self.slots, self.cache, self.policy, setup.budget)
        rng = None if setup.seed is None else np.random.default_rng(setup.seed)
        self.device = FakeDevice(setup.num_slots, setup.groups, setup.page_size, rng)
        self.shadows: dict[str, Shadow] = {}
        self.plans: list[StepPlan] = []
        self.num_steps = 0
        self._in_flight: deque[InFlight] = deque()
        self._left_out: set[Shadow] = set()  # predicted for the plan
        self._left_out_before: set[Shadow] = set()  # of the last plan
        self._may_leave_out = False
        self._forced: dict[Shadow, tuple[int, int]] = {}  # predicted for the plan: tokens, and those not in flight

    @property
    def room(self) -> StepRoom | None:
        """That of the step at hand."""
        return self.setup.room if self.num_steps <= self.setup.num_tight_steps else None

    @property
    def budget(self) -> int:
        """Tokens of the step at hand."""
        return self.setup.budget if self.room is None else min(self.setup.budget, self.room.num_tokens)

    @property
    def pool(self) -> PagePool:
        """Of the first group."""
        return self.cache.groups[0].pool

    def add(self, job: Job) -> Shadow:
        """Queues `job`. Raises ValueError exactly when the pool could never hold it."""
        number = len(self.shadows)
        params = SamplingParams(
            max_tokens=job.max_tokens,
            min_tokens=job.min_tokens,
            stop_token_ids=job.stop_token_ids,
            prompt_logprobs=(-1 if job.wide else 0) if job.scored else None,
        )
        request = Request(
            asked=GenerationRequest(f"r{number}", Prompt(None, np.array(job.prompt, np.int32), job.salt), params),
            seed=0,
            stop_token_ids=job.stops,
            limit=job.limit,
            key=QueueKey(job.priority, number),
            constraint=None if job.script is None else GuardedConstraint(Script(job.script)),
        )
        try:
            self.scheduler.add(request, watched=job.watched)
        except ValueError:
            assert not self._fits_alone(job), "a request that fits was refused"
            raise
        assert self._fits_alone(job), "a request that never fits was queued"
        tokens = [*job.prompt, *job.answer()[0]]
        shadow = Shadow(job, request, tokens, planned=len(job.prompt), known=len(job.prompt))
        shadow.take_forced(shadow.forced(job.limit - shadow.known - 1))
        self.shadows[request.request_id] = shadow
        self._check_state()
        return shadow

    def abort(self, shadow: Shadow) -> None:
        """Ends a request wherever it is; a second end changes nothing."""
        ended = self.scheduler.finish(shadow.request.request_id)
        if shadow.state in ("ended", "aborted"):
            assert ended is None
        else:
            assert ended is shadow.request
            assert ended.output_token_ids.tolist() == shadow.tokens[len(shadow.job.prompt) : shadow.known]
            shadow.leave("aborted")
        self._check_state()

    def step(self) -> None:
        """One `Engine.step`: plans and dispatches, and reads the oldest output when enough are in flight."""
        self.num_steps += 1
        plan = self._schedule()
        if plan is not None:
            rows = [(self._at(slot), self._at(slot).tenancy) for slot in plan.slots.tolist()]
            self._in_flight.append(InFlight(plan, self.device.run(plan), rows))
        else:
            assert self._in_flight or not self.scheduler.has_work, "work, but nothing to do and nothing to wait for"
        if self._in_flight and (plan is None or len(self._in_flight) >= self.setup.depth):
            self._update(self._in_flight.popleft())

    def drain(self) -> None:
        """Steps until all have ended; fails when that takes longer than one at a time would, many times over."""
        unfinished = [s for s in self.shadows.values() if s.state in ("waiting", "running")]
        patience = 20 + sum(4 * s.job.limit + 10 for s in unfinished)
        if self.setup.seed is not None:
            patience *= 3  # a row yields nothing twice in a row at most
        if any(shadow.job.script is not None for shadow in unfinished):
            patience *= 2  # and guesses wrong
        while self.scheduler.has_work or self._in_flight:
            self.step()
            patience -= 1
            assert patience, "somebody waits for ever"
        assert all(s.state in ("ended", "aborted") for s in self.shadows.values())
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert not any(group.pool.num_owned for group in self.cache.groups)

    # The plan, predicted.

    def _schedule(self) -> StepPlan | None:
        self._forget_unseen()
        self._left_out = self._predict_left_out()
        expected_victims, waits = self._predict_victims()
        self._forced = {} if expected_victims or waits else self._predict_forced()
        preemptions = {s: s.request.num_preemptions for s in self.shadows.values()}
        plan = self.scheduler.schedule(self.setup.decode_steps, self.setup.sizes, self.room, self.setup.num_drafts)
        victims = {s for s, count in preemptions.items() if s.request.num_preemptions > count}
        assert victims == expected_victims, "not the last in the queue were preempted, or not as few as need be"
        for victim in victims:
            victim.leave("waiting")
            victim.take_forced(victim.forced(victim.job.limit - victim.known - 1))
            assert victim.request.output_token_ids.tolist() == victim.tokens[len(victim.job.prompt) : victim.known]
        if plan is None:
            is_planned = not any(s.decoding or s.prefilling for s in self._running())
            assert waits or is_planned, "nothing planned for a running request"
            assert self._running() or not self._waiting(), "an idle scheduler keeps a request waiting"
        else:
            assert not waits
            self.plans.append(plan)
            assert not self._left_out & self._left_out_before, "a row that waits for a mask starves"
            self._left_out_before = self._left_out
            self._may_leave_out = plan.is_masked and not self._left_out
            self._follow(plan, bool(victims))
        self._check_state()
        return plan

    def _predict_left_out(self) -> set[Shadow]:
        """Rows that wait for masks are left out where free ones are not fewer, and never twice in a row."""
        running = self._running()
        if not self._may_leave_out or self._waiting() or any(s.prefilling for s in running):
            return set()
        decoding = [s for s in running if s.decoding]
        waiting = {s for s in decoding if self.scheduler._constrained.waits(np.array([s.slot])).any()}
        assert all(s.job.script is not None for s in waiting), "a free row waits"
        return waiting if 2 * len(waiting) <= len(decoding) else set()

    def _is_full(self, plan: StepPlan) -> bool:
        """Whether a chunk may have been cut short for want of room, or so that the step fills one of the sizes."""
        sizes = () if self.setup.sizes is None else (tokens for tokens, _ in self.setup.sizes.sizes)
        return plan.num_tokens == self.budget or plan.num_tokens in sizes

    def _forget_unseen(self) -> None:
        """What no token to come sees is given back: a decode row is at least as far as the host knows."""
        for shadow in self._running():
            position = min(shadow.computed, shadow.known - 1)
            for group, pages in zip(self.setup.groups, shadow.pages, strict=True):
                pages[:] = [page if self._is_seen(group, i, position) else TRASH_PAGE for i, page in enumerate(pages)]

    def _is_seen(self, group: GroupSize, column: int, position: int) -> bool:
        """Whether a token at `position` or after it sees a position of that page."""
        last = (column + 1) * self.setup.page_size - 1
        window = self.setup.page_size + 1 if group.keeps_state else group.window
        return window is None or last > position - window

    def _predict_victims(self) -> tuple[set[Shadow], bool]:
        """Who is preempted, and whether the only one left waits for its own tokens, which free pages."""
        running = sorted(self._running(), key=lambda s: s.key)
        victims: set[Shadow] = set()
        while not self._can_grow(running, 1):
            if len(running) == 1 and running[0].known < running[0].planned:
                return victims, True
            victims.add(running.pop())
            self._left_out = set()
        return victims, False

    def _predict_forced(self) -> dict[Shadow, tuple[int, int]]:
        """What decoding rows take at once of the tokens that are forced: all do, or none for want of pages.

        They compute what they take, and the last known token if its KV is not in flight.
        """
        decoding = [s for s in self._running() if s.decoding and s not in self._left_out]
        decoding.sort(key=lambda s: s.slot or 0)
        room = self.budget - len(decoding)
        forced: dict[Shadow, tuple[int, int]] = {}
        for shadow in decoding:
            before = shadow.known - min(shadow.computed, shadow.known)
            count = shadow.forced(min(room + 1 - before, shadow.job.limit - shadow.known - 1))
            if count > shadow.planned - shadow.known:
                forced[shadow] = count, before + count - 1
                room -= before + count - 1
        return forced if self._can_grow(self._running(), 1, forced) else {}

    def _can_grow(self, running: list[Shadow], width: int, forced: dict[Shadow, tuple[int, int]] | None = None) -> bool:
        """Whether every group has the pages for `width` more tokens of each, and for those that are `forced`."""
        counts = {s: count for s, (count, _) in (forced or {}).items()}
        return all(
            self._demand(number, running, {s: self._opens(s, number, width, counts.get(s)) for s in running})
            <= group.num_pages - 1
            for number, group in enumerate(self.setup.groups)
        )

    def _demand(self, number: int, running: list[Shadow], opens: dict[Shadow, int]) -> int:
        """Pages of a group that are owned or promised when each of `running` has opened so many more."""
        if self.setup.groups[number].window is None and not self.setup.groups[number].keeps_state:
            return len({page for s in running for page in s.pages[number]}) + sum(opens.values())
        demand = 0
        for shadow in running:
            held = sum(page != TRASH_PAGE for page in shadow.pages[number]) + opens[shadow]
            columns = len(shadow.pages[number]) + opens[shadow]
            promised = self._most(number, shadow.target) if columns < self._pages_for(shadow.target) else 0
            demand += max(held, promised)
        return demand

    def _most(self, number: int, num_tokens: int) -> int:
        """The most pages of a group that a prompt of so many tokens holds at once."""
        group, pages = self.setup.groups[number], self._pages_for(num_tokens)
        if group.keeps_state:  # the last snapshot, what is read, and the last two columns
            return min(pages, 4)
        window = group.window
        return pages if window is None else min(pages, self._pages_for(window - 1 + self.setup.budget) + 1)

    def _fits_alone(self, job: Job) -> bool:
        groups = enumerate(self.setup.groups)
        return all(self._most(number, job.limit - 1) <= group.num_pages - 1 for number, group in groups)

    def _opens(self, shadow: Shadow, number: int, width: int, forced: int | None = None) -> int:
        """Pages that `shadow` lacks in a group for `width` more tokens, whose last needs none, or for `forced` ones."""
        if not shadow.decoding or shadow in self._left_out:
            return 0
        end = min(shadow.computed + width, shadow.job.limit - 1) if forced is None else shadow.known + forced
        wanted = self._pages_for(end)
        return max(0, wanted - len(shadow.pages[number]))

    def _width(self, running: list[Shadow], preempted: bool) -> int:
        """Several tokens a row where nothing is prefilled and the pages are free: those of one step while some wait."""
        if preempted or self._forced or any(s.prefilling or s.starts_again for s in running if s not in self._left_out):
            return 1
        width = (1 if self._waiting() else self.setup.decode_steps) * (1 + self.setup.num_drafts)
        return width if self._can_grow(running, width) else 1

    def _follow(self, plan: StepPlan, preempted: bool) -> None:
        assert 0 < plan.num_tokens <= self.budget
        assert self.room is None or plan.num_rows <= self.room.num_rows
        before = self._running()
        joined = {admission.request.request_id for admission in plan.admissions}
        if any(s.decoding and s.job.script is not None for s in before):
            # How much a constrained row guesses is its own affair, and a narrower step may have the pages.
            assert 1 <= plan.row_tokens <= self.setup.decode_steps * (1 + self.setup.num_drafts)
            starts_again = any(s.starts_again for s in before if s not in self._left_out)
            assert plan.row_tokens == 1 or not (self._forced or preempted or starts_again)
        else:
            assert joined or plan.row_tokens == self._width(before, preempted)
        assert plan.row_tokens == 1 or not joined
        assert plan.num_steps <= (1 if self._waiting() else self.setup.decode_steps)
        assert plan.num_drafts == (self.setup.num_drafts if plan.row_tokens > self.setup.num_drafts else 0)
        assert plan.num_steps * (1 + plan.num_drafts) == plan.row_tokens
        decoding = {s for s in before if s.decoding and s not in self._left_out}
        prefilling = sorted((s for s in before if s.prefilling), key=lambda s: s.key)
        if plan.admissions:
            assert not preempted, "pages taken from one request went to a newcomer"
            assert self.policy.joins_running or not before, "somebody joined a running batch"
        computed_before = {s: s.computed for s in before}
        admitted = [self._admit(admission, plan) for admission in plan.admissions]
        self._check_queue_order(admitted, computed_before, plan)

        rows = [self._at(slot) for slot in plan.slots.tolist()]
        assert len(set(rows)) == len(rows), "a request has two rows"
        assert plan.epochs.tolist() == self.slots.epoch[plan.slots].tolist()
        decodes, chunks = rows[: plan.num_decode], rows[plan.num_decode :]
        given = {s: self._forced.get(s, (0, 0)) for s in decoding if s in self._forced or s.starts_again}
        given = dict(sorted(given.items(), key=lambda item: item[0].slot or 0))
        if self.policy.mixes_phases or not (prefilling or admitted):
            assert {*decodes, *given} == decoding and not {*decodes} & {*given}, "decode starves"
        else:
            given = {}
            assert not decodes, "two phases in one step"
        lengths = dict(zip(chunks, plan.lengths[plan.num_decode :].tolist(), strict=True))
        room: dict[Shadow, int] = {}  # for the scores of those that want wide ones
        left = prefills.SCORE_BATCH
        for shadow in [*prefilling, *admitted]:
            if shadow.job.wide:
                room[shadow] = left
                left -= lengths.get(shadow, 0)
        expected_chunks = [*given, *(s for s in [*prefilling, *admitted] if room.get(s, 1))]
        assert not any(room.get(s) == 0 for s in admitted), "a slot for a request that has to wait"
        assert chunks == expected_chunks[: len(chunks)]
        assert len(chunks) == len(expected_chunks) or self._is_full(plan), "budget left unused"

        first = 0
        for row, shadow in enumerate(rows):
            start, length = int(plan.starts[row]), int(plan.lengths[row])
            is_masked = plan.masked is not None and bool(plan.masked[row])
            assert not is_masked or (shadow.job.script is not None and plan.samples[row]), "a free row waits"
            if row >= plan.num_decode and shadow.job.script is not None:
                assert is_masked == plan.samples[row], "a token after known ones is a guess"
            if shadow in given:
                shadow.forget_flights()
                shadow.starts_again = False
            assert start == shadow.computed
            if row < plan.num_decode:
                assert length == 1
                most = min(plan.row_tokens, shadow.job.limit - shadow.planned)
                assert 1 <= plan.max_new[row] <= most, "a row gets nothing, or more than it may"
                assert plan.max_new[row] == most or shadow.job.script is not None, "a free row gets less than it may"
                end = min(start + plan.row_tokens, shadow.job.limit - 1)
                length = int(plan.max_new[row])
            elif shadow in given:
                count, extra = given[shadow]
                shadow.take_forced(count)
                assert (length, plan.max_new[row]) == (extra + 1, 1)
                end = start + length
                assert end == shadow.known
                assert plan.token_ids[first : first + length].tolist() == shadow.tokens[start:end]
                first += length
            else:
                assert 1 <= length <= shadow.prefill_len - start
                end = start + length
                assert plan.max_new[row] == (start + length == shadow.prefill_len)
                fits = length == room.get(shadow) or self._is_full(plan)
                assert plan.samples[row] or fits, "a chunk cut short for nothing"
                assert length <= room.get(shadow, length), "more tokens are scored than there is room for"
                given = plan.token_ids[first : first + length].tolist()
                assert given == shadow.tokens[start : start + length]
                first += length
            if shadow not in admitted:
                self._open(plan, shadow, end)
            shadow.computed += length
            shadow.planned += int(plan.max_new[row])
            for position in range(start, start + length):
                for size, group, pages in zip(self.setup.groups, self.cache.groups, shadow.pages, strict=True):
                    page = pages[position // self.setup.page_size]
                    has_none = size.keeps_state and page == TRASH_PAGE
                    assert has_none or group.pool.ref_counts[page] == 1, "a shared page is written"

    def _open(self, plan: StepPlan, shadow: Shadow, end: int) -> None:
        """Follows the pages that a row opens: those that its tokens up to `end` lack, and no others."""
        is_chunk = shadow.prefilling
        for group, entries, pages in zip(self.setup.groups, plan.new_pages, shadow.pages, strict=True):
            mine = entries.slots == shadow.slot
            wanted = max(self._pages_for(end), len(pages))
            first = max(len(pages), wanted - 2) if group.keeps_state and is_chunk else len(pages)
            assert entries.columns[mine].tolist() == list(range(first, wanted))
            pages.extend([TRASH_PAGE] * (first - len(pages)) + entries.pages[mine].tolist())

    def _admit(self, admission: Admission, plan: StepPlan) -> Shadow:
        shadow = self.shadows[admission.request.request_id]
        assert shadow.state == "waiting"
        assert all(admission.slot != s.slot for s in self._running()), "a slot has two tenants"
        first_time = shadow.tenancy == 0
        shadow.state, shadow.slot = "running", admission.slot
        shadow.prefill_len = shadow.planned = shadow.known
        shadow.computed = int(plan.starts[plan.slots == admission.slot].item())
        assert shadow.computed % self.setup.page_size == 0 and shadow.computed < shadow.known
        assert (self.setup.caching and not shadow.job.scored) or not shadow.computed
        shadow.target = shadow.job.limit - 1 if self.policy.reserves_limit else shadow.known
        end = shadow.computed + int(plan.lengths[plan.slots == admission.slot].item())
        assert not any((entries.slots == admission.slot).any() for entries in plan.new_pages)
        shadow.pages = []
        for group, row in zip(self.setup.groups, admission.pages.tolist(), strict=True):
            grows = group.window is None and not group.keeps_state
            count = self._pages_for(shadow.target if grows else end)
            assert not any(row[count:])
            is_left_out = range(shadow.computed // self.setup.page_size, count - 2 if group.keeps_state else 0)
            assert [bool(page) for page in row[:count]] == [
                self._is_seen(group, column, shadow.computed) and column not in is_left_out for column in range(count)
            ]
            shadow.pages.append(row[:count])
        if first_time:
            assert shadow.request.num_cached_tokens == min(shadow.computed, len(shadow.job.prompt))
        return shadow

    def _check_queue_order(self, admitted: list[Shadow], computed_before: dict[Shadow, int], plan: StepPlan) -> None:
        """Whoever was overtaken shares a page of prefix with a running request that had not computed it.

        Or the scores that it wants had no room beside those of others.
        """
        num_wide = 0 if (wide := plan.readouts.get(WIDE_SCORES.name)) is None else int(plan.lengths @ wide)
        assert [s.key for s in admitted] == sorted(s.key for s in admitted)
        for waiting in self._waiting():
            for overtaker in admitted:
                if waiting.key < overtaker.key and not (waiting.job.wide and num_wide == prefills.SCORE_BATCH):
                    assert not waiting.job.scored, "a prompt that is scored takes nothing from others"
                    runners = {**dict.fromkeys(admitted, 0), **computed_before}
                    assert self.setup.caching and any(
                        self._common_pages(waiting, s) * self.setup.page_size > computed
                        for s, computed in runners.items()
                    ), "overtaken without a reason"

    def _common_pages(self, a: Shadow, b: Shadow) -> int:
        if a.job.salt != b.job.salt:
            return 0
        length = 0
        while length < min(a.known, b.known) and a.tokens[length] == b.tokens[length]:
            length += 1
        return length // self.setup.page_size

    # The update, predicted.

    def _update(self, done: InFlight) -> None:
        live = [
            (row, shadow)
            for row, (shadow, tenancy) in enumerate(done.rows)
            if done.plan.samples[row] and shadow.tenancy == tenancy
        ]
        taken = {row: self._taken(done, row, shadow) for row, shadow in live}
        update = self.scheduler.update(done.plan, done.output)
        assert update.num_new_tokens == sum(
            taken[row] + (shadow.unreported if taken[row] else 0) for row, shadow in live
        )
        emitted, started, finished = [], [], {}
        for row, shadow in live:
            count, most = taken[row], int(done.plan.max_new[row])
            is_wrong = count < int(done.output.counts[row])
            shadow.planned -= most - count
            shadow.computed -= most - count
            first_reported = shadow.known - shadow.unreported
            if count and first_reported == len(shadow.job.prompt):
                started.append(shadow.request)
                shadow.num_started += 1
            if count and shadow.unreported and shadow.job.watched:
                for token in shadow.tokens[first_reported : shadow.known]:
                    emitted.append((shadow.request, row * done.plan.row_tokens, token))
                    shadow.emitted.append(token)
            shadow.unreported = 0 if count else shadow.unreported
            for index, got in enumerate(done.output.tokens[row, :count].tolist()):
                token = shadow.tokens[shadow.known]
                assert got == token, "a token that the request alone would not get"
                shadow.known += 1
                if shadow.job.watched:
                    emitted.append((shadow.request, row * done.plan.row_tokens + index, token))
                    shadow.emitted.append(token)
            if is_wrong:
                shadow.tenancy += 1
                shadow.planned, shadow.computed, shadow.starts_again = shadow.known, shadow.known - 1, True
            if shadow.known == len(shadow.tokens):
                finished[shadow.request] = shadow
        for scored in update.scored:
            shadow = self.shadows[scored.request.request_id]
            values = (WIDE_SCORES if shadow.job.wide else SCORES).of(done.output.reports)
            assert shadow.job.scored and values is not None
            for row, position in enumerate(scored.tokens, scored.first):
                shadow.scores[position] = (int(values.top_ids[row, 0]), int(values.ranks[row]))
        assert list(update.started) == started
        assert [(e.request, e.at, e.token_id) for e in update.emitted] == emitted
        self._check_finished(update, finished)
        self._check_state()

    def _taken(self, done: InFlight, row: int, shadow: Shadow) -> int:
        """How many tokens of a row are right: all, unless it guessed."""
        count, plan = int(done.output.counts[row]), done.plan
        if shadow.job.script is None or (plan.masked is not None and plan.masked[row]):
            return count
        pairs = zip(shadow.tokens[shadow.known :], done.output.tokens[row, :count].tolist(), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _check_finished(self, update: StepUpdate, expected: dict[Request, Shadow]) -> None:
        assert {end.request for end in update.finished} == expected.keys()
        for end in update.finished:
            shadow = expected[end.request]
            outputs, reason, stop_reason = shadow.job.answer()
            assert end.request.output_token_ids.tolist() == outputs
            assert (end.reason, end.stop_reason) == (reason, stop_reason)
            assert shadow.state == "running" and shadow.num_started == 1
            assert shadow.emitted == (outputs if shadow.job.watched else [])
            prompt, scored = shadow.job.prompt, range(1, len(shadow.job.prompt) if shadow.job.scored else 1)
            assert shadow.scores == {i: (next_token(prompt[:i]), prompt[i]) for i in scored}
            shadow.leave("ended")

    # The state, compared after every operation.

    def _check_state(self) -> None:
        self.scheduler.check_invariants()
        running = self._running()
        assert self.scheduler.num_running == len(running)
        assert self.scheduler.num_waiting == len(self._waiting())
        assert [request for _, request in self.scheduler.running()] == [
            s.request for s in sorted(running, key=lambda s: s.key)
        ]
        for number, group in enumerate(self.cache.groups):
            owned = {page for s in running for page in s.pages[number] if page != TRASH_PAGE}
            assert group.pool.num_owned == len(owned)
        for shadow in running:
            at, slots = shadow.slot, self.slots
            assert at is not None and slots.tenants[at] is shadow.request
            assert (slots.num_computed[at], slots.num_known[at]) == (shadow.computed, shadow.known)
            assert (slots.num_tokens[at], slots.prefill_len[at]) == (shadow.planned, shadow.prefill_len)
            for group, pages in zip(self.cache.groups, shadow.pages, strict=True):
                assert group.table[at].tolist() == pages + [TRASH_PAGE] * (self.cache.max_pages - len(pages))
            assert slots.outputs(at).tolist() == shadow.tokens[len(shadow.job.prompt) : shadow.known]
        for number in range(len(self.setup.groups)):
            self._check_sharing(running, number)
        for shadow in self._waiting():
            assert self.scheduler.num_cached_tokens(shadow.request) == self._num_cached(shadow)

    def _num_cached(self, shadow: Shadow) -> int:
        """The longest prefix whose pages every group has, but for those that no token after it sees."""
        size = self.setup.page_size
        if not self.setup.caching or shadow.job.scored:
            return 0
        hashes = shadow.request.hashes(size)
        lengths = (
            count
            for count in range((shadow.known - 1) // size + 1)
            if all(
                hashes[column] in group.pool._page_of_hash
                for group, of in zip(self.cache.groups, self.setup.groups, strict=True)
                for column in range(count)
                if self._is_seen(of, column, count * size)
            )
        )
        return max(lengths) * size

    def _check_sharing(self, running: list[Shadow], number: int) -> None:
        for i, a in enumerate(running):
            for b in running[:i]:
                ours, theirs = a.pages[number], b.pages[number]
                for page in set(ours) & set(theirs) - {TRASH_PAGE}:
                    index = ours.index(page)
                    assert theirs.index(page) == index, "a page has two places"
                    end = (index + 1) * self.setup.page_size
                    assert a.job.salt == b.job.salt and a.tokens[:end] == b.tokens[:end], "a page of other tokens"

    def _running(self) -> list[Shadow]:
        return [s for s in self.shadows.values() if s.state == "running"]

    def _waiting(self) -> list[Shadow]:
        return [s for s in self.shadows.values() if s.state == "waiting"]

    def _at(self, slot: int) -> Shadow:
        return next(s for s in self._running() if s.slot == slot)

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.setup.page_size)
