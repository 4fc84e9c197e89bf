"""KV events: who reads them knows what the prefix cache can find, and nothing else is told."""

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from jaxvllm.core.kv_cache import GroupSize, KVCache
from jaxvllm.core.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    KVEventLog,
    SpecKind,
    hash_key,
    page_keys,
)
from jaxvllm.core.lora import LoraAdapter, adapter_in, salt_without_adapter
from jaxvllm.core.page_pool import extend_page_hashes
from jaxvllm.core.request import GenerationRequest, Prompt, QueueKey, Request
from jaxvllm.core.sampling_params import SamplingParams
from tests.core.simulation import Job, Setup, Simulation

PAGE_SIZE = 4
WINDOW = 10


class VllmEvent(msgspec.Struct, tag=True):
    """An event as vLLM 0.32 declares it: fields without a default must be there."""


class VllmStored(VllmEvent, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class VllmRemoved(VllmEvent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class VllmCleared(VllmEvent, tag="AllBlocksCleared"):
    pass


class VllmBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[VllmStored | VllmRemoved | VllmCleared]
    data_parallel_rank: int | None = None


def as_vllm_reads(events: Sequence[Any]) -> list[Any]:
    data = msgspec.msgpack.encode(KVEventBatch(1.5, list(events), 3))
    batch = msgspec.msgpack.Decoder(VllmBatch).decode(data)
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 3)
    return batch.events


class Mirror:
    """What a reader of the events takes for findable: the group and the key of each page, and its tokens."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: dict[tuple[int, int], tuple[int, ...]] = {}

    def read(self, events: Sequence[Any]) -> None:
        for event in as_vllm_reads(events):
            match event:
                case VllmCleared():
                    self.pages.clear()
                case VllmRemoved():
                    for key in event.block_hashes:
                        del self.pages[event.group_idx, key]  # KeyError: it was never told
                case VllmStored():
                    self._store(event)

    def _store(self, event: VllmStored) -> None:
        assert event.block_size == self.page_size
        assert len(event.token_ids) == len(event.block_hashes) * self.page_size
        assert event.extra_keys is None or len(event.extra_keys) == len(event.block_hashes)
        for index, key in enumerate(event.block_hashes):
            assert (event.group_idx, key) not in self.pages, "told twice"
            tokens = event.token_ids[index * self.page_size : (index + 1) * self.page_size]
            self.pages[event.group_idx, key] = tuple(tokens)


def findable(cache: KVCache) -> set[tuple[int, int]]:
    return {
        (index, hash_key(digest)) for index, group in enumerate(cache.groups) for digest in group.pool._page_of_hash
    }


JOBS = st.builds(
    Job,
    prompt=st.lists(st.integers(0, 1), min_size=4, max_size=24).map(tuple),
    max_tokens=st.sampled_from([1, 8, 12]),
    salt=st.sampled_from([None, None, "tenant"]),
)
ACTIONS = st.one_of(
    JOBS,
    st.sampled_from([1, 3, 40, 40]),  # steps
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.sampled_from(["reset", "take"]),
)


@settings(max_examples=150)
@given(
    num_pages=st.integers(10, 16),
    windowed=st.booleans(),
    caching=st.sampled_from([True, True, True, False]),
    actions=st.lists(ACTIONS, min_size=6, max_size=30),
)
def test_a_reader_knows_what_can_be_found(num_pages: int, windowed: bool, caching: bool, actions: list[Any]) -> None:
    groups = (GroupSize(num_pages, WINDOW),) if windowed else ()
    setup = Setup(num_slots=3, num_pages=num_pages, page_size=PAGE_SIZE, budget=16, caching=caching, more_groups=groups)
    simulation = Simulation(setup, events=(log := KVEventLog(PAGE_SIZE)))
    mirror = Mirror(PAGE_SIZE)
    for action in actions:
        match action:
            case Job():
                simulation.add(action)
            case int():
                for _ in range(action):
                    simulation.step()
            case "abort", place if simulation.shadows:
                shadows = list(simulation.shadows.values())
                simulation.abort(shadows[place % len(shadows)])
            case "reset":
                simulation.cache.reset_prefix_cache()
            case "take":
                mirror.read(log.take())
                assert mirror.pages.keys() == findable(simulation.cache)
    mirror.read(log.take())
    assert mirror.pages.keys() == findable(simulation.cache)
    assert log.take() == []
    for shadow in simulation.shadows.values():  # what is known of a request's pages are its tokens
        hashes = extend_page_hashes([], np.array(shadow.tokens, np.int32), PAGE_SIZE, shadow.job.salt)
        for column, digest in enumerate(hashes):
            tokens = tuple(shadow.tokens[column * PAGE_SIZE : (column + 1) * PAGE_SIZE])
            assert mirror.pages.get((0, hash_key(digest)), tokens) == tokens


def request_of(
    tokens: Sequence[int],
    salt: str | None = None,
    session_id: str | None = None,
    adapter: LoraAdapter | None = None,
) -> Request:
    prompt = Prompt(None, np.array(tokens, np.int32), salt)
    return Request(
        asked=GenerationRequest("one", prompt, SamplingParams(), session_id=session_id),
        seed=0,
        stop_token_ids=(),
        limit=64,
        key=QueueKey(0, 0),
        adapter=adapter,
    )


def stored(
    tokens: Sequence[int], columns: Sequence[int], salt: str | None = None, window: int | None = None
) -> list[Any]:
    log = KVEventLog(2)
    request = request_of(tokens, salt, session_id="talk")
    kind: SpecKind = "full_attention" if window is None else "sliding_window"
    log.stored(1, kind, window, columns, request.hashes(2), request)
    return as_vllm_reads(log.take())


def test_pages_that_follow_each_other_are_one_event_behind_their_parent() -> None:
    tokens = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    keys = page_keys(np.array(tokens, np.int32), 2)
    first, second = stored(tokens, [0, 1, 3])
    assert first == VllmStored(
        block_hashes=keys[:2],
        parent_block_hash=None,
        token_ids=[5, 6, 7, 8],
        block_size=2,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=1,
        kv_cache_spec_kind="full_attention",
        session_id="talk",
    )
    assert (second.block_hashes, second.parent_block_hash, second.token_ids) == (keys[3:], keys[2], [11, 12])


def test_a_salt_is_told_of_the_first_page_of_a_prompt_alone() -> None:
    first, second = stored([0] * 8, [0, 1, 3], salt="tenant")
    assert (first.extra_keys, second.extra_keys) == ([("tenant",), None], None)


def test_an_adapter_is_told_by_its_name_and_in_the_salt() -> None:
    log, adapter = KVEventLog(2), LoraAdapter("sql", b"\x01\x02", None)
    request = request_of([0] * 4, adapter.salt("mine"), adapter=adapter)
    log.stored(0, "full_attention", None, [0, 1], request.hashes(2), request)
    [event] = as_vllm_reads(log.take())
    assert (event.lora_name, event.extra_keys) == ("sql", [("lora:0102:mine",), None])
    assert adapter_in(adapter.salt("a:b")) == "0102"
    assert adapter_in(salt_without_adapter(adapter.salt(None)) or "") is None
    assert adapter_in("lora:") is adapter_in("lora") is None


def test_layers_with_a_window_say_so() -> None:
    [event] = stored([0] * 4, [1], window=6)
    assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == ("sliding_window", 6)


def test_a_key_is_the_end_of_the_hash_as_in_vllm() -> None:
    [digest] = extend_page_hashes([], np.array([1, 2], np.int32), 2, None)
    assert page_keys(np.array([1, 2], np.int32), 2) == [int.from_bytes(digest, "big") & (2**64 - 1)]


def test_evictions_are_one_event_until_something_else_happens() -> None:
    log = KVEventLog(2)
    for group, byte in ((0, 1), (0, 2), (1, 3)):
        log.removed(group, bytes([byte] * 32))
    request = request_of([1, 2])
    log.stored(0, "full_attention", None, [0], request.hashes(2), request)
    log.removed(0, bytes([4] * 32))
    kinds = [(type(event), getattr(event, "group_idx", None)) for event in log.take()]
    assert kinds == [(BlockRemoved, 0), (BlockRemoved, 1), (BlockStored, 0), (BlockRemoved, 0)]


def test_what_happened_before_a_reset_is_not_told() -> None:
    log = KVEventLog(2)
    log.removed(0, bytes(32))
    log.cleared()
    assert log.take() == [AllBlocksCleared()]


@pytest.mark.parametrize("event", [AllBlocksCleared(), BlockRemoved([1], "GPU", 0)])
def test_an_event_is_a_map_with_its_type_as_in_vllm(event: Any) -> None:
    _, [data], rank = msgspec.msgpack.decode(msgspec.msgpack.encode(KVEventBatch(0.0, [event], 0)))
    assert data["type"] == type(event).__name__
    assert rank == 0
