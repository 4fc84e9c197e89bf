"""The simulator: times that follow from a cost by hand, and what must hold for every load."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from jaxvllm.bench.samples import PrefixRepetition, Random
from jaxvllm.bench.traffic import Traffic
from jaxvllm.core.kv_cache import GroupSize
from jaxvllm.core.policy import POLICIES
from jaxvllm.runtime.buckets import BucketLadder
from jaxvllm.simulator import virtual_replica
from jaxvllm.simulator.step_cost import StepWork
from jaxvllm.simulator.workload import Conversations, ConversationWorkload, PrefixWorkload
from tests.simulator.setups import FlatCost, engines_of, latencies, load, one_pool, two_pools

BURSTS = dict(ladder=BucketLadder.build([1, 2, 4, 8], [16, 32, 64], width=8), burst_seconds=0.05)


def test_one_request_takes_its_steps_one_after_the_other() -> None:
    lone = load(1, random_input_len=96, random_output_len=5, random_range_ratio=0.0)
    result = one_pool().run(lone)
    figures = latencies(result)
    # 96 tokens are two steps of at most 64; four more tokens are four decode steps.
    assert figures["mean_ttft_ms"] == pytest.approx(50)
    assert figures["mean_tpot_ms"] == pytest.approx(10)
    assert figures["mean_e2el_ms"] == pytest.approx(90)
    assert figures["mean_itl_ms"] == pytest.approx(10)
    assert figures["p99_itl_ms"] == pytest.approx(10, rel=0.003)
    assert figures["output_throughput"] == pytest.approx(5 / 0.09)
    [pool] = result.pools
    assert (pool.num_steps, pool.num_output_tokens, pool.num_preemptions) == (6, 5, 0)


def test_the_host_is_hidden_behind_the_device_unless_it_is_slower() -> None:
    lone = load(1, random_input_len=16, random_output_len=101, random_range_ratio=0.0)
    quick, slow = (one_pool(FlatCost(host=host)).run(lone) for host in (0.004, 0.030))
    # The first steps wait for the host, and then it works while the device does.
    assert latencies(quick)["mean_tpot_ms"] == pytest.approx(10, rel=0.02)
    assert latencies(slow)["mean_tpot_ms"] == pytest.approx(30, rel=0.02)


def test_the_device_begins_behind_the_launch_and_callers_see_tokens_behind_the_reading() -> None:
    @dataclass(frozen=True)
    class Parted(FlatCost):
        def launch_seconds(self, work: StepWork) -> float:
            return 0.003 + 0.004 * work.num_admissions

        def read_seconds(self, work: StepWork) -> float:
            return 0.002

    lone = load(1, random_input_len=96, random_output_len=5, random_range_ratio=0.0)
    # Of two steps with prompts, the first alone sends parameters.
    assert latencies(one_pool(Parted()).run(lone))["mean_ttft_ms"] == pytest.approx(3 + 4 + 25 + 25 + 2)


def test_steps_next_to_a_step_with_prompts_share_the_processors_with_the_host() -> None:
    @dataclass(frozen=True)
    class Sharing(FlatCost):
        def device_seconds(self, work: StepWork) -> float:
            return super().device_seconds(work) + (0.005 if work.is_behind else 0.0)

    lone = load(1, random_input_len=96, random_output_len=5, random_range_ratio=0.0)
    figures = latencies(one_pool(Sharing()).run(lone))
    # The second step comes after the first, and the first decode step after the second. The others are as they were.
    assert figures["mean_ttft_ms"] == pytest.approx(25 + 30)
    assert figures["mean_e2el_ms"] == pytest.approx(25 + 30 + 15 + 3 * 10)


def test_a_request_that_arrives_in_a_step_waits_for_those_under_way() -> None:
    class Two:
        traffic = Traffic(2)

        def arrivals(self) -> Any:
            first, second = load(2, random_input_len=10, random_output_len=50, random_range_ratio=0.0).arrivals()
            return iter([replace(first, at=0.0), replace(second, at=0.111)])

        def at_rate(self, rate: float, count: int) -> Any:
            raise NotImplementedError

    result = one_pool().run(Two())
    _, ttfts = result.ledger.ttfts()
    # Steps end at 0.025, 0.035, ...: at 0.115 the step until 0.125 is under way, and the next one has the prompt.
    assert ttfts.tolist() == pytest.approx([0.025, 0.125 + 0.025 - 0.111])


LOADS = {
    "random": load(),
    "at once": load(rate=float("inf")),
    "shared prefixes": PrefixWorkload(Traffic(60, 20.0), PrefixRepetition(64, 30, 3, 20)),
    "conversations": ConversationWorkload(Traffic(60, 20.0), Conversations(3, 2.0, 32, 20, 20)),
}
ENGINES: dict[str, dict[str, Any]] = {
    "one replica": {},
    "three replicas": {"num_replicas": 3},
    "bursts": BURSTS,
    "few pages": {"groups": (GroupSize(16),)},
    "a window": {"groups": (GroupSize(40), GroupSize(40, 32))},
    "no prefix cache": {"enable_prefix_caching": False},
    "v0": {"policy": POLICIES["v0"]},
    "static": {"policy": POLICIES["static"]},
}


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("workload", LOADS.values(), ids=LOADS)
def test_every_request_ends_once_with_all_its_tokens_and_every_page_comes_back(
    workload: Any, options: dict[str, Any]
) -> None:
    engine = engines_of(one_pool(**options), workload)
    for replica in engine.replicas:
        replica.scheduler.check_invariants()
        assert not replica.has_work and not replica.scheduler.cache.num_owned
    asked = sum(one.answer.num_tokens for one in workload.arrivals())
    assert sum(replica.counts.num_output_tokens for replica in engine.replicas) == asked


@pytest.mark.parametrize("workload", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("options", [{}, {"groups": (GroupSize(16),)}, {"num_replicas": 2}], ids=str)
def test_two_pools_serve_every_request(workload: Any, options: dict[str, Any]) -> None:
    result = two_pools(**options).run(workload)
    prefill, decode = result.pools
    asked = sum(one.answer.num_tokens for one in workload.arrivals())
    assert result.ledger.num_ended == workload.traffic.num_prompts
    assert prefill.num_output_tokens == workload.traffic.num_prompts
    assert prefill.num_output_tokens + decode.num_output_tokens == asked
    assert not decode.num_prefix_queries, "transfers are no hits of a prefix cache"


def test_the_same_load_gives_the_same_result() -> None:
    for simulation in (one_pool(num_replicas=2, **BURSTS), two_pools()):
        first, second = (simulation.run(LOADS["conversations"]) for _ in range(2))
        assert latencies(first) == latencies(second)
        assert [pool.record() for pool in first.pools] == [pool.record() for pool in second.pools]
    assert latencies(one_pool().run(load(seed=1))) != latencies(one_pool().run(load(seed=2)))


@pytest.mark.parametrize(
    ("name", "rate"),
    # Bursts at rates that are nearly too high are chaotic: a burst more or less decides who waits for how long.
    [
        ("bursts", 2.0),
        *((name, rate) for name in ("one replica", "three replicas", "few pages") for rate in (2.0, 10.0, 40.0)),
    ],
)
def test_steps_that_are_planned_as_one_change_nothing(name: str, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ENGINES[name]
    workload = load(80, rate, random_output_len=60)
    joined = one_pool(**options).run(workload)
    monkeypatch.setattr(virtual_replica, "MOST_JOINED", 0)
    each = one_pool(**options).run(workload)
    # Pages are opened for all of the calls at once. Bursts that are joined all have the width of the first one, while
    # the measured pace may change a little, so that of their figures only the means agree.
    close = {"bursts": 0.03, "few pages": 0.01}.get(name, 1e-6)
    for figure, value in latencies(each).items():
        if value is not None and (name != "bursts" or figure.startswith("mean")):
            assert latencies(joined)[figure] == pytest.approx(value, rel=close), figure
    steps = [[pool.num_steps for pool in result.pools] for result in (joined, each)]
    assert steps[0] == pytest.approx(steps[1], rel=close)


def test_shared_prefixes_are_computed_once() -> None:
    shared = one_pool().run(LOADS["shared prefixes"])
    # All but the first of each of three prefixes find its 64 tokens; prompts have 94.
    [pool] = shared.pools
    assert pool.prefix_hit_rate == pytest.approx(57 * 64 / (60 * 94))
    [without] = one_pool(enable_prefix_caching=False).run(LOADS["shared prefixes"]).pools
    assert without.num_prefix_hits == 0


def test_the_routing_policy_is_the_engine_s() -> None:
    """Three prefixes fit to three replicas. By load alone, each replica computes each of them."""
    hits = {
        policy: one_pool(num_replicas=3, routing_policy=policy).run(LOADS["shared prefixes"]).pools[0].num_prefix_hits
        for policy in ("least-load", "prefix")
    }
    assert hits["prefix"] > hits["least-load"]


def test_a_conversation_finds_what_it_has_said_before() -> None:
    talks = ConversationWorkload(Traffic(40, 0.1), Conversations(4, 20.0, 0, 32, 33))
    # Prompts of 32, 97, 162 and 227 tokens. Each finds the full pages of what was computed before: the prompt before it
    # and its answer, but the last token of that.
    [pool] = one_pool().run(talks).pools
    assert pool.num_prefix_queries == 10 * (32 + 97 + 162 + 227)
    assert pool.num_prefix_hits == 10 * (0 + 64 + 128 + 192)


def test_transfers_delay_the_second_token_alone() -> None:
    lone = load(1, random_input_len=64, random_output_len=11, random_range_ratio=0.0)
    together, apart = latencies(one_pool().run(lone)), latencies(two_pools().run(lone))
    assert apart["mean_ttft_ms"] == pytest.approx(together["mean_ttft_ms"])
    # 64 tokens of 1000 bytes at 1 MB/s and the latency, then a step that computes the last token, then nine others.
    assert apart["mean_e2el_ms"] == pytest.approx(25 + 64 + 2 + 25 + 90)


def test_a_request_that_can_never_run_is_refused() -> None:
    long = load(3, random_input_len=500, random_output_len=30, random_range_ratio=0.0)
    summary = one_pool().run(long).ledger.summary([99.0])
    assert (summary.completed, summary.failed) == (0, 3)


def test_random_loads_have_the_lengths_and_arrivals_of_the_benchmark() -> None:
    workload = load(500, 25.0)
    arrivals = list(workload.arrivals())
    assert arrivals == list(workload.arrivals())
    times = [one.at for one in arrivals]
    assert times == sorted(times) and times[-1] == pytest.approx(500 / 25)
    assert {one.num_prompt_tokens for one in arrivals} == set(range(25, 76))
    prefixed = replace(workload, data=Random(20, 5, 0.0, random_prefix_len=16))
    first, second = (one.symbols().tolist() for one in list(prefixed.arrivals())[:2])
    assert first[:16] == second[:16] and not set(first[16:]) & set(second[16:])
