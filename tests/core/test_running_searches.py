"""Beams in the scheduler, over a device without a model: forks share pages, and nothing is read that is not there."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxvllm.core.beam import BeamSearch, BeamSearchParams
from jaxvllm.core.errors import ParameterError
from jaxvllm.core.kv_cache import GroupSize, KVCache
from jaxvllm.core.policy import POLICIES
from jaxvllm.core.request import GenerationRequest, Prompt, QueueKey, Request
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.core.slots import SlotTable
from jaxvllm.core.step_plan import Finished, StepOutput, StepPlan
from tests.core.beam_oracle import beam_search
from tests.core.fake_device import VOCAB_SIZE, FakeDevice, next_logprobs, next_token

EOS = 4
PAGE_SIZE, BUDGET, NUM_SLOTS, MAX_MODEL_LEN = 4, 8, 6, 48


@dataclass
class Rig:
    """A scheduler, a device, and two steps under way between them."""

    sizes: tuple[GroupSize, ...]
    policy: str = "v1"
    width: int = 4
    ends: dict[str, Finished] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache = KVCache(
            self.sizes, num_slots=NUM_SLOTS, max_model_len=MAX_MODEL_LEN, page_size=PAGE_SIZE, max_chunk=BUDGET
        )
        self.slots = SlotTable(NUM_SLOTS, MAX_MODEL_LEN)
        self.scheduler = Scheduler(self.slots, self.cache, POLICIES[self.policy], BUDGET)
        self.device = FakeDevice(NUM_SLOTS, self.sizes, PAGE_SIZE)
        self.requests: dict[str, Request] = {}
        self._in_flight: deque[tuple[StepPlan, StepOutput]] = deque()

    def add(
        self, prompt: list[int], max_tokens: int, beams: BeamSearchParams | None = None, wide: bool = False
    ) -> Request:
        """Queues a request. With `wide`, its beams get the values of all tokens, as more of them than here would."""
        number, limit = len(self.requests), len(prompt) + max_tokens
        num_logprobs = None if beams is None else -1 if wide else beams.num_candidates
        params = SamplingParams(max_tokens=max_tokens, logprobs=num_logprobs)
        request = Request(
            asked=GenerationRequest(f"r{number}", Prompt(None, np.array(prompt, np.int32)), params),
            seed=0,
            stop_token_ids=(),
            limit=limit,
            key=QueueKey(0, number),
            search=None if beams is None else BeamSearch(beams, len(prompt), limit, (EOS,)),
        )
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        return request

    def step(self) -> StepPlan | None:
        plan = self.scheduler.schedule(self.width)
        self.scheduler.check_invariants()
        if plan is not None:
            self._in_flight.append((plan, self.device.run(plan)))
        else:
            assert self._in_flight or not self.scheduler.has_work, "nothing to do and nothing to wait for"
        if self._in_flight and (plan is None or len(self._in_flight) == 2):
            update = self.scheduler.update(*self._in_flight.popleft())
            self.device.fork(update.forks)
            self.scheduler.check_invariants()
            for end in update.finished:
                assert end.request.request_id not in self.ends, "a request ended twice"
                self.ends[end.request.request_id] = end
        return plan

    def abort(self, request: Request) -> None:
        self.scheduler.finish(request.request_id)
        self.scheduler.check_invariants()

    def drain(self) -> None:
        patience = 2000
        while self.scheduler.has_work or self._in_flight:
            self.step()
            patience -= 1
            assert patience, "somebody waits for ever"
        assert self.cache.is_empty and self.slots.num_free == NUM_SLOTS

    def check(self, request: Request) -> None:
        """Asserts that a request that has ended got what it would get alone."""
        end, prompt = self.ends[request.request_id], request.prompt_token_ids.tolist()
        max_tokens = request.limit - len(prompt)
        if request.search is None:
            tokens = list(prompt)
            for _ in range(max_tokens):
                tokens.append(next_token(tokens))
            assert end.request.output_token_ids.tolist() == tokens[len(prompt) :]
            return
        params = request.search.params
        assert end.beams is not None
        expected = beam_search(
            next_logprobs, prompt, params.beam_width, max_tokens, EOS, params.length_penalty, params.ignore_eos
        )
        assert [tuple(one.token_id for one in beam.path()) for beam in end.beams] == [one.output for one in expected]
        assert [beam.cumulative_logprob for beam in end.beams] == [one.cum_logprob for one in expected]


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.parametrize("policy", ["v1", *(pytest.param(p, marks=pytest.mark.slow) for p in POLICIES if p != "v1")])
@given(data=st.data())
def test_beams_find_the_same_in_any_company(policy: str, data: st.DataObject) -> None:
    windows = data.draw(st.sampled_from([(None,), (None, 5), (6, 3)]))
    sizes = tuple(GroupSize(data.draw(st.integers(14, 40)), window) for window in windows)
    rig = Rig(sizes, policy, data.draw(st.sampled_from([1, 4])))
    aborted: set[str] = set()
    for _ in range(data.draw(st.integers(1, 7))):
        prompt = data.draw(st.sampled_from([[1, 2, 3, 0], [0, 1]]))
        prompt = prompt * data.draw(st.integers(1, 3)) + data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3))
        max_tokens = data.draw(st.integers(1, 9))
        beams = data.draw(
            st.none()
            | st.builds(
                BeamSearchParams,
                beam_width=st.integers(1, 5),
                max_tokens=st.just(max_tokens),
                ignore_eos=st.booleans(),
                length_penalty=st.sampled_from([0.0, 1.0, 2.0]),
            )
        )
        try:
            rig.add(prompt, max_tokens, beams, wide=data.draw(st.booleans()))
        except ParameterError:
            rig.scheduler.check_invariants()
        for _ in range(data.draw(st.integers(0, 4))):
            rig.step()
        if rig.requests and data.draw(st.integers(0, 5)) == 0:
            victim = data.draw(st.sampled_from(list(rig.requests.values())))
            if victim.request_id not in rig.ends:
                aborted.add(victim.request_id)
            rig.abort(victim)
    rig.drain()
    assert rig.ends.keys() | aborted == rig.requests.keys() and not rig.ends.keys() & aborted
    for request_id in rig.ends:
        rig.check(rig.requests[request_id])


def test_a_search_that_is_preempted_starts_again() -> None:
    # Each alone needs nearly the whole pool, and both are admitted.
    rig = Rig((GroupSize(16),))
    beams = BeamSearchParams(3, 14, ignore_eos=True)
    both = [rig.add([1, 2, 3, number], 14, beams) for number in range(2)]
    rig.drain()
    assert rig.scheduler.num_preemptions > 0 and both[1].num_preemptions > 0 == both[0].num_preemptions
    for request in both:
        rig.check(request)


def test_beams_share_their_full_pages() -> None:
    rig = Rig((GroupSize(40),))
    rig.add([1, 2, 3, 0] * 3 + [1], 9, BeamSearchParams(4, 9, ignore_eos=True))
    while len(slots := np.flatnonzero(rig.slots.is_beam & ~rig.slots.is_undecided & (rig.slots.num_known > 13))) < 4:
        rig.step()
    group = rig.cache.groups[0]
    pages = [group.pages(slot).tolist() for slot in slots]
    assert len({tuple(of_one[:3]) for of_one in pages}) == 1 and group.pool.ref_counts[pages[0][:3]].tolist() == [4] * 3
    assert len({of_one[3] for of_one in pages}) == 4
    assert group.pool.num_owned == 3 + 4
    rig.drain()


def test_other_rows_go_on_while_beams_wait_for_the_host() -> None:
    rig = Rig((GroupSize(64),))
    rig.add([1, 2], 12, BeamSearchParams(2, 12, ignore_eos=True))
    other = rig.add([3, 1], 30)
    has_beams, widths = [], []
    while len(rig.ends) < 2:
        plan = rig.step()
        if plan is not None:
            has_beams.append(bool((plan.num_rows - plan.num_decode == 0) and plan.num_rows > 1))
            widths.append(plan.row_tokens)
    rig.check(other)
    # Steps with beams and without take turns, and no burst keeps the beams waiting; afterwards the other bursts.
    assert [True, False] * 8 == has_beams[2:18]
    assert set(widths[:18]) == {1} and 4 in widths[18:]
    rig.drain()


def test_a_prompt_is_computed_beside_beams() -> None:
    rig = Rig((GroupSize(64),))
    rig.add([1, 2], 20, BeamSearchParams(4, 20, ignore_eos=True))
    while not (rig.slots.is_beam.sum() == 4 and not rig.slots.is_undecided.any()):
        rig.step()
    long = rig.add([3] * 40, 2)
    plans = [rig.step() for _ in range(8)]
    # In the first of these steps the prompt is new, in the others it is continued.
    assert sum(plan is not None and 0 < plan.num_decode < plan.num_rows for plan in plans) > 1
    rig.drain()
    rig.check(long)


def test_more_beams_than_slots_or_pages_are_refused() -> None:
    rig = Rig((GroupSize(13),))
    with pytest.raises(ParameterError, match="7 exceeds the 6 sequences that run at once") as raised:
        rig.add([1, 2], 2, BeamSearchParams(7, 2))
    assert raised.value.param == "n"
    # One full page of the prompt is shared, and each beam needs three more.
    with pytest.raises(ParameterError, match="new ones for each of 4 beams needs 13 pages of 4 tokens, but the pool"):
        rig.add([1, 2, 3, 4, 0], 12, BeamSearchParams(4, 12))
    fits = rig.add([1, 2, 3, 4, 0], 12, BeamSearchParams(3, 12))
    rig.drain()
    rig.check(fits)
