"""The loads of which steps decide where experts are, and when these move: with a runner that computes nothing."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxvllm.core.eplb_config import EplbConfig
from jaxvllm.engine.expert_balancer import ExpertBalancer, LoadMeter

LAYERS, NUM_EXPERTS, NUM_DEVICES = (1, 2), 4, 2
CONFIG = EplbConfig(window_size=4, step_interval=10, num_redundant_experts=2, log_balancedness=True)


@dataclass
class Counted:
    """What a device has counted, once it is there."""

    values: np.ndarray
    runner: "CountingRunner"

    def is_ready(self) -> bool:
        return self.runner.is_quick

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.values


@dataclass
class CountingRunner:
    """Counts what `step` says, and notes where experts are wanted."""

    load_shape: tuple[int, int] = (3, NUM_EXPERTS)
    is_quick: bool = True
    placed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        router = SimpleNamespace(router=SimpleNamespace(num_experts=NUM_EXPERTS))
        held = {layer: np.array([0, 1, 2, 3, -1, -1], np.int32) for layer in LAYERS}
        self.expert_slots = SimpleNamespace(ffns=dict.fromkeys(LAYERS, router), held=held, num_devices=NUM_DEVICES)
        self.counts = np.zeros(self.load_shape, np.uint32)

    def take_expert_loads(self) -> Counted:
        counts, self.counts = self.counts, np.zeros(self.load_shape, np.uint32)
        return Counted(counts, self)

    def place_experts(self, layer: int, wanted: np.ndarray) -> None:
        self.placed.append(layer)
        self.expert_slots.held[layer] = wanted

    def num_copies(self, layer: int) -> list[int]:
        held = self.expert_slots.held[layer]
        return [int((held == expert).sum()) for expert in range(NUM_EXPERTS)]


def started() -> tuple[Any, Any, Any]:
    runner: Any = CountingRunner()
    meter = LoadMeter(runner)
    balancer = ExpertBalancer(CONFIG, runner, meter)
    assert runner.placed == [*LAYERS] and all(min(held) >= 0 for held in runner.expert_slots.held.values())
    runner.placed.clear()
    return runner, meter, balancer


def run(runner: Any, balancer: Any, first: int, last: int, *chosen: int) -> None:
    """Steps in which 30 tokens choose each of these experts, and one token each expert, in every layer."""
    for number in range(first, last):
        balancer.between_steps(number)
        runner.counts += np.uint32(1)
        for expert in chosen:
            runner.counts[:, expert] += np.uint32(30)


def test_the_last_steps_of_an_interval_decide(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    runner, meter, balancer = started()
    run(runner, balancer, 0, 6, 2)
    run(runner, balancer, 6, 10, 3)
    assert not runner.placed and not balancer.most_load
    run(runner, balancer, 10, 14, 0)
    assert runner.placed == [*LAYERS]
    assert [runner.num_copies(layer) for layer in LAYERS] == [[2, 1, 1, 2]] * 2
    # Four steps of two layers, as it was before experts moved.
    assert balancer.mean_load == 2 * 4 * (30 + 4) / NUM_DEVICES < balancer.most_load
    share = balancer.mean_load / balancer.most_load
    assert caplog.messages == [f"experts: mean load of a device / load of the busiest one = {share:.3f}"]
    assert meter.window[1].tolist() == [4, 4, 4, 124]
    run(runner, balancer, 14, 40, 2)
    assert [runner.num_copies(layer) for layer in LAYERS] == [[2, 1, 2, 1]] * 2
    assert balancer.num_placements == len(LAYERS) * 3


def test_experts_of_one_layer_move_between_two_steps_once_loads_are_there() -> None:
    runner, _, balancer = started()
    run(runner, balancer, 0, 10, 3)
    runner.is_quick = False
    run(runner, balancer, 10, 15)
    assert not runner.placed
    runner.is_quick = True
    run(runner, balancer, 15, 17)
    assert runner.placed == [LAYERS[0]]
    run(runner, balancer, 17, 18)
    assert runner.placed == [*LAYERS]


def test_whoever_reads_the_loads_changes_no_window() -> None:
    runner, meter, balancer = started()
    run(runner, balancer, 0, 8, 0)
    meter.take()
    meter.read()
    assert meter.total[1].tolist() == [248, 8, 8, 8] and meter.window[1].tolist() == [62, 2, 2, 2]
    run(runner, balancer, 8, 12, 0)
    assert meter.window[1].tolist() == [124, 4, 4, 4]


def test_a_step_that_broke_off_begins_a_new_interval() -> None:
    runner, meter, balancer = started()
    run(runner, balancer, 0, 9, 0)
    meter.drop()
    balancer.drop()
    run(runner, balancer, 9, 18, 1)
    assert not runner.placed
    run(runner, balancer, 18, 21, 1)
    assert [runner.num_copies(layer)[1] for layer in LAYERS] == [2, 2]
