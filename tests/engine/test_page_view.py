"""The picture of the pool says what the pool says."""

import numpy as np
import pytest

from jaxvllm.core.kv_cache import GroupSize, KVCache
from jaxvllm.core.policy import POLICIES
from jaxvllm.core.request import GenerationRequest, Prompt, QueueKey, Request
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.core.slots import SlotTable
from jaxvllm.core.step_plan import StepOutput
from jaxvllm.engine.page_view import PageState, PoolView

PAGE_SIZE = 16
NUM_PAGES = 12
PROMPT = range(100, 140)  # two full pages and half of one


@pytest.fixture
def scheduler() -> Scheduler:
    cache = KVCache([GroupSize(NUM_PAGES)], num_slots=4, max_model_len=96, page_size=PAGE_SIZE, max_chunk=64)
    return Scheduler(SlotTable(num_slots=4, max_model_len=96), cache, POLICIES["v1"], max_num_batched_tokens=64)


def add(scheduler: Scheduler, request_id: str, arrival: int) -> None:
    prompt = np.array(PROMPT, np.int32)
    scheduler.add(
        Request(
            asked=GenerationRequest(request_id, Prompt(None, prompt), SamplingParams(temperature=0)),
            seed=0,
            stop_token_ids=(),
            limit=len(prompt) + 40,
            key=QueueKey(0, arrival),
        )
    )


def step(scheduler: Scheduler, token_id: int) -> None:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update(
        plan, StepOutput(np.full((plan.num_rows, 1), token_id, np.int32), np.ones(plan.num_rows, np.int32))
    )


def test_pages_of_running_requests(scheduler: Scheduler) -> None:
    add(scheduler, "first", 0)
    add(scheduler, "second", 1)
    step(scheduler, 7)  # the prompt of one; the other waits for its pages
    step(scheduler, 8)
    step(scheduler, 9)
    view = PoolView.take(scheduler)
    first, second = view.requests["first"], view.requests["second"]
    # 40 of the prompt, then 7 and 8; 9 is known but its KV is not computed yet.
    assert [token for page in first for token in page.token_ids] == [*PROMPT, 7, 8]
    assert [token for page in second for token in page.token_ids] == [*PROMPT, 8]
    assert [page.first_position for page in first] == [0, 16, 32]
    assert [page.page for page in first][:2] == [page.page for page in second][:2]
    assert [(page.num_owners, page.findable) for page in first] == [(2, True), (2, True), (1, False)]
    assert view.states.count(PageState.OWNED) == 4
    assert view.states.count(PageState.FREE) == NUM_PAGES - 1 - 4
    assert view.states[0] == PageState.TRASH


def test_a_dispatched_step_is_not_shown_before_its_tokens_are_known(scheduler: Scheduler) -> None:
    add(scheduler, "one", 0)
    step(scheduler, 7)
    scheduler.schedule()  # computes the KV of token 7, and token 8 is in flight
    scheduler.schedule()  # computes the KV of token 8, which nobody here has seen
    [pages] = PoolView.take(scheduler).requests.values()
    assert [token for page in pages for token in page.token_ids] == [*PROMPT, 7]


def test_an_ended_request_leaves_cached_pages(scheduler: Scheduler) -> None:
    add(scheduler, "one", 0)
    step(scheduler, 7)
    before = PoolView.take(scheduler)
    scheduler.finish("one")
    after = PoolView.take(scheduler)
    assert not after.requests
    assert after.states.count(PageState.CACHED) == 2
    assert after.states.count(PageState.FREE) == NUM_PAGES - 1 - 2
    assert len(before.requests["one"]) == 3, "a view is a copy"


def test_picture(scheduler: Scheduler) -> None:
    add(scheduler, "first", 0)
    add(scheduler, "second", 1)
    step(scheduler, 7)
    step(scheduler, 8)
    [picture, *legend] = str(PoolView.take(scheduler)).splitlines()
    assert len(picture) == NUM_PAGES
    assert sorted(picture) == sorted("#**ab" + "." * (NUM_PAGES - 5))
    assert picture[0] == "#"
    assert legend[:2] == ["a request first: 41 tokens in 3 pages", "b request second: 40 tokens in 3 pages"]
    assert [line[0] for line in legend[2:]] == ["*", ".", "#"]


def test_picture_ends_where_only_free_pages_follow() -> None:
    states = [PageState.FREE] * 1000
    states[0], states[70] = PageState.TRASH, PageState.CACHED
    lines = str(PoolView(PAGE_SIZE, tuple(states), {})).splitlines()
    assert lines[:2] == ["#" + "." * 63, "." * 6 + "+" + "." * 57]
    assert [line[0] for line in lines[2:]] == ["+", ".", "#"]
    assert "(998)" in lines[3]
