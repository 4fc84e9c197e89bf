"""Requests whose pages come from elsewhere yield the tokens that they would yield alone, and every page comes back."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxvllm.core.kv_cache import GroupSize, KVCache
from jaxvllm.core.page_loads import PageLoad
from jaxvllm.core.page_pool import TRASH_PAGE
from jaxvllm.core.policy import POLICIES
from jaxvllm.core.request import GenerationRequest, Prompt, QueueKey, Request
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.core.slots import SlotTable
from jaxvllm.core.step_plan import StepOutput, StepPlan
from tests.core.fake_device import FakeDevice, next_token

PAGE_SIZE, MAX_LEN = 4, 64

# Of each group what a page holds; None where it had left the window.
type Contents = list[list[tuple[int, int] | None] | None]


@dataclass
class Elsewhere:
    """Pages by their hash. `boasts` of pages that it does not have."""

    pages: dict[bytes, Contents] = field(default_factory=dict)
    boasts: bool = False
    num_asked: int = 0

    def num_pages(self, request: Request, hashes: Sequence[bytes]) -> int:
        self.num_asked += 1
        has = next((at for at, digest in enumerate(hashes) if digest not in self.pages), len(hashes))
        return len(hashes) if self.boasts else has


class Engine:
    """A scheduler, a device without a model, and pages elsewhere, step by step as `Replica` does it."""

    def __init__(self, elsewhere: Elsewhere, sizes: Sequence[GroupSize], num_slots: int = 3, policy: str = "v1"):
        self.elsewhere = elsewhere
        cache = KVCache(sizes, num_slots=num_slots, max_model_len=MAX_LEN, page_size=PAGE_SIZE, max_chunk=8)
        slots = SlotTable(num_slots, MAX_LEN)
        self.scheduler = Scheduler(slots, cache, POLICIES[policy], 8, elsewhere)
        self.device = FakeDevice(num_slots, sizes, PAGE_SIZE)
        self.requests: list[Request] = []
        self.answers: dict[str, list[int]] = {}
        self.loads: list[PageLoad] = []
        self.num_loaded = 0
        self._in_flight: deque[tuple[StepPlan, StepOutput]] = deque()

    def add(self, prompt: Sequence[int], max_tokens: int) -> Request:
        number = len(self.requests)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(
            asked=GenerationRequest(f"r{number}", Prompt(None, np.array(prompt, np.int32)), params),
            seed=0,
            stop_token_ids=(),
            limit=len(prompt) + max_tokens,
            key=QueueKey(0, number),
        )
        self.scheduler.add(request)
        self.requests.append(request)
        self._check()
        return request

    def step(self) -> None:
        self._save()
        self.loads += self.scheduler.take_loads()
        plan = self.scheduler.schedule(2)
        if plan is not None:
            self._in_flight.append((plan, self.device.run(plan)))
        if self._in_flight and (plan is None or len(self._in_flight) == 2):
            plan, output = self._in_flight.popleft()
            for end in self.scheduler.update(plan, output).finished:
                self.answers[end.request.request_id] = end.request.output_token_ids.tolist()
            self._save()
        self._check()

    def arrive(self, number: int, most: int) -> None:
        """Ends one of the loads under way, of which `most` pages come at most."""
        self.loads += self.scheduler.take_loads()
        if not self.loads:
            return
        load = self.loads.pop(number % len(self.loads))
        count = 0
        if self.scheduler.is_wanted(load):
            for at, digest in enumerate(load.hashes[:most]):
                contents = self.elsewhere.pages.get(digest)
                wanted = [pages[at] != TRASH_PAGE for pages in load.pages]
                if contents is None or any(w and c is None for w, c in zip(wanted, contents, strict=True)):
                    break
                for group, pages, content in zip(self.device.groups, load.pages, contents, strict=True):
                    if content is not None and pages[at] != TRASH_PAGE:
                        group.pages[pages[at]] = list(content)
                count += 1
        self.num_loaded += count
        self.scheduler.loaded(load, count)
        self._check()

    def abort(self, number: int) -> None:
        if self.requests:
            self.scheduler.finish(self.requests[number % len(self.requests)].request_id)
            self._check()

    def drain(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_work and not self._in_flight:
                break
            self.step()
            self.arrive(0, MAX_LEN)
        assert not self.scheduler.has_work, "somebody waits for ever"
        self._check()
        assert self.scheduler.cache.is_empty

    def _save(self) -> None:
        for save in self.scheduler.take_saves():
            for at, digest in enumerate(save.hashes):
                ids = [int(pages[at]) for pages in save.pages]
                self.elsewhere.pages[digest] = [
                    None if page == TRASH_PAGE else list(group.pages[page])
                    for group, page in zip(self.device.groups, ids, strict=True)
                ]

    def _check(self) -> None:
        self.scheduler.check_invariants()


def alone(prompt: Sequence[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


PROMPTS = [[(3 * p + i * (1 + p % 2)) % 4 for i in range(6 + 5 * p)] for p in range(4)] + [[1] * 21, [1] * 30]
# Small enough for preemptions.
FULL, WINDOWED = (GroupSize(13),), (GroupSize(13), GroupSize(12, window=6))
OPERATIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, len(PROMPTS) - 1), st.integers(1, 9)),
    st.tuples(st.just("step"), st.just(0), st.just(0)),
    st.tuples(st.just("step"), st.just(0), st.just(0)),
    st.tuples(st.just("arrive"), st.integers(0, 3), st.integers(0, 8)),
    st.tuples(st.just("abort"), st.integers(0, 9), st.just(0)),
)


@pytest.mark.parametrize("policy", ["v1", "v0", "static"])
@pytest.mark.parametrize("sizes", [FULL, WINDOWED], ids=["full", "windowed"])
@settings(max_examples=60, deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=60), boasts=st.booleans())
def test_tokens_are_those_of_a_request_alone(
    sizes: Sequence[GroupSize], policy: str, operations: list[tuple[str, int, int]], boasts: bool
) -> None:
    # What another engine computed is elsewhere already.
    elsewhere = Elsewhere()
    first = Engine(elsewhere, sizes, policy=policy)
    for prompt in PROMPTS:
        first.add(prompt, 3)
    first.drain()
    assert elsewhere.pages
    elsewhere.boasts = boasts
    engine = Engine(elsewhere, sizes, policy=policy)
    asked: list[tuple[Request, list[int], int]] = []
    for name, number, more in operations:
        match name:
            case "add":
                asked.append((engine.add(PROMPTS[number], more), PROMPTS[number], more))
            case "step":
                engine.step()
            case "arrive":
                engine.arrive(number, more)
            case "abort":
                engine.abort(number)
    engine.drain()
    for request, prompt, count in asked:
        if request.request_id in engine.answers:
            assert engine.answers[request.request_id] == alone(prompt, count)


def test_what_comes_is_not_computed() -> None:
    elsewhere = Elsewhere()
    first = Engine(elsewhere, FULL)
    first.add(PROMPTS[5], 1)
    first.drain()
    second = Engine(elsewhere, FULL)
    request = second.add(PROMPTS[5], 1)
    second.drain()
    assert request.num_cached_tokens == (len(PROMPTS[5]) - 1) // PAGE_SIZE * PAGE_SIZE
    assert second.num_loaded == (len(PROMPTS[5]) - 1) // PAGE_SIZE


def test_of_two_with_the_same_prompt_one_loads_it() -> None:
    elsewhere = Elsewhere()
    first = Engine(elsewhere, FULL)
    first.add(PROMPTS[5], 1)
    first.drain()
    second = Engine(elsewhere, FULL)
    one, other = second.add(PROMPTS[5], 1), second.add(PROMPTS[5], 1)
    second.step()
    second.step()
    assert len(second.loads) == 1
    second.drain()
    assert one.num_cached_tokens == other.num_cached_tokens == 28
    assert second.num_loaded == 7


def test_no_more_are_loaded_than_have_rows() -> None:
    elsewhere = Elsewhere(boasts=True)
    engine = Engine(elsewhere, FULL, num_slots=1)
    engine.add(PROMPTS[3], 1)
    engine.add(PROMPTS[4], 1)
    engine.step()
    engine.step()
    assert len(engine.loads) == 1
    engine.drain()


def test_what_does_not_come_is_computed_and_not_asked_for_again() -> None:
    elsewhere = Elsewhere(boasts=True)
    engine = Engine(elsewhere, FULL)
    request = engine.add(PROMPTS[5], 4)
    engine.step()
    engine.arrive(0, 0)
    num_asked = elsewhere.num_asked
    engine.drain()
    assert engine.answers[request.request_id] == alone(PROMPTS[5], 4)
    assert (request.num_cached_tokens, elsewhere.num_asked) == (0, num_asked)


def test_an_aborted_request_leaves_its_pages_to_others_at_once() -> None:
    elsewhere = Elsewhere(boasts=True)
    engine = Engine(elsewhere, FULL)
    engine.add(PROMPTS[5], 4)
    engine.step()
    assert engine.scheduler.cache.num_owned == 7
    [load] = engine.scheduler.take_loads()
    engine.abort(0)
    assert engine.scheduler.cache.is_empty
    assert not engine.scheduler.is_wanted(load)
    engine.drain()


def test_others_run_while_one_waits_for_its_pages() -> None:
    elsewhere = Elsewhere()
    first = Engine(elsewhere, FULL)
    first.add(PROMPTS[5], 1)
    first.drain()
    engine = Engine(elsewhere, FULL)
    engine.add(PROMPTS[5], 1)
    other = engine.add(PROMPTS[0], 3)
    for _ in range(8):
        engine.step()
    assert engine.answers == {other.request_id: alone(PROMPTS[0], 3)}
    engine.drain()
