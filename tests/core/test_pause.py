"""Pauses of a scheduler: whatever comes in whatever order, every request ends once, with its own tokens."""

from collections import deque

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxvllm.core.kv_cache import GroupSize, KVCache
from jaxvllm.core.pause import PAUSE_MODES, PauseMode, PauseState
from jaxvllm.core.policy import POLICIES
from jaxvllm.core.request import GenerationRequest, Prompt, QueueKey, Request
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.core.slots import SlotTable
from jaxvllm.core.step_plan import StepOutput, StepPlan
from tests.core.fake_device import VOCAB_SIZE, FakeDevice
from tests.core.simulation import Job

# Pages for one long request, or for a few short ones: they preempt each other.
SLOTS, PAGES, PAGE_SIZE, BUDGET, LENGTH = 3, 9, 2, 6, 16
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6)


class PausedScheduler(RuleBasedStateMachine):
    """Does with a scheduler what an engine does, over a device that notices every read of a page that is not there."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [GroupSize(PAGES)]
        cache = KVCache(sizes, num_slots=SLOTS, max_model_len=LENGTH, page_size=PAGE_SIZE, max_chunk=BUDGET)
        self.scheduler = Scheduler(SlotTable(SLOTS, LENGTH), cache, POLICIES["v1"], BUDGET)
        self.device = FakeDevice(SLOTS, sizes, PAGE_SIZE)
        self.jobs: dict[str, Job] = {}
        self.ends: dict[str, str] = {}
        self.begun: set[str] = set()
        self.in_flight: deque[tuple[StepPlan, StepOutput]] = deque()

    @property
    def is_settled(self) -> bool:
        is_paused = self.scheduler.pause_state is not PauseState.UNPAUSED
        return is_paused and not self.in_flight and not self.scheduler.has_work

    def end(self, request: Request, reason: str) -> None:
        assert request.request_id not in self.ends, "a request has ended twice"
        self.ends[request.request_id] = reason
        tokens, _, _ = self.jobs[request.request_id].answer()
        got = request.output_token_ids.tolist()
        assert got == (tokens[: len(got)] if reason == "abort" else tokens)

    @rule(prompt=TOKENS, max_tokens=st.integers(1, 8), priority=st.integers(0, 1), watched=st.booleans())
    def submit(self, prompt: list[int], max_tokens: int, priority: int, watched: bool) -> None:
        name, job = f"r{len(self.jobs)}", Job(tuple(prompt), max_tokens)
        asked = GenerationRequest(name, Prompt(None, np.array(prompt, np.int32)), SamplingParams(max_tokens=max_tokens))
        key = QueueKey(priority, len(self.jobs))
        self.jobs[name] = job
        request = Request(asked=asked, seed=0, stop_token_ids=(), limit=job.limit, key=key)
        self.scheduler.add(request, watched=watched)

    @rule(number=st.integers(0, 30))
    def abort(self, number: int) -> None:
        if (ended := self.scheduler.finish(f"r{number}")) is not None:
            self.end(ended, "abort")

    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.step_once()

    def step_once(self) -> None:
        state = self.scheduler.pause_state
        plan = self.scheduler.schedule(num_steps=2) if len(self.in_flight) < 2 else None
        if plan is not None:
            assert state is not PauseState.PAUSED_ALL, "a frozen scheduler plans a step"
            admitted = {one.request.request_id for one in plan.admissions}
            assert state is PauseState.UNPAUSED or admitted <= self.begun, "a new request has begun in a pause"
            self.begun |= admitted
            self.in_flight.append((plan, self.device.run(plan)))
        if self.in_flight and (plan is None or len(self.in_flight) == 2):
            for end in self.scheduler.update(*self.in_flight.popleft()).finished:
                self.end(end.request, end.reason.value)

    @rule(mode=st.sampled_from(PAUSE_MODES))
    def pause(self, mode: PauseMode) -> None:
        if mode == "abort":
            for name in self.jobs:
                self.abort(int(name[1:]))
        self.scheduler.pause_state = PauseState.of(mode)

    @rule()
    def resume(self) -> None:
        self.scheduler.pause_state = PauseState.UNPAUSED

    @rule()
    def settle(self) -> None:
        """What a caller of `pause` waits for: it comes, and no request that has begun waits under `wait`."""
        if self.scheduler.pause_state is PauseState.UNPAUSED:
            return
        for _ in range(60):
            if not self.is_settled:
                self.step_once()
        assert self.is_settled, "a pause never ends"
        if self.scheduler.pause_state is PauseState.PAUSED_NEW:
            assert self.scheduler.num_running == 0
            assert not self.begun - self.ends.keys(), "a request that has begun waits"

    @precondition(lambda self: self.is_settled)
    @rule()
    def release(self) -> None:
        """As `Engine.release_kv`, and the device forgets everything."""
        self.scheduler.preempt_all()
        self.scheduler.cache.reset_prefix_cache()
        self.device = FakeDevice(SLOTS, [GroupSize(PAGES)], PAGE_SIZE)
        assert self.scheduler.cache.is_empty

    @invariant()
    def agrees(self) -> None:
        self.scheduler.check_invariants()
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.jobs) - len(self.ends)

    def teardown(self) -> None:
        self.resume()
        for _ in range(40 + 20 * len(self.jobs)):
            self.step_once()
        assert self.ends.keys() == self.jobs.keys(), "a request never ends"
        assert self.scheduler.cache.is_empty


TestPausedScheduler = PausedScheduler.TestCase
TestPausedScheduler.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_mode_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="mode must be one of abort, wait, keep, not 'stop'"):
        PauseState.of("stop")  # type: ignore[arg-type]
