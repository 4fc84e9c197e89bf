"""Slots of adapters against plain lists, and a scheduler whose requests wait for them."""

from dataclasses import dataclass, field
from unittest.mock import Mock

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jaxvllm.core.kv_cache import GroupSize, KVCache
from jaxvllm.core.lora import NO_ADAPTER, LoraAdapter, LoRARequest, LoraSlots, given_salt, salt_without_adapter
from jaxvllm.core.policy import POLICIES
from jaxvllm.core.request import GenerationRequest, Prompt, QueueKey, Request
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.core.slots import SlotTable
from jaxvllm.core.step_plan import StepPlan

NUM_SLOTS, NUM_WITH_TABLES = 3, 1
ADAPTERS = [LoraAdapter(name, name.encode(), None, has_tables=name in "ab") for name in "abcdef"]
WITHOUT_TABLES = ADAPTERS[2:]


@dataclass
class NaiveSlots:
    """What the device would have in each slot, and how long each of these has been of no use."""

    contents: dict[int, LoraAdapter] = field(default_factory=dict)
    held: dict[str, LoraAdapter] = field(default_factory=dict)
    unused: list[LoraAdapter] = field(default_factory=list)  # the longest first

    def possible(self, adapter: LoraAdapter) -> set[int]:
        """The slots that it may get now: its own, those that are free, or that of what has been of no use longest."""
        allowed = range(1, 1 + (NUM_WITH_TABLES if adapter.has_tables else NUM_SLOTS))
        if own := {slot for slot, one in self.contents.items() if one is adapter}:
            return own
        if free := {slot for slot in allowed if slot not in self.contents}:
            return {slot for slot in free if slot > NUM_WITH_TABLES} or free
        where = {one.digest: slot for slot, one in self.contents.items() if slot in allowed}
        return {next((where[one.digest] for one in self.unused if one.digest in where), 0)} - {0}


@given(st.lists(st.tuples(st.sampled_from("1234"), st.sampled_from([None, *ADAPTERS])), max_size=40))
def test_requests_find_their_adapters(actions: list[tuple[str, LoraAdapter | None]]) -> None:
    slots, naive = LoraSlots(NUM_SLOTS, NUM_WITH_TABLES), NaiveSlots()
    for request_id, adapter in actions:
        if adapter is None or request_id in naive.held:
            slots.release(request_id)
            gone = naive.held.pop(request_id, None)
            if gone is not None and gone not in naive.held.values():
                naive.unused.append(gone)
        else:
            possible, was_there = naive.possible(adapter), adapter in naive.contents.values()
            assert slots.can_take(adapter) == bool(possible)
            if not possible:
                continue
            slot, is_new = slots.take(request_id, adapter)
            assert is_new != was_there and slot in possible
            if (before := naive.contents.get(slot)) is not None and before is not adapter:
                naive.unused.remove(before)
            naive.contents[slot] = adapter
            naive.held[request_id] = adapter
            naive.unused = [one for one in naive.unused if one is not adapter]
        assert slots.held == naive.held
        slots.check_invariants()


def scheduler(num_slots: int, num_with_tables: int = 0) -> Scheduler:
    cache = KVCache([GroupSize(64)], num_slots=4, max_model_len=32, page_size=4, max_chunk=16)
    return Scheduler(SlotTable(4, 32), cache, POLICIES["v1"], 16, lora_slots=LoraSlots(num_slots, num_with_tables))


def request(name: str, adapter: LoraAdapter | None, arrival: int) -> Request:
    asked = GenerationRequest(name, Prompt(None, np.array([1, 2, 3], np.int32)), SamplingParams(max_tokens=2))
    return Request(asked, 0, (), 5, QueueKey(0, arrival), adapter=adapter)


def brought(plan: StepPlan | None) -> dict[str, tuple[int, bool]]:
    assert plan is not None
    return {one.request.request_id: (one.adapter_slot, one.brings_adapter) for one in plan.admissions}


def test_a_request_waits_for_a_slot_of_its_adapter_and_those_after_it_do_not() -> None:
    of = scheduler(num_slots=1)
    a, b, *_ = WITHOUT_TABLES
    for number, (name, adapter) in enumerate((("1", a), ("2", b), ("3", a), ("4", None))):
        of.add(request(name, adapter, number))
    plan = of.schedule()
    assert brought(plan) == {"1": (1, True), "3": (1, False), "4": (NO_ADAPTER, False)}
    assert plan is not None and plan.has_adapters
    of.check_invariants()
    of.finish("1")
    assert of.schedule() is not None and of.num_waiting == 1, "the other one still uses it"
    of.finish("3")
    plan = of.schedule()
    assert brought(plan) == {"2": (1, True)}
    of.preempt_all()
    of.check_invariants()
    assert not of.lora_slots.held
    of.finish("2")
    plan = of.schedule()
    assert plan is not None and not plan.has_adapters


def started(of: Scheduler) -> list[str]:
    plan = of.schedule()
    of.check_invariants()
    return [] if plan is None else [one.request.request_id for one in plan.admissions]


def test_a_stream_for_one_adapter_leaves_a_turn_to_the_others() -> None:
    of = scheduler(num_slots=1)
    a, b, *_ = WITHOUT_TABLES
    of.add(request("0", a, 0))
    running = order = started(of)
    of.add(request("b", b, 1))
    for number in range(2, 12):
        of.add(request(str(number), a, number))
        if number > 3:  # two of them run, so that one always uses the slot
            of.finish(running.pop(0))
        running, order = [*running, *(more := started(of))], [*order, *more]
        if "b" in running:
            break
    # As many pass it as there are rows, and then it runs alone.
    assert order == ["0", "2", "3", "4", "5", "b"]
    of.finish("b")
    assert started(of) == ["6", "7", "8"]


def test_requests_without_an_adapter_pass_any_number_that_wait_for_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    of = scheduler(num_slots=1)
    a, b, c, _ = WITHOUT_TABLES
    of.add(request("a", a, 0))
    assert started(of) == ["a"]
    for number in range(1, 31):
        of.add(request(str(number), b if number % 2 else c, number))
    of.add(request("base", None, 31))
    with monkeypatch.context() as patch:
        patch.setattr(of.queue, "first", looks := Mock(side_effect=of.queue.first))
        assert started(of) == ["base"]
    assert looks.call_count == 3, "one look tells that there is room for none of their adapters"
    assert of.num_waiting == 30
    # Those that have ended are gone from their lanes.
    for number in range(1, 30):
        of.finish(str(number))
    of.finish("a")
    assert started(of) == ["30"] and not of.num_waiting


def test_an_adapter_with_tables_waits_for_room_for_these_and_others_pass() -> None:
    of = scheduler(num_slots=2, num_with_tables=1)
    a, b, c, d, _, _ = ADAPTERS
    for number, (name, adapter) in enumerate((("c", c), ("a", a), ("b", b), ("2", b), ("d", d), ("a2", a))):
        of.add(request(name, adapter, number))
    # `d` finds no slot that is not in use, either.
    assert brought(of.schedule()) == {"c": (2, True), "a": (1, True), "a2": (1, False)}
    of.finish("c")
    assert brought(of.schedule()) == {"d": (2, True)}, "it passes those that wait for the first slot"
    of.finish("a")
    of.finish("a2")
    assert brought(of.schedule()) == {"b": (1, True), "2": (1, False)}
    of.check_invariants()


def test_prompts_share_pages_only_with_those_of_the_same_weights() -> None:
    one, other = LoraAdapter("one", b"1" * 32, None), LoraAdapter("one", b"2" * 32, None)
    salts = [one.salt(None), other.salt(None), one.salt("mine"), salt_without_adapter("mine")]
    # A caller who knows the digest gains nothing.
    forged = salt_without_adapter(one.salt(None))
    salts += [forged, salt_without_adapter(forged), salt_without_adapter(None)]
    assert len(set(salts)) == len(salts)
    for mine in (None, "mine", "lora:1:2", "base:x", "a:b:c"):
        assert given_salt(one.salt(mine)) == given_salt(salt_without_adapter(mine)) == mine


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (("", 1, "/a"), "lora_name"),
        (("a", 0, "/a"), "lora_int_id"),
        (("a", True, "/a"), "lora_int_id"),
        (("a", 1, ""), "lora_path"),
    ],
)
def test_wrong_requests(wrong: tuple[str, int, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        LoRARequest(*wrong)
