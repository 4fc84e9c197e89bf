"""The scheduler against the oracle of `simulation.py`: random work on small pools, and the cases that have names."""

from contextlib import suppress
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from jaxvllm.core import prefills
from jaxvllm.core.kv_cache import GroupSize, KVCache
from jaxvllm.core.policy import POLICIES
from jaxvllm.core.request import FinishReason
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.core.slots import SlotTable
from jaxvllm.core.step_plan import StepRoom
from jaxvllm.core.step_sizes import StepSizes
from tests.core.fake_device import VOCAB_SIZE, next_token, unforeseen
from tests.core.simulation import EOS, Job, Setup, Simulation

# Few stems and few tokens, so that prompts often share pages and answers often stop.
STEMS = ((), (0, 1, 2, 3), (0, 1, 2, 3, 0, 1, 2, 3), (0, 1, 2, 2, 0, 1, 2, 3))
TOKENS = st.integers(0, VOCAB_SIZE - 1)
STATES = GroupSize(9, keeps_state=True)
MORE_GROUPS = ((), (), (GroupSize(9, 3),), (GroupSize(14, 6), GroupSize(24)), (STATES,))


@st.composite
def setups(draw: st.DrawFn, policy: str) -> Setup:
    num_slots = draw(st.integers(1, 5))
    num_rows = draw(st.integers(1, num_slots))
    return Setup(
        policy=policy,
        num_slots=num_slots,
        num_pages=draw(st.integers(4, 24)),
        page_size=draw(st.sampled_from([1, 2, 4])),
        budget=num_slots + draw(st.integers(0, 12)),
        caching=draw(st.booleans()),
        depth=draw(st.sampled_from([2, 2, 1, 3])),
        decode_steps=draw(st.sampled_from([1, 1, 2, 5])),
        num_drafts=draw(st.sampled_from([0, 0, 1, 3])),
        seed=draw(st.sampled_from([None, None, 0, 1])),
        window=draw(st.sampled_from([None, None, None, 1, 4, 7])),
        more_groups=draw(st.sampled_from(MORE_GROUPS)),
        sizes=draw(st.sampled_from([None, StepSizes(((2, 1), (4, 2), (8, 5), (17, 5)), overhead=0)])),
        room=StepRoom(num_rows + draw(st.integers(0, 6)), num_rows),
        num_tight_steps=draw(st.sampled_from([0, 0, 3, 20])),
    )


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    tail = draw(st.lists(TOKENS, min_size=1, max_size=8))
    max_tokens = draw(st.integers(1, 12))
    return Job(
        prompt=(*draw(st.sampled_from(STEMS)), *tail),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_token_ids=tuple(draw(st.sampled_from([(), (), (2,), (1, EOS)]))),
        ignore_eos=draw(st.booleans()),
        salt=draw(st.sampled_from([None, None, None, "tenant"])),
        priority=draw(st.sampled_from([0, 0, 0, 1, -1])),
        watched=draw(st.booleans()),
        **draw(st.sampled_from([{}, {}, dict(scored=True), dict(scored=True, wide=True)])),
        script=draw(
            st.one_of(
                st.none(),
                st.lists(st.one_of(st.none(), TOKENS, TOKENS, TOKENS.map(unforeseen)), max_size=12).map(tuple),
            )
        ),
    )


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.lists(jobs(), min_size=1, max_size=4)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("follow"), st.integers(0, 30)),
    st.tuples(st.just("reset"), st.none()),
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_plan_and_every_end_is_what_the_oracle_predicts(policy: str, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefills, "SCORE_BATCH", data.draw(st.sampled_from([1, 5, 64])))
        simulate(Simulation(data.draw(setups(policy))), data)


def simulate(simulation: Simulation, data: st.DataObject) -> None:
    for name, value in data.draw(st.lists(ACTIONS, min_size=1, max_size=24)):
        match name:
            case "add":
                for job in value:
                    try:
                        simulation.add(job)
                    except ValueError as error:
                        assert "but the pool" in str(error)
            case "step":
                for _ in range(value):
                    simulation.step()
            case "follow" if simulation.shadows:
                shadows = list(simulation.shadows.values())
                before = shadows[value % len(shadows)]
                tokens = before.tokens if before.state == "ended" else before.job.prompt
                if len(tokens) < 40:
                    with suppress(ValueError):  # too long for the pool
                        simulation.add(Job((*tokens, 1), max_tokens=5, ignore_eos=False))
            case "abort" if simulation.shadows:
                shadows = list(simulation.shadows.values())
                simulation.abort(shadows[value % len(shadows)])
            case "reset":
                simulation.cache.reset_prefix_cache()
    simulation.drain()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_crowd_on_a_small_pool_ends_with_the_tokens_each_would_get_alone(policy: str) -> None:
    rng = np.random.default_rng(0)
    simulation = Simulation(Setup(policy, num_slots=8, num_pages=20, page_size=2, budget=12))
    for _ in range(60):
        stem = STEMS[rng.integers(len(STEMS))]
        simulation.add(Job((*stem, *rng.integers(0, VOCAB_SIZE, 5).tolist()), max_tokens=int(rng.integers(1, 14))))
    simulation.drain()
    preempted = simulation.scheduler.num_preemptions
    assert preempted == 0 if POLICIES[policy].reserves_limit else preempted > 0


# Preemption.


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_alone_waits_for_its_own_tokens_and_is_not_preempted(policy: str) -> None:
    # Its window of 4 holds 4 pages, and each of three steps in flight opens another: the pool has 5.
    setup = Setup(policy, num_slots=1, num_pages=6, page_size=1, budget=1, caching=False, depth=3, window=4)
    simulation = Simulation(setup)
    simulation.add(Job((0, 1), max_tokens=9))
    simulation.drain()
    assert simulation.scheduler.num_preemptions == 0


def crowded(policy: str, page_size: int = 4) -> Simulation:
    """Two requests that fill the pool and reach a page boundary together, with one page left."""
    setup = Setup(policy, num_slots=2, num_pages=1 + 2 * 2 + 1, page_size=page_size, depth=2)
    simulation = Simulation(setup)
    for start in range(2):
        prompt = tuple((start + i) % VOCAB_SIZE for i in range(2 * page_size))
        simulation.add(Job(prompt, max_tokens=2 * page_size))
    return simulation


@pytest.mark.parametrize("policy", ["v0", "v1"])
def test_two_that_need_the_last_page_take_turns_and_both_end(policy: str) -> None:
    simulation = crowded(policy)
    simulation.drain()
    first, second = simulation.shadows.values()
    assert first.request.num_preemptions == 0
    assert second.request.num_preemptions > 0
    # No more steps than one after the other, and a prefill for each preemption.
    assert simulation.num_steps <= 2 * (8 + 2) + 2 * second.request.num_preemptions


def test_the_victim_is_the_last_by_priority_then_arrival() -> None:
    simulation = Simulation(Setup(num_slots=3, num_pages=8, page_size=2, budget=16, depth=1))
    for index, priority in enumerate((0, 5, 0)):
        simulation.add(Job((index, 1, 2, 3), max_tokens=6, priority=priority))
    first, second, third = simulation.shadows.values()
    while not simulation.scheduler.num_preemptions:
        simulation.step()
    assert [shadow.state for shadow in (first, second, third)] == ["running", "waiting", "running"]
    while simulation.scheduler.num_preemptions == 1:
        simulation.step()
    assert [shadow.state for shadow in (first, second, third)] == ["running", "waiting", "waiting"]
    simulation.drain()


def test_a_preempted_request_goes_before_later_arrivals_and_reuses_its_pages() -> None:
    simulation = crowded("v1")
    latecomer = simulation.add(Job((1, 1), max_tokens=1))
    _, victim = list(simulation.shadows.values())[:2]
    while not victim.request.num_preemptions:
        simulation.step()
    while victim.state == "waiting":
        assert latecomer.state == "waiting"
        simulation.step()
    assert victim.computed > 0 and victim.request.num_cached_tokens == 0  # the caller's figure is the first one
    simulation.drain()


# The queue.


def test_first_come_first_served() -> None:
    simulation = Simulation(Setup(num_slots=2, budget=4, caching=False))
    shadows = [simulation.add(Job((i % VOCAB_SIZE, 1, 2), max_tokens=2)) for i in range(6)]
    simulation.drain()
    admitted = [admission.request for plan in simulation.plans for admission in plan.admissions]
    assert admitted == [shadow.request for shadow in shadows]


def test_the_smaller_priority_runs_first() -> None:
    simulation = Simulation(Setup(num_slots=1))
    for priority in (2, 0, 1, 0):
        simulation.add(Job((priority, 3), max_tokens=1, priority=priority))
    simulation.drain()
    order = [admission.request.key.priority for plan in simulation.plans for admission in plan.admissions]
    assert order == [0, 0, 1, 2]


def test_decode_goes_on_beside_a_long_prompt() -> None:
    simulation = Simulation(Setup(num_slots=2, budget=4, num_pages=64))
    simulation.add(Job((1,), max_tokens=20))
    simulation.step()
    simulation.add(Job((2,) * 30, max_tokens=1))
    plans_before = len(simulation.plans)
    for _ in range(10):
        simulation.step()
    chunks = simulation.plans[plans_before:]
    assert [plan.num_decode for plan in chunks] == [1] * 10
    assert [int(plan.lengths[1]) for plan in chunks] == [3] * 10
    simulation.drain()


def test_free_rows_have_every_other_step_to_themselves_beside_one_that_waits_for_masks() -> None:
    simulation = Simulation(Setup(num_slots=4, decode_steps=1, num_drafts=1))
    script = tuple(unforeseen((next_token((index,)) + index) % VOCAB_SIZE) for index in range(40))
    constrained = simulation.add(Job((1, 2), max_tokens=40, script=script))
    for first in range(3):
        simulation.add(Job((first, 3), max_tokens=50))
    for _ in range(30):
        simulation.step()
    slot = constrained.slot
    kinds = [(plan.is_masked, slot in plan.slots, plan.row_tokens) for plan in simulation.plans]
    turn = [(True, True, 1), (False, False, 2)]
    assert any(kinds[index : index + 6] == 3 * turn for index in range(len(kinds))), kinds
    simulation.drain()


def test_v0_computes_prompts_alone() -> None:
    simulation = Simulation(Setup("v0", num_slots=2, budget=4, num_pages=64))
    simulation.add(Job((1,), max_tokens=20))
    simulation.step()
    simulation.add(Job((2,) * 10, max_tokens=1))
    for _ in range(4):
        simulation.step()
    assert [(plan.num_decode, plan.num_rows) for plan in simulation.plans[-4:]] == [(0, 1), (0, 1), (0, 1), (1, 1)]
    simulation.drain()


def test_static_fills_a_batch_only_when_the_last_has_ended() -> None:
    simulation = Simulation(Setup("static", num_slots=2, budget=16, depth=1))
    long, short = (simulation.add(Job((i, 1), max_tokens=n)) for i, n in ((0, 9), (1, 1)))
    third = simulation.add(Job((2, 1), max_tokens=1))
    for _ in range(8):
        simulation.step()
    assert (long.state, short.state, third.state) == ("running", "ended", "waiting")
    simulation.drain()


def test_static_runs_copies_of_one_prompt_in_one_batch() -> None:
    # To wait for a neighbour's pages would be to wait for the next batch.
    simulation = Simulation(Setup("static", num_slots=4, num_pages=64))
    for _ in range(4):
        simulation.add(Job((0, 1, 2, 3, 4), max_tokens=4))
    simulation.step()
    assert simulation.scheduler.num_running == 4
    simulation.drain()


def test_reserving_policies_take_all_pages_at_once() -> None:
    job = Job((1, 2, 3), max_tokens=10)
    for policy, pages in (("static", 3), ("continuous", 3), ("v0", 1), ("v1", 1)):
        simulation = Simulation(Setup(policy))
        simulation.add(job)
        simulation.step()
        assert simulation.pool.num_owned == pages, policy


# The prefix cache.


@pytest.mark.parametrize(
    ("prompt_length", "cached"),
    [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)],  # the last token is always computed
)
def test_a_second_request_reuses_the_full_pages_of_the_first(prompt_length: int, cached: int) -> None:
    simulation = Simulation(Setup(page_size=4))
    prompt = (0, 1, 2, 3, 4, 0, 1, 2, 3)[:prompt_length]
    for expected in (0, cached):
        shadow = simulation.add(Job(prompt, max_tokens=1))
        simulation.drain()
        assert shadow.request.num_cached_tokens == expected


def test_a_conversation_reuses_the_answer_too() -> None:
    simulation = Simulation(Setup(page_size=4))
    question = (0, 1, 2)
    first = simulation.add(Job(question, max_tokens=7))
    simulation.drain()
    follow_up = simulation.add(Job((*first.tokens, 1, 2), max_tokens=1))
    simulation.drain()
    # 10 tokens, and the KV of the last one was never computed: two full pages.
    assert follow_up.request.num_cached_tokens == 8


@pytest.mark.parametrize("length", [4, 8])
def test_the_kv_of_a_stop_token_is_never_found(length: int) -> None:
    # The device ends a row with its stop token, so a step in flight does not compute that token's KV.
    for seed in range(1000):
        prompt = tuple(np.random.default_rng(seed).integers(0, VOCAB_SIZE, 3).tolist())
        outputs, reason, _ = Job(prompt, max_tokens=9, ignore_eos=False).answer()
        if reason == FinishReason.STOP and len(prompt) + len(outputs) == length:
            break
    simulation = Simulation(Setup(page_size=4, depth=2))
    first = simulation.add(Job(prompt, max_tokens=9, ignore_eos=False))
    simulation.drain()
    assert first.tokens[-1] == EOS and len(first.tokens) == length
    follow_up = simulation.add(Job((*first.tokens, 1, 2), max_tokens=3))
    simulation.drain()  # the fake device reads every position of its context
    assert follow_up.request.num_cached_tokens == length - 4


def test_another_salt_shares_nothing() -> None:
    simulation = Simulation(Setup(page_size=4))
    cached = []
    for salt in (None, "a", "b", "a", None):
        cached.append(simulation.add(Job((0, 1, 2, 3, 4), max_tokens=1, salt=salt)))
        simulation.drain()
    assert [shadow.request.num_cached_tokens for shadow in cached] == [0, 0, 0, 4, 4]


def test_copies_of_one_prompt_cost_one_prefill() -> None:
    simulation = Simulation(Setup(num_slots=4, page_size=4, budget=32))
    shadows = [simulation.add(Job((0, 1, 2, 3, 0, 1, 2, 3, 4), max_tokens=3)) for _ in range(4)]
    other = simulation.add(Job((4, 4, 4), max_tokens=3))
    simulation.step()
    # The copies wait one step for the first one's pages; whoever is after them does not.
    assert [shadow.state for shadow in (*shadows, other)] == ["running", "waiting", "waiting", "waiting", "running"]
    simulation.step()  # two slots are taken, two are left
    assert [shadow.state for shadow in shadows] == ["running", "running", "running", "waiting"]
    simulation.drain()
    assert [shadow.request.num_cached_tokens for shadow in shadows] == [0, 8, 8, 8]
    assert sum(len(plan.token_ids) for plan in simulation.plans) == 9 + 3 * 1 + 3


def test_the_cached_count_is_zero_without_prefix_caching() -> None:
    simulation = Simulation(Setup(caching=False))
    shadows = [simulation.add(Job((0, 1, 2, 3, 4), max_tokens=1)) for _ in range(2)]
    simulation.drain()
    assert [shadow.request.num_cached_tokens for shadow in shadows] == [0, 0]


def test_a_full_pool_evicts_the_least_recently_used_prefix() -> None:
    simulation = Simulation(Setup(page_size=4, num_pages=1 + 3 * 2, num_slots=1))
    prompts = [(stem, 1, 2, 3, 4) for stem in range(3)]
    for prompt in (*prompts, prompts[0]):  # the first is used again: the second is now the oldest
        simulation.add(Job(prompt, max_tokens=1))
        simulation.drain()
    simulation.add(Job((4,) * 15, max_tokens=1))  # needs 4 pages: the three free ones and one prefix
    simulation.drain()
    hits = [simulation.add(Job(prompt, max_tokens=1)) for prompt in (prompts[0], prompts[2], prompts[1])]
    simulation.drain()
    assert [shadow.request.num_cached_tokens for shadow in hits] == [4, 4, 0]


# Ends.


def prompt_whose_answer_repeats() -> tuple[int, ...]:
    """A prompt whose first and third next tokens are equal, and the second is another."""
    for seed in range(1000):
        prompt = tuple(np.random.default_rng(seed).integers(0, VOCAB_SIZE, 3).tolist())
        a, b, c = Job(prompt, max_tokens=3).answer()[0]
        if a == c != b and EOS not in (a, b):
            return prompt
    raise AssertionError("no such prompt")


@pytest.mark.parametrize(("min_tokens", "length"), [(0, 1), (1, 3), (2, 3), (3, 4)])
def test_a_stop_id_counts_only_after_min_tokens(min_tokens: int, length: int) -> None:
    prompt = prompt_whose_answer_repeats()
    stop = next_token(prompt)
    limit = 4 if min_tokens == 3 else 8  # the limit ends what the stop id may not
    simulation = Simulation(Setup())
    shadow = simulation.add(Job(prompt, max_tokens=limit, min_tokens=min_tokens, stop_token_ids=(stop,)))
    simulation.drain()
    outputs, reason, stop_reason = shadow.job.answer()
    assert len(outputs) == length
    if length < limit:
        assert (reason, stop_reason) == (FinishReason.STOP, stop)


def test_eos_has_no_stop_reason_and_can_be_ignored() -> None:
    prompt = next(p for a in range(5) for b in range(5) if next_token(p := (a, b)) == EOS)
    assert Job(prompt, ignore_eos=False).answer() == ([EOS], FinishReason.STOP, None)
    simulation = Simulation(Setup())
    stopped = simulation.add(Job(prompt, ignore_eos=False))
    ignoring = simulation.add(Job(prompt, max_tokens=3))
    simulation.drain()  # the simulation compares both with the answer
    assert len(stopped.request.output_token_ids) == 1
    assert len(ignoring.request.output_token_ids) == 3


def test_a_step_in_flight_tells_a_slot_s_next_tenant_nothing() -> None:
    simulation = Simulation(Setup(num_slots=1, depth=3, caching=False))
    first = simulation.add(Job((0, 1), max_tokens=20, watched=True))
    for _ in range(3):
        simulation.step()
    simulation.abort(first)
    second = simulation.add(Job((2, 3), max_tokens=5, watched=True))
    simulation.drain()
    assert second.emitted == second.job.answer()[0]
    assert first.emitted == first.job.answer()[0][: len(first.emitted)] and len(first.emitted) < 3


# Refusals.


def test_a_request_that_has_ended_makes_no_step_smaller() -> None:
    sizes = StepSizes(((2, 1), (4, 2)), overhead=0)
    simulation = Simulation(Setup(num_slots=1, num_pages=8, page_size=2, budget=2, caching=False, sizes=sizes))
    simulation.abort(simulation.add(Job(prompt=(0,))))
    simulation.add(Job(prompt=(0, 1, 2, 3, 0), max_tokens=1))
    simulation.drain()
    assert [plan.num_tokens for plan in simulation.plans] == [2, 2, 1]


def test_a_budget_below_the_number_of_slots_is_refused() -> None:
    slots = SlotTable(8, 64)
    cache = KVCache([GroupSize(8)], num_slots=8, max_model_len=64, page_size=4, max_chunk=8)
    with pytest.raises(ValueError, match="max_num_batched_tokens 7 must be at least max_num_seqs 8.*raise the one"):
        Scheduler(slots, cache, POLICIES["v1"], 7)
    Scheduler(slots, cache, POLICIES["v1"], 8)


def test_a_request_larger_than_the_pool_is_refused_and_the_others_run_on() -> None:
    simulation = Simulation(Setup(num_pages=4, page_size=4))
    fits = Job((1,) * 5, max_tokens=8)  # 13 tokens, and the last one needs no KV: 3 pages
    shadow = simulation.add(fits)
    with pytest.raises(ValueError, match="needs 4 pages of 4 tokens, but the pool has 3: lower max_tokens"):
        simulation.add(replace(fits, max_tokens=9))
    simulation.drain()
    assert len(shadow.request.output_token_ids) == 8


@pytest.mark.parametrize("steps", [0, 2])
def test_an_id_in_use_is_refused_until_its_request_ends(steps: int) -> None:
    simulation = Simulation(Setup())
    shadow = simulation.add(Job((1, 2)))
    for _ in range(steps):
        simulation.step()
    with pytest.raises(ValueError, match="request id 'r0' is in use: choose another"):
        simulation.scheduler.add(shadow.request)
    simulation.drain()
    assert simulation.scheduler.finish("r0") is None


def test_an_idle_scheduler_plans_nothing() -> None:
    simulation = Simulation(Setup())
    assert simulation.scheduler.schedule() is None
    assert not simulation.scheduler.has_work
