"""What a router learns of replicas from their KV events, whatever is lost on the way."""

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from jaxvllm.core.kv_events import AllBlocksCleared, AnyKVEvent, BlockRemoved, BlockStored, KVEventBatch
from jaxvllm.core.prefix_index import KVEventReader, PrefixIndex

KEYS = st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True)
NAMES = st.sampled_from(["a", "b"])
GROUPS = st.sampled_from([None, 0, 0, 1])


def stored(keys: Sequence[int], group: int | None = 0) -> BlockStored:
    return BlockStored(list(keys), None, [0] * len(keys), 1, None, "GPU", None, group_idx=group)


def removed(keys: Sequence[int], group: int | None = 0) -> BlockRemoved:
    return BlockRemoved(list(keys), "GPU", group)


EVENTS = st.one_of(
    st.builds(stored, KEYS, GROUPS),
    st.builds(stored, KEYS, GROUPS),
    st.builds(removed, KEYS, GROUPS),
    st.just(AllBlocksCleared()),
)


@given(st.lists(st.tuples(NAMES, EVENTS), max_size=20), st.lists(KEYS, max_size=4))
def test_an_index_knows_what_sets_know(events: list[tuple[str, Any]], prompts: list[list[int]]) -> None:
    index = PrefixIndex()
    known: dict[str, set[int]] = {"a": set(), "b": set()}
    for name, event in events:
        index.apply(name, event)
        match event:
            case AllBlocksCleared():
                known[name].clear()
            case BlockStored(group_idx=None | 0):
                known[name] |= set(event.block_hashes)
            case BlockRemoved(group_idx=None | 0):
                known[name] -= set(event.block_hashes)
    for name, keys in known.items():
        assert index.num_pages(name) == len(keys)
        for prompt in prompts:
            found = [key in keys for key in prompt]
            assert index.num_cached(name, prompt) == (found.index(False) if False in found else len(found))
    assert index.num_cached("unknown", [1]) == 0


@given(st.lists(KEYS, max_size=12), st.integers(1, 5))
def test_an_index_is_bounded(batches: list[list[int]], most: int) -> None:
    index = PrefixIndex(max_pages=most)
    latest: list[int] = []
    for keys in batches:
        index.apply("a", stored(keys))
        latest = [*(key for key in latest if key not in keys), *keys][-most:]
        assert {key for key in range(10) if index.num_cached("a", [key])} == set(latest)
        assert index.num_pages("a") == len(latest)


def test_layers_with_a_window_do_not_count() -> None:
    index = PrefixIndex()
    index.apply("a", stored([1, 2], group=0))
    index.apply("a", removed([1], group=1))
    index.apply("a", stored([3], group=1))
    assert index.num_cached("a", [1, 2, 3]) == 2


def test_an_index_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="max_pages must be at least 1, not 0"):
        PrefixIndex(0)


# ---- reading what a publisher sends ----


def encoded(time: float, *events: AnyKVEvent) -> bytes:
    return msgspec.msgpack.encode(KVEventBatch(time, list(events), 0))


@given(st.lists(EVENTS, min_size=1, max_size=12), st.data())
def test_whatever_is_lost_and_repeated_a_reader_that_asks_again_knows_everything(
    events: list[AnyKVEvent], data: st.DataObject
) -> None:
    batches = [encoded(float(number), event) for number, event in enumerate(events)]
    index, whole = PrefixIndex(), PrefixIndex()
    reader = KVEventReader(index, "a")
    order = data.draw(st.lists(st.integers(0, len(batches) - 1), max_size=20))
    for number in [*order, len(batches) - 1]:
        if not reader.receive(number, batches[number]):
            for again in range(reader.replay_from, number):
                assert reader.receive(again, batches[again])
            assert reader.receive(number, batches[number])
    for event in events:
        whole.apply("a", event)
    assert reader.next_number == len(batches)
    for key in range(10):
        assert index.num_cached("a", [key]) == whole.num_cached("a", [key])


def test_a_gap_changes_nothing_until_it_is_filled_or_given_up() -> None:
    index = PrefixIndex()
    reader = KVEventReader(index, "a")
    assert reader.receive(0, encoded(1.0, stored([1])))
    assert not reader.receive(2, encoded(3.0, stored([3])))
    assert (reader.next_number, index.num_cached("a", [1]), index.num_cached("a", [3])) == (1, 1, 0)
    reader.skip_to(2)
    assert index.num_cached("a", [1]) == 0, "the page may be gone"
    assert reader.receive(2, encoded(3.0, stored([3])))
    assert index.num_cached("a", [3]) == 1


def test_a_publisher_that_was_started_again_has_nothing_of_before() -> None:
    index = PrefixIndex()
    reader = KVEventReader(index, "a")
    for number in range(3):
        assert reader.receive(number, encoded(float(number), stored([number])))
    assert reader.receive(1, encoded(1.0, stored([1]))), "a repetition"
    assert index.num_pages("a") == 3
    assert not reader.receive(1, encoded(9.0, stored([8]))), "batch 0 of the new process is missing"
    assert (reader.replay_from, index.num_pages("a")) == (0, 0)
    assert reader.receive(0, encoded(8.0, stored([7])))
    assert reader.receive(1, encoded(9.0, stored([8])))
    assert index.num_cached("a", [7, 8]) == 2


def test_a_publisher_that_was_started_again_and_is_ahead_is_noticed_by_the_last_batch_that_is_known() -> None:
    index = PrefixIndex()
    reader = KVEventReader(index, "a")
    for number in range(2):
        assert reader.receive(number, encoded(5.0 + number, stored([number])))
    assert not reader.receive(4, encoded(3.0, stored([8]))), "and its clock is slow"
    assert reader.replay_from == 1
    assert not reader.receive(1, encoded(2.0, stored([7])))
    assert (reader.replay_from, index.num_pages("a")) == (0, 0)


def test_what_is_no_batch_is_an_error() -> None:
    reader = KVEventReader(PrefixIndex(), "a")
    with pytest.raises(msgspec.DecodeError):
        reader.receive(0, b"\x93")
    assert reader.next_number == 0
