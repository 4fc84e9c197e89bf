"""The search: it finds the rate at which a promise breaks, and the options that keep it longest."""

import math
from dataclasses import dataclass, replace

import pytest

from jaxvllm.bench.summary import Goodput
from jaxvllm.bench.traffic import Traffic
from jaxvllm.runtime.buckets import BucketLadder
from jaxvllm.simulator.auto_tune import Options, Promise, Tuned, all_options, best_rate, heading, row, tune
from jaxvllm.simulator.simulation import ReplicaPool, Simulation
from jaxvllm.simulator.step_cost import StepWork
from tests.simulator.setups import FlatCost, load, setup


@dataclass(frozen=True)
class SlowPrompts(FlatCost):
    """Steps with prompts take as long as their tokens, so that small budgets disturb decoding rows least."""

    def device_seconds(self, work: StepWork) -> float:
        return self.decode * work.num_steps if work.bucket.is_decode else 0.0005 * work.bucket.num_tokens


WORKLOAD = replace(load(60), traffic=Traffic(60))


def simulation(options: Options) -> Simulation:
    seqs, tokens = options.max_num_seqs, options.max_num_batched_tokens
    ladder = BucketLadder.build([1, 2, 4, seqs], [16, 32, tokens])
    limits = setup(max_num_seqs=seqs, max_num_batched_tokens=tokens, ladder=ladder)
    return Simulation(ReplicaPool(limits, SlowPrompts(0.01)))


def test_the_rate_is_the_last_at_which_the_promise_is_kept() -> None:
    promise = Promise(Goodput({"ttft": 200.0, "tpot": 40.0}), 0.9)
    options = Options(8, 64)
    found = best_rate(options, simulation(options), WORKLOAD, promise)

    def is_kept(rate: float) -> bool:
        result = simulation(options).run(WORKLOAD.at_rate(rate, 60))
        return promise.is_kept(result.ledger.summary([99.0], promise.goodput))

    assert found.rate > 0 and is_kept(found.rate) and not is_kept(found.rate * 1.2)
    assert promise.is_kept(found.summary)
    loose = Promise(Goodput({"ttft": 1e6}))
    everything = best_rate(options, simulation(options), WORKLOAD, loose)
    at_once = simulation(options).run(WORKLOAD.at_rate(math.inf, 60)).ledger.summary([99.0])
    assert everything.rate == at_once.request_throughput > found.rate
    never = best_rate(options, simulation(options), WORKLOAD, Promise(Goodput({"ttft": 1.0})))
    assert never.rate == 0


def test_the_best_options_come_first() -> None:
    told: list[Tuned] = []
    promise = Promise(Goodput({"ttft": 400.0, "tpot": 25.0}))
    options = list(all_options([2, 8], [64, 256], [None]))
    found = tune(options, simulation, WORKLOAD, promise, told.append)
    assert [one.options for one in told] == options
    assert [one.rate for one in found] == sorted((one.rate for one in told), reverse=True)
    # Two at a time are too few, and long steps of prompts would break what was promised of decoding.
    assert found[0].options == Options(8, 64)


def test_a_step_has_a_token_for_each_request() -> None:
    assert list(all_options([16, 64], [32, 64], [None, (1, 2)])) == [
        Options(16, 32),
        Options(16, 32, (1, 2)),
        Options(16, 64),
        Options(16, 64, (1, 2)),
        Options(64, 64),
        Options(64, 64, (1, 2)),
    ]
    assert str(Options(16, 32, (1, 2))) == "max_num_seqs 16, max_num_batched_tokens 32, pools 1+2"


def test_rows_stand_below_their_headings() -> None:
    promise = Promise(Goodput({"ttft": 400.0}))
    found = best_rate(Options(8, 64), simulation(Options(8, 64)), WORKLOAD, promise)
    assert len(row(found)) == len(heading())
    assert len(row(found, found.summary)) == len(heading(True))


def test_a_share_is_a_share() -> None:
    with pytest.raises(ValueError, match="--attainment must be above 0 and at most 1, not 1.5"):
        Promise(Goodput({}), 1.5)
