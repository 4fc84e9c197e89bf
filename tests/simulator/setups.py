"""Small deployments for the simulator, and costs that a test can compute in its head."""

from dataclasses import dataclass
from typing import Any

from jaxvllm.bench.samples import Random
from jaxvllm.bench.traffic import Traffic
from jaxvllm.core.kv_cache import GroupSize
from jaxvllm.runtime.buckets import BucketLadder
from jaxvllm.simulator.engine_setup import EngineSetup
from jaxvllm.simulator.ledger import Ledger
from jaxvllm.simulator.simulation import ReplicaPool, Simulation, SimulationResult
from jaxvllm.simulator.step_cost import StepWork
from jaxvllm.simulator.transfer import Transfer
from jaxvllm.simulator.virtual_engine import Incoming, VirtualEngine
from jaxvllm.simulator.workload import RandomWorkload, Workload


@dataclass(frozen=True)
class FlatCost:
    """Each decode step takes `decode` seconds, each step with prompts `mixed`, and the host takes `host` for a call."""

    decode: float = 0.010
    mixed: float = 0.025
    host: float = 0.0
    request_seconds: float = 0.0
    jitter: tuple[float, ...] = (1.0,)

    def device_seconds(self, work: StepWork) -> float:
        return self.decode * work.num_steps if work.bucket.is_decode else self.mixed

    def launch_seconds(self, work: StepWork) -> float:
        return self.host / 2

    def read_seconds(self, work: StepWork) -> float:
        return self.host / 2


def setup(**changes: Any) -> EngineSetup:
    """8 requests at once, 64 tokens a step, 100 pages of 16 tokens, no bursts."""
    options: dict[str, Any] = dict(
        num_replicas=1,
        groups=(GroupSize(101),),
        page_size=16,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        ladder=BucketLadder.build([1, 2, 4, 8], [16, 32, 64]),
        step_overhead=5,
    )
    return EngineSetup(**options | changes)


def load(count: int = 60, rate: float = 20.0, seed: int = 0, **lengths: Any) -> RandomWorkload:
    data = dict(random_input_len=50, random_output_len=20, random_range_ratio=0.5) | lengths
    return RandomWorkload(Traffic(count, rate), Random(**data), seed)


def one_pool(cost: FlatCost | None = None, **changes: Any) -> Simulation:
    return Simulation(ReplicaPool(setup(**changes), cost or FlatCost()))


def two_pools(cost: FlatCost | None = None, num_decode: int = 1, **changes: Any) -> Simulation:
    decode = ReplicaPool(setup(**{"num_replicas": num_decode} | changes), cost or FlatCost())
    return Simulation(ReplicaPool(setup(), cost or FlatCost()), decode, Transfer(1000.0, bandwidth=1e6, latency=0.002))


def engines_of(simulation: Simulation, workload: Workload) -> VirtualEngine:
    """Runs a load of one pool, and returns the engine, which is idle then."""
    engine = VirtualEngine(
        simulation.front.setup, simulation.front.cost, ledger := Ledger(workload.traffic.num_prompts)
    )
    arrivals = []
    for number, one in enumerate(workload.arrivals()):
        ledger.arrive(number, one.at, one.num_prompt_tokens, one.answer.num_tokens)
        arrivals.append(Incoming(one.at, number, one.symbols(), one.answer.name, one.answer.num_tokens))
    ended = [one.incoming.number for one in engine.run(arrivals)]
    assert sorted(ended) == list(range(workload.traffic.num_prompts)), "each request ends once"
    return engine


def latencies(result: SimulationResult) -> dict[str, Any]:
    """Returns every figure but the time that the simulation itself took."""
    figures = result.run(["ttft", "tpot", "itl", "e2el"], [50.0, 99.0]).figures()
    del figures["client_cpu_seconds"]
    return figures
