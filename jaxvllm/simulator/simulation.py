"""`Simulation`: a deployment under a load in virtual time, and what came of it."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxvllm.bench.drafts import DraftTotals
from jaxvllm.bench.load import LoadOutcome
from jaxvllm.bench.report import BenchRun
from jaxvllm.bench.summary import Goodput
from jaxvllm.bench.traffic import Traffic
from jaxvllm.simulator.engine_setup import EngineSetup
from jaxvllm.simulator.ledger import Ledger
from jaxvllm.simulator.step_cost import StepCost
from jaxvllm.simulator.timeline import LoadTimeline
from jaxvllm.simulator.transfer import Transfer
from jaxvllm.simulator.virtual_engine import Incoming, Outgoing, VirtualEngine, transferred
from jaxvllm.simulator.workload import Workload

NO_DRAFTS = DraftTotals(0, 0, 0, ())


@dataclass(frozen=True)
class PoolResult:
    """The work of the replicas of one pool, all together."""

    name: str  # "engine", "prefill" or "decode"
    num_replicas: int
    num_calls: int  # of programs
    num_steps: int
    num_output_tokens: int
    num_bucket_tokens: int
    num_padding_tokens: int
    num_preemptions: int
    num_prefix_queries: int
    num_prefix_hits: int
    device_share: float  # of the time, in which the devices of a replica computed
    timeline: LoadTimeline

    @classmethod
    def of(cls, name: str, engine: VirtualEngine) -> "PoolResult":
        counts = [replica.counts for replica in engine.replicas]

        def total(field: str) -> int:
            return sum(getattr(one, field) for one in counts)

        device_seconds = sum(one.device_seconds for one in counts)
        return cls(
            name,
            len(counts),
            total("num_calls"),
            total("num_steps"),
            total("num_output_tokens"),
            total("num_bucket_tokens"),
            total("num_padding_tokens"),
            sum(replica.scheduler.num_preemptions for replica in engine.replicas),
            total("num_prefix_queries"),
            total("num_prefix_hits"),
            device_seconds / (engine.now * len(counts)) if engine.now else 0.0,
            engine.timeline,
        )

    @property
    def prefix_hit_rate(self) -> float:
        """The share of the prompts' tokens that the prefix cache had."""
        return self.num_prefix_hits / self.num_prefix_queries if self.num_prefix_queries else 0.0

    def record(self) -> dict[str, Any]:
        """Returns the figures as JSON's values."""
        counted = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "timeline"}
        return counted | {
            "prefix_hit_rate": self.prefix_hit_rate,
            "mean_kv_share": self.timeline.mean_kv_share,
            "peak_kv_share": self.timeline.peak_kv_share,
        }


@dataclass(frozen=True)
class SimulationResult:
    """The times of all requests, and what the pools did."""

    traffic: Traffic
    ledger: Ledger
    pools: tuple[PoolResult, ...]
    wall_seconds: float  # that the simulation took

    def run(self, shown: Sequence[str], percentiles: Sequence[float], goodput: Goodput | None = None) -> BenchRun:
        """Returns the result in the form of `bench serve`, which prints it and writes it as JSON."""
        summary = self.ledger.summary(percentiles, goodput)
        return BenchRun(self.traffic, LoadOutcome((), summary.duration, self.wall_seconds), summary, shown, NO_DRAFTS)

    def check_served(self) -> None:
        """Raises ValueError when not one request was answered: then there are no figures."""
        if not self.ledger.num_ended:
            raise ValueError(
                f"none of the {self.traffic.num_prompts} requests can run: each needs more tokens than --max-model-len "
                "allows, or more pages than a replica has: give shorter ones"
            )


@dataclass(frozen=True)
class ReplicaPool:
    """Equal replicas behind one router, and the times of their steps."""

    setup: EngineSetup
    cost: StepCost


@dataclass(frozen=True)
class Simulation:
    """A deployment: one pool that does everything, or one that computes prompts and one that decodes.

    If there are two pools, `front` computes each prompt and its first token. Then the keys and values travel to
    `decode`, which computes the rest. A prefix cache must be on in both, since pages arrive there.
    """

    front: ReplicaPool
    decode: ReplicaPool | None = None
    transfer: Transfer | None = None

    def __post_init__(self) -> None:
        if (self.decode is None) != (self.transfer is None):
            raise ValueError("a decode pool needs a transfer, and a transfer a decode pool")
        if self.decode is not None and not self.decode.setup.enable_prefix_caching:
            raise ValueError("the decode pool gets its pages by the prefix cache: leave it on")

    def run(self, workload: Workload) -> SimulationResult:
        """Serves the whole load. The same load gives the same result every time."""
        start = time.perf_counter()
        traffic = workload.traffic
        ledger = Ledger(traffic.num_prompts)
        front = VirtualEngine(self.front.setup, self.front.cost, ledger)
        if self.decode is None or self.transfer is None:
            for one in front.run(_incoming(workload, ledger)):
                ledger.end(one.incoming.number)
            pools: tuple[PoolResult, ...] = (PoolResult.of("engine", front),)
        else:
            decode = VirtualEngine(self.decode.setup, self.decode.cost, ledger)
            rest: dict[int, int] = {}
            prefilled = front.run(_first_tokens(_incoming(workload, ledger), rest))
            arriving = transferred(_unfinished(prefilled, ledger, rest), self.transfer, rest)
            for one in decode.run(arriving):
                ledger.end(one.incoming.number)
            pools = (PoolResult.of("prefill", front), PoolResult.of("decode", decode))
        return SimulationResult(traffic, ledger, pools, time.perf_counter() - start)


def _incoming(workload: Workload, ledger: Ledger) -> Iterator[Incoming]:
    for number, arrival in enumerate(workload.arrivals()):
        ledger.arrive(number, arrival.at, arrival.num_prompt_tokens, arrival.answer.num_tokens)
        yield Incoming(arrival.at, number, arrival.symbols(), arrival.answer.name, arrival.answer.num_tokens)


def _first_tokens(arrivals: Iterator[Incoming], rest: dict[int, int]) -> Iterator[Incoming]:
    """Yields the requests with an answer of one token each, and puts the number of the others into `rest`."""
    for one in arrivals:
        if one.num_output > 1:
            rest[one.number] = one.num_output - 1
        yield Incoming(one.at, one.number, one.tokens, one.answer, 1)


def _unfinished(ended: Iterator[Outgoing], ledger: Ledger, rest: dict[int, int]) -> Iterator[Outgoing]:
    """Yields the requests that are to get more tokens, and ends the others."""
    for one in ended:
        if one.incoming.number in rest:
            yield one
        else:
            ledger.end(one.incoming.number)
