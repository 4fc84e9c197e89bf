"""Placements of experts: every expert has a slot, devices have equally much to do, and moving loses nothing."""

from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxvllm.core.expert_placement import (
    NOTHING,
    WORTH_MOVING,
    balanced,
    device_loads,
    exchanges,
    experts_in,
    slots_of,
)

NUM_DEVICES = st.integers(1, 4)


@st.composite
def layers(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """The expert in each slot, the load of each expert, and the number of devices."""
    num_devices, num_experts = draw(NUM_DEVICES), draw(st.integers(1, 9))
    room = -(-num_experts // num_devices) + draw(st.integers(0, 2))
    others = draw(st.lists(st.integers(NOTHING, num_experts - 1), min_size=room * num_devices, max_size=99))
    held = np.array(others[: room * num_devices], np.int32)
    held[draw(st.permutations(range(len(held))))[:num_experts]] = np.arange(num_experts)
    loads = draw(st.lists(st.integers(0, 50), min_size=num_experts, max_size=num_experts))
    return held, np.array(loads, np.float64), num_devices


@given(layers())
def test_a_placement_is_whole_and_no_worse(layer: tuple[np.ndarray, np.ndarray, int]) -> None:
    held, loads, num_devices = layer
    found = balanced(held, loads, num_devices)
    assert set(range(len(loads))) <= set(found.tolist())
    before, after = (device_loads(one, loads, num_devices) for one in (held, found))
    assert found is held or after.max() < WORTH_MOVING * before.max()
    assert after.sum() == pytest.approx(loads.sum())
    if found is not held:  # no device has two copies of an expert, and experts that stay are not moved
        for now, then in zip(held.reshape(num_devices, -1), found.reshape(num_devices, -1), strict=True):
            experts = then[then != NOTHING]
            assert len(set(experts.tolist())) == len(experts)
            for expert in set(now.tolist()) & set(experts.tolist()):
                assert (now == expert)[then == expert].all()


@given(layers(), st.data())
def test_exchanges_lose_no_expert(layer: tuple[np.ndarray, np.ndarray, int], data: st.DataObject) -> None:
    held, loads, num_devices = layer
    other = held[data.draw(st.permutations(range(len(held))))]
    for wanted in (other, balanced(held, loads, num_devices)):
        now, num_wrong = held.copy(), len(held)
        for one in exchanges(held, wanted):
            if one.is_swap:
                now[[one.source, one.to]] = now[[one.to, one.source]]
            else:
                now[one.to] = now[one.source]
            assert set(range(len(loads))) <= set(now.tolist())
            before, num_wrong = num_wrong, np.count_nonzero((now != wanted) & (wanted != NOTHING))
            assert num_wrong < before
        assert (now == wanted)[wanted != NOTHING].all()


@given(layers())
def test_tables_of_slots_say_the_same(layer: tuple[np.ndarray, np.ndarray, int]) -> None:
    held, loads, _ = layer
    most = int(np.bincount(held[held != NOTHING]).max())
    assert experts_in(slots_of(held, len(loads), most), len(held)).tolist() == held.tolist()


def least_load(loads: list[int], room: int, num_devices: int) -> float:
    """The load of the busiest device in the best of all placements."""
    num_experts, spare = len(loads), room * num_devices - len(loads)
    best = np.inf
    for extra in combinations_with_replacement(range(-1, num_experts), spare):
        copies = [1 + extra.count(expert) for expert in range(num_experts)]
        if max(copies) > num_devices:
            continue
        each = [expert for expert, count in enumerate(copies) for _ in range(count)]
        for devices in product(range(num_devices), repeat=len(each)):
            if max(map(devices.count, range(num_devices))) <= room:
                busy = [0.0] * num_devices
                for expert, device in zip(each, devices, strict=True):
                    busy[device] += loads[expert] / copies[expert]
                best = min(best, max(busy))
    return best


@pytest.mark.parametrize(
    ("loads", "room", "num_devices"),
    [
        ([8, 1, 1, 2], 3, 2),
        ([5, 5, 5, 5], 2, 2),
        ([9, 7, 6, 5, 4], 3, 2),
        ([30, 1, 1], 2, 3),
        ([12, 10, 3, 1], 2, 3),
        ([7, 6, 5, 4, 3, 2], 3, 2),
        ([20, 2, 2, 2], 3, 2),
        ([0, 0, 9], 2, 2),
    ],
)
def test_the_busiest_device_has_little_more_than_the_least_possible(
    loads: list[int], room: int, num_devices: int
) -> None:
    held = np.full(room * num_devices, NOTHING, np.int32)
    held[: len(loads)] = np.arange(len(loads))
    found = device_loads(balanced(held, np.array(loads, np.float64), num_devices), np.array(loads), num_devices)
    assert found.max() <= 4 / 3 * least_load(loads, room, num_devices)


def test_the_busiest_expert_gets_the_copies() -> None:
    held = np.array([0, 1, 2, 3, NOTHING, NOTHING, NOTHING, NOTHING], np.int32)
    found = balanced(held, np.array([90.0, 2, 3, 5]), 4)
    assert np.count_nonzero(found == 0) == 4
    assert device_loads(found, np.array([90.0, 2, 3, 5]), 4).max() <= 22.5 + 5


def test_loads_that_drift_move_few_experts() -> None:
    random, num_experts, num_devices = np.random.default_rng(5), 64, 8
    held = np.full(num_experts + 8, NOTHING, np.int32)
    held[:num_experts] = np.arange(num_experts)
    loads = 1e4 * random.permutation(np.arange(1.0, num_experts + 1) ** -0.7)
    held = balanced(held, loads, num_devices)
    loads = loads * random.gamma(8, 1 / 8, num_experts)
    before, found = device_loads(held, loads, num_devices), balanced(held, loads, num_devices)
    after = device_loads(found, loads, num_devices)
    assert before.mean() / before.max() < 0.92 and after.mean() / after.max() > 0.95
    assert 0 < len(list(exchanges(held, found))) < len(held) / 2
