"""Requests go where the oracle says: it counts plain objects, and knows nothing of slots and hash tables."""

from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from jaxvllm.core.page_pool import extend_page_hashes
from jaxvllm.core.request import GenerationRequest, Prompt, QueueKey, Request
from jaxvllm.core.routing import TOKENS_PER_RUNNING
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.engine.router import Router
from tests.core.simulation import Job, Setup, Simulation

STEMS = ((0, 1, 2, 3) * 2, (0, 1, 2, 3, 3, 2, 1, 0), ())
JOBS = st.builds(
    lambda stem, tail, max_tokens, salt: Job((*stem, *tail), max_tokens=max_tokens, salt=salt),
    stem=st.sampled_from(STEMS),
    tail=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    max_tokens=st.integers(1, 5),
    salt=st.sampled_from([None, None, "tenant"]),
)
ACTIONS = st.one_of(
    JOBS,
    st.integers(0, 3),  # steps of that replica
    st.just("all end"),
)


def request(job: Job, session_id: str | None = None) -> Request:
    return Request(
        asked=GenerationRequest(
            "routed",
            Prompt(None, np.array(job.prompt, np.int32), job.salt),
            SamplingParams(max_tokens=job.max_tokens),
            session_id=session_id,
        ),
        seed=0,
        stop_token_ids=(),
        limit=job.limit,
        key=QueueKey(0, 0),
    )


class Oracle:
    """One replica as the router should see it, and when it was last chosen."""

    def __init__(self, setup: Setup):
        self.simulation = Simulation(setup)
        self.last_chosen = -1  # never; `min` takes those in the order given

    @property
    def scheduler(self) -> Scheduler:
        return self.simulation.scheduler

    def load(self) -> int:
        states = [shadow.state for shadow in self.simulation.shadows.values()]
        return 4 * states.count("waiting") + states.count("running")

    def cached_pages(self, job: Job) -> int:
        """Whole pages that the pool finds, the last token left out, for its logits are needed."""
        setup = self.simulation.setup
        hashes = extend_page_hashes([], np.array(job.prompt[:-1], np.int32), setup.page_size, job.salt)
        return len(self.simulation.pool.match(hashes)) if setup.caching else 0

    def contents(self) -> tuple[object, ...]:
        pool = self.simulation.pool
        return (pool.ref_counts.tolist(), list(pool._free), list(pool._cached), dict(pool._page_of_hash))


def expected(oracles: Sequence[Oracle], job: Job) -> Oracle:
    return min(oracles, key=lambda one: (one.load(), -one.cached_pages(job), one.last_chosen))


@settings(max_examples=60)
@given(count=st.integers(1, 4), caching=st.sampled_from([True, True, False]), actions=st.lists(ACTIONS, max_size=25))
def test_as_the_oracle(count: int, caching: bool, actions: list[Job | int | str]) -> None:
    oracles = [Oracle(Setup(num_slots=2, num_pages=16, caching=caching)) for _ in range(count)]
    router = Router(oracle.scheduler for oracle in oracles)
    for turn, action in enumerate(actions):
        if isinstance(action, Job):
            before = [oracle.contents() for oracle in oracles]
            chosen = router.choose(request(action))
            assert [oracle.contents() for oracle in oracles] == before, "asking changed something"
            oracle = expected(oracles, action)
            assert chosen is oracle.scheduler
            oracle.last_chosen = turn
            oracle.simulation.add(action)
        elif isinstance(action, int):
            oracles[action % count].simulation.step()
        else:
            for oracle in oracles:
                oracle.simulation.drain()
    for oracle in oracles:
        oracle.simulation.drain()
        oracle.scheduler.check_invariants()


@pytest.fixture
def three() -> list[Oracle]:
    return [Oracle(Setup(num_slots=8, num_pages=64)) for _ in range(3)]


def route(router: Router, oracles: Sequence[Oracle], job: Job) -> int:
    chosen = router.choose(request(job))
    [index] = [i for i, oracle in enumerate(oracles) if oracle.scheduler is chosen]
    oracles[index].simulation.add(job)
    return index


def test_equal_replicas_take_turns(three: list[Oracle]) -> None:
    router = Router(oracle.scheduler for oracle in three)
    assert [route(router, three, Job((i % 4,))) for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_waiting_request_weighs_as_much_as_four_running(three: list[Oracle]) -> None:
    busy, fuller, waiting = three
    for _ in range(4):
        busy.simulation.add(Job((1,)))
    for _ in range(5):
        fuller.simulation.add(Job((1,)))
    for oracle in (busy, fuller):
        oracle.simulation.step()
    waiting.simulation.add(Job((1,)))
    router = Router(oracle.scheduler for oracle in three)
    assert [route(router, three, Job((2,))) for _ in range(2)] == [0, 2]  # 4, 5 and 4; then 8, 5 and 4


def test_a_prompt_goes_where_its_prefix_is(three: list[Oracle]) -> None:
    router = Router(oracle.scheduler for oracle in three)
    prompts = [(stem,) * 9 for stem in range(3)]
    assert [route(router, three, Job(prompt)) for prompt in prompts] == [0, 1, 2]
    for oracle in three:
        oracle.simulation.drain()
    for index in (2, 2, 0, 1, 0):
        assert route(router, three, Job((*prompts[index], 3))) == index
        three[index].simulation.drain()
    assert route(router, three, Job((*prompts[0], 3), salt="tenant")) == 2, "another's pages do not count, turns do"
    assert route(router, three, Job((*prompts[2], 3))) == 1, "load goes before prefixes"


def queued_tokens(oracle: Oracle) -> int:
    shadows = oracle.simulation.shadows.values()
    waiting = sum(shadow.request.num_tokens for shadow in shadows if shadow.state == "waiting")
    return waiting + sum(shadow.prefill_len - shadow.computed for shadow in shadows if shadow.prefilling)


@settings(max_examples=60)
@given(actions=st.lists(ACTIONS, max_size=25))
def test_by_prefix_as_the_oracle(actions: list[Job | int | str]) -> None:
    oracles = [Oracle(Setup(num_slots=2, num_pages=16)) for _ in range(3)]
    router = Router((oracle.scheduler for oracle in oracles), "prefix")

    def cost(one: Oracle, job: Job) -> int:
        num_cached = one.cached_pages(job) * one.simulation.setup.page_size
        num_running = [shadow.state for shadow in one.simulation.shadows.values()].count("running")
        return queued_tokens(one) + TOKENS_PER_RUNNING * num_running + len(job.prompt) - num_cached

    for turn, action in enumerate(actions):
        if isinstance(action, Job):
            oracle = min(oracles, key=lambda one, job=action: (cost(one, job), one.last_chosen))
            assert router.choose(request(action)) is oracle.scheduler
            oracle.last_chosen = turn
            oracle.simulation.add(action)
        elif isinstance(action, int):
            oracles[action % 3].simulation.step()
        else:
            for oracle in oracles:
                oracle.simulation.drain()


def test_a_session_stays_on_its_replica_whatever_the_load_is(three: list[Oracle]) -> None:
    router = Router((oracle.scheduler for oracle in three), "session")
    places = {}
    for index in range(12):
        chosen = router.choose(request(Job((1,)), f"talk-{index}"))
        places[index] = next(place for place, oracle in enumerate(three) if oracle.scheduler is chosen)
    assert set(places.values()) == {0, 1, 2}
    for _ in range(9):
        three[places[0]].simulation.add(Job((2,)))
    assert router.choose(request(Job((1,)), "talk-0")) is three[places[0]].scheduler
    assert router.choose(request(Job((1,)))) is not three[places[0]].scheduler, "without a session the load counts"
