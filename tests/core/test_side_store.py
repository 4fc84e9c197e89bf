"""Side inputs: the store's host part against plain lists, the keys of pages, and what a scheduler does with both."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.kv_cache import GroupSize, KVCache
from jaxvllm.core.kv_events import BlockStored, KVEventLog
from jaxvllm.core.page_pool import extend_page_hashes
from jaxvllm.core.policy import POLICIES
from jaxvllm.core.request import GenerationRequest, Prompt, QueueKey, Request
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.core.side_input import SideInput, SideInputRules
from jaxvllm.core.side_store import SideStore
from jaxvllm.core.slots import SlotTable
from jaxvllm.core.step_plan import StepOutput, StepPlan

NUM_ROWS, NUM_SLOTS = 8, 3


def side(first: int, *rows: float) -> SideInput:
    """A side input whose rows have two values each, so that they differ where `rows` do."""
    return SideInput.of(first, np.array([[row, 1.0] for row in rows]))


# The store against an oracle.


@dataclass
class NaiveStore:
    """What the device would have: the content of every row that was filled, the oldest content first."""

    held: dict[int, list[SideInput]] = field(default_factory=dict)
    kept: list[bytes] = field(default_factory=list)  # least recently used first
    rows: dict[bytes, list[int]] = field(default_factory=dict)
    values: dict[int, list[float]] = field(default_factory=dict)

    @property
    def needed(self) -> set[bytes]:
        return {one.digest for sides in self.held.values() for one in sides}

    def has_room(self, sides: Sequence[SideInput]) -> bool:
        needed = self.needed | {one.digest for one in sides}
        sizes = {digest: len(rows) for digest, rows in self.rows.items()} | {one.digest: len(one) for one in sides}
        return sum(sizes[digest] for digest in needed) <= NUM_ROWS

    def make_room(self, needed: set[bytes], count: int) -> None:
        """Forgets what was longest of no use, until so many rows are free."""
        for digest in [one for one in self.kept if one not in needed]:
            if NUM_ROWS - sum(map(len, self.rows.values())) >= count:
                break
            self.kept.remove(digest)
            del self.rows[digest]


CONTENTS = [(1.0,), (2.0, 3.0), (3.0, 2.0), (4.0, 5.0, 6.0), (7.0, 8.0, 9.0, 1.0), (2.0, 2.0, 2.0, 2.0, 2.0)]
TAKES = st.tuples(st.integers(0, NUM_SLOTS - 1), st.lists(st.integers(0, len(CONTENTS) - 1), min_size=1, max_size=3))


@given(st.lists(TAKES | st.integers(0, NUM_SLOTS - 1), max_size=30))
def test_every_row_that_a_step_reads_has_what_its_position_is_to_have(
    actions: list[tuple[int, list[int]] | int],
) -> None:
    store, naive = SideStore(NUM_ROWS), NaiveStore()
    for action in actions:
        if isinstance(action, int):
            store.release(action)
            before = naive.needed
            gone = naive.held.pop(action, [])
            naive.kept += [d for d in dict.fromkeys(one.digest for one in gone) if d in before - naive.needed]
        elif action[0] not in naive.held:
            sides, first = list[SideInput](), 1
            for number in action[1]:
                sides.append(side(first, *CONTENTS[number]))
                first = sides[-1].end + 1
            assert store.can_take(sides) == naive.has_room(sides)
            if not naive.has_room(sides):
                continue
            filled = store.take(action[0], sides)
            new = {one.digest: one for one in sides if one.digest not in naive.rows}
            assert [one.side.digest for one in filled] == list(new), "something is filled twice, or not at all"
            naive.held[action[0]] = sides
            naive.kept = [digest for digest in naive.kept if digest not in naive.needed]
            for one in filled:
                naive.make_room(naive.needed, len(one.rows))
                naive.rows[one.side.digest] = one.rows.tolist()
                naive.values |= zip(one.rows.tolist(), one.side.values[:, 0].tolist(), strict=True)
        store.check_invariants()
        assert store.num_held == sum(len(naive.rows[digest]) for digest in naive.needed)
        assert store._kept.keys() == set(naive.kept)
        assert sorted(store.holders()) == sorted((slot, sides[-1].end) for slot, sides in naive.held.items())
        for slot, sides in naive.held.items():
            tokens = np.arange(20, 40, dtype=np.int32)
            expected: list[float] = tokens.tolist()
            for one in sides:
                expected[one.first : one.end] = one.values[:, 0].tolist()
            for start, end in ((0, 20), (2, 5), (3, 3)):  # chunks
                inputs = store.inputs(slot, start, tokens[start:end], sides).tolist()
                assert [naive.values[-1 - x] if x < 0 else x for x in inputs] == expected[start:end]
            assert tokens.tolist() == list(range(20, 40)), "the caller's own tokens were changed"


def test_a_store_forgets_what_was_longest_of_no_use() -> None:
    store = SideStore(3)
    for slot, number in enumerate((1.0, 2.0, 3.0)):
        store.take(slot, [side(0, number)])
    for slot in (1, 0, 2):
        store.release(slot)
    assert [one.rows.tolist() for one in store.take(0, [side(0, 4.0)])] == [[1]], "the row of 2.0 was given up first"
    assert not store.take(1, [side(5, 1.0)]), "1.0 is still there"


# Keys of pages.

SIDES = st.tuples(
    st.integers(0, 5), st.lists(st.sampled_from([1.0, 2.0]), max_size=4), st.integers(0, 3), st.sampled_from([3.0, 4.0])
)


def prompt_with(shape: tuple[int, list[float], int, float], salt: str | None = None) -> Prompt:
    """A prompt of 12 equal tokens, with up to two side inputs."""
    first, rows, gap, last = shape
    sides = [side(first, *rows)] if rows else []
    at = first + len(rows) + gap
    return Prompt(None, np.zeros(12, np.int32), salt, (*sides, side(at, last)) if at < 12 else tuple(sides))


def inputs_of(prompt: Prompt) -> list[float]:
    """What the model computes at each position."""
    values = [0.0] * 12
    for one in prompt.side_inputs:
        values[one.first : one.end] = one.values[:, 0].tolist()
    return values


@given(SIDES, SIDES, st.integers(1, 4), st.tuples(*[st.sampled_from([None, "x"])] * 2))
def test_pages_have_equal_hashes_exactly_as_far_as_what_the_model_computes_is_equal(
    a: tuple[int, list[float], int, float],
    b: tuple[int, list[float], int, float],
    page_size: int,
    salts: tuple[str | None, str | None],
) -> None:
    """Wherever side inputs begin and end, and in how many parts they come, within a page."""
    prompts = [prompt_with(shape, salt) for shape, salt in zip((a, b), salts, strict=True)]
    chains = [extend_page_hashes([], p.token_ids, page_size, p.cache_salt, p.extra_keys) for p in prompts]
    for index, (of_a, of_b) in enumerate(zip(*chains, strict=True)):
        end = (index + 1) * page_size
        parts = [[(s.first, s.end) for s in p.side_inputs if s.first < end] for p in prompts]
        if of_a == of_b:
            assert salts[0] == salts[1] and inputs_of(prompts[0])[:end] == inputs_of(prompts[1])[:end]
        elif salts[0] == salts[1] and parts[0] == parts[1]:
            assert inputs_of(prompts[0])[:end] != inputs_of(prompts[1])[:end]


def test_a_chain_grown_in_parts_is_the_chain() -> None:
    prompt = prompt_with((1, [1.0, 2.0, 1.0], 2, 3.0))
    hashes = extend_page_hashes([], prompt.token_ids[:5], 2, "x", prompt.extra_keys)
    extend_page_hashes(hashes, prompt.token_ids, 2, "x", prompt.extra_keys)
    assert hashes == extend_page_hashes([], prompt.token_ids, 2, "x", prompt.extra_keys)


@pytest.mark.parametrize(("salt", "seed"), [(None, b""), ("x", b"salt:x")])
def test_hashes_of_prompts_of_tokens_are_those_that_peers_and_routers_know(salt: str | None, seed: bytes) -> None:
    ids, digest = np.arange(8, dtype=np.int32), sha256(seed).digest()
    chain = [digest := sha256(digest + ids[at : at + 4].tobytes()).digest() for at in (0, 4)]
    request = request_of(Prompt(None, ids, salt), "0")
    assert request.hashes(4) == chain == extend_page_hashes([], ids, 4, salt, request.asked.prompt.extra_keys)


def test_events_tell_the_keys_of_each_page() -> None:
    log, request = KVEventLog(2), request_of(prompt_with((2, [1.0], 3, 3.0), "x"), "events")
    columns = list(range(6))
    log.stored(0, "full_attention", None, [0, 1, 3, 4], request.hashes(2), request)
    first, second = log.take()
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    keys = [[key.hex() for key in request.asked.prompt.extra_keys(2 * c, 2 * c + 2)] for c in columns]
    assert [len(of_page) for of_page in keys] == [0, 1, 0, 1, 0, 0]
    assert first.extra_keys == [("x",), (keys[1][0],)]
    assert second.extra_keys == [(keys[3][0],), None]


# What may be a side input.


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SideInput.of(0, np.zeros((0, 2))), "one row or more"),
        (lambda: SideInput.of(-1, np.zeros((1, 2))), "one row or more"),
        (lambda: SideInput(0, 2, bytes(12)), "one row or more"),
        (lambda: SideInput.of(0, np.array([[0.0, 1.0], [2.0, np.nan]])), "value 1 of row 1 is nan"),
        (lambda: SideInput.of(0, np.array([[1e300]])), "value 0 of row 0 is inf"),
        (lambda: Prompt(None, np.zeros(2, np.int32), None, (side(1, 1.0, 2.0),)), "outside of a prompt of 2"),
        (lambda: Prompt(None, np.zeros(9, np.int32), None, (side(1, 1.0, 2.0), side(2, 3.0))), "overlaps another"),
        (lambda: Prompt(None, np.zeros(9, np.int32), None, (side(4, 1.0), side(2, 3.0))), "in order"),
        (lambda: SideInputRules(3, 9.0).check(side(0, 1.0)), "2 values in a row, and the hidden state of this model"),
        (lambda: SideInputRules(2, 9.0).check(side(0, -10.0)), "a value of size 10"),
    ],
)
def test_what_no_model_can_compute_with_is_refused(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()  # type: ignore[operator]


def test_tokens_are_counted_without_placeholders() -> None:
    ids = np.arange(3, 11, dtype=np.int32)
    prompt = Prompt(None, ids, None, (side(1, 1.0, 2.0), side(5, 3.0)))
    assert prompt.known_token_ids.tolist() == [3, 6, 7, 9, 10] and prompt.last_tokens == [9, 10]
    assert Prompt(None, ids).known_token_ids is ids
    same = Prompt(None, ids.copy(), None, (side(1, 1.0, 2.0), side(5, 3.0)))
    assert prompt == same != Prompt(None, ids, None, (side(1, 1.0, 2.0), side(5, 4.0)))


# The scheduler.


def request_of(prompt: Prompt, name: str, max_tokens: int = 4) -> Request:
    asked = GenerationRequest(name, prompt, SamplingParams(temperature=0, max_tokens=max_tokens))
    return Request(asked, 0, (), len(prompt.token_ids) + max_tokens, QueueKey(0, int(name) if name.isdigit() else 0))


def scheduler_with(num_rows: int, num_pages: int = 64, budget: int = 8) -> Scheduler:
    cache = KVCache([GroupSize(num_pages)], num_slots=4, max_model_len=32, page_size=2, max_chunk=budget)
    return Scheduler(SlotTable(4, 32), cache, POLICIES["v1"], budget, side_store=SideStore(num_rows))


def tell(scheduler: Scheduler, plan: StepPlan) -> None:
    """Reads the output of `plan`, in which every row yields token 1."""
    scheduler.update(plan, StepOutput(np.ones((plan.num_rows, 1), np.int32), plan.max_new.copy()))
    scheduler.check_invariants()


def step(scheduler: Scheduler) -> StepPlan | None:
    plan = scheduler.schedule()
    scheduler.check_invariants()
    if plan is not None:
        tell(scheduler, plan)
    return plan


def embeds(name: str, *rows: float, max_tokens: int = 4) -> Request:
    """A request whose whole prompt is a side input."""
    return request_of(Prompt(None, np.zeros(len(rows), np.int32), None, (side(0, *rows),)), name, max_tokens)


def test_a_request_waits_for_rows_as_for_pages_and_gets_them_when_a_prompt_is_computed() -> None:
    scheduler = scheduler_with(num_rows=12)
    for name, count in (("0", 10), ("1", 3), ("2", 2)):
        scheduler.add(embeds(name, *(float(name) + x / 100 for x in range(count)), max_tokens=8))
    plan = step(scheduler)
    assert plan is not None and plan.num_rows == 1 and scheduler.side_store.num_held == 10
    assert (-1 - plan.token_ids).tolist() == plan.admissions[0].side_rows[0].rows[:8].tolist()
    plan = step(scheduler)  # the last chunk of the first prompt, whose rows it needs
    assert plan is not None and plan.num_rows == 1 and scheduler.num_waiting == 2
    plan = step(scheduler)
    assert plan is not None and len(plan.admissions) == 2 and scheduler.side_store.num_held == 5
    while scheduler.has_work:
        step(scheduler)
    assert not scheduler.side_store.num_held


def test_a_preempted_request_gives_rows_back_and_finds_them_again() -> None:
    scheduler = scheduler_with(num_rows=32)
    scheduler.add(embeds("0", *range(20)))
    first = step(scheduler)
    assert first is not None
    scheduler.preempt_all()
    scheduler.check_invariants()
    assert not scheduler.side_store.num_held
    plan = step(scheduler)
    assert plan is not None and not plan.admissions[0].side_rows, "what is still there is not sent again"
    assert plan.admissions[0].num_cached == 8
    assert scheduler.side_store.num_held == 20
    assert set((-1 - plan.token_ids).tolist()).isdisjoint((-1 - first.token_ids).tolist()), "other positions"
    scheduler.finish("0")
    scheduler.check_invariants()
    assert not scheduler.side_store.num_held


@pytest.mark.parametrize("seed", range(30))
def test_every_step_reads_for_each_position_what_the_request_has_there(seed: int) -> None:
    """With few rows and pages, equal contents, preemption, ends at any time, and steps planned ahead."""
    rng = np.random.default_rng(seed)
    scheduler = scheduler_with(num_rows=int(rng.integers(8, 14)), num_pages=int(rng.integers(18, 40)))
    rows = dict[int, float]()  # as the device has them
    in_flight, number = list[StepPlan](), 0
    while number < 25 or scheduler.has_work or in_flight:
        if number < 25 and rng.random() < 0.5:
            sides, at = list[SideInput](), int(rng.integers(3))
            for content in rng.integers(len(CONTENTS), size=rng.integers(3)):
                sides.append(side(at, *CONTENTS[content]))
                at = sides[-1].end + int(rng.integers(3))
            if sum(map(len, sides)) <= 8:
                ids = rng.integers(2, 4, at + 1).astype(np.int32)
                scheduler.add(request_of(Prompt(None, ids, None, tuple(sides)), str(number), int(rng.integers(1, 9))))
            number += 1
        if rng.random() < 0.05:
            scheduler.finish(str(rng.integers(25)))
        if rng.random() < 0.05:
            scheduler.preempt_all()
        plan = scheduler.schedule()
        scheduler.check_invariants()
        if plan is not None:
            for admission in plan.admissions:
                for filled in admission.side_rows:
                    rows |= zip(filled.rows.tolist(), filled.side.values[:, 0].tolist(), strict=True)
            inputs = iter(plan.token_ids.tolist())
            for row in range(plan.num_decode, plan.num_rows):
                request = scheduler.slots.tenant(int(plan.slots[row]))
                expected: list[float] = request.token_ids().tolist()
                for one in request.asked.prompt.side_inputs:
                    expected[one.first : one.end] = one.values[:, 0].tolist()
                start, end = int(plan.starts[row]), int(plan.starts[row] + plan.lengths[row])
                mine = [x for _, x in zip(range(start, end), inputs, strict=False)]
                assert [rows[-1 - x] if x < 0 else x for x in mine] == expected[start:end]
            in_flight.append(plan)
        if in_flight and (plan is None or len(in_flight) == 2 or rng.random() < 0.5):
            tell(scheduler, in_flight.pop(0))


def test_a_side_input_whose_pages_are_cached_needs_no_rows() -> None:
    scheduler = scheduler_with(num_rows=32)
    tail = np.array([*[0] * 4, 2, 3, 4], np.int32)
    for name in ("0", "1"):
        scheduler.add(request_of(Prompt(None, tail, None, (side(0, 1.0, 2.0, 3.0, 4.0),)), name))
        plan = step(scheduler)
        assert plan is not None and plan.admissions[0].num_cached == (6 if name == "1" else 0)
        assert scheduler.side_store.num_held == (0 if name == "1" else 4)
        assert (plan.token_ids < 0).sum() == (0 if name == "1" else 4)
        while scheduler.has_work:
            step(scheduler)


def test_equal_side_inputs_of_one_step_are_filled_once() -> None:
    """As those of `n` completions, where the prefix cache does not have them wait for the first."""
    scheduler = scheduler_with(num_rows=3)
    for name in ("0", "1"):
        scheduler.add(embeds(name, 1.0))
    plan = step(scheduler)
    assert plan is not None and [len(a.side_rows) for a in plan.admissions] == [1, 0]
    assert plan.token_ids[0] == plan.token_ids[1] < 0


def test_what_no_store_could_hold_is_refused_before_it_is_queued() -> None:
    scheduler = scheduler_with(num_rows=3)
    with pytest.raises(ParameterError, match="need as many rows, and the store has 3"):
        scheduler.add(embeds("0", 1.0, 2.0, 3.0, 4.0))
    assert not scheduler.has_work
