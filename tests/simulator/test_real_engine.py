"""The simulator beside a real engine: the same plans, and a table of the engine's own steps."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxvllm.config import EngineConfig
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.core.step_plan import StepPlan
from jaxvllm.engine.burst_pace import SERVING_SECONDS
from jaxvllm.engine.engine import Engine
from jaxvllm.planner.deployment import Deployment
from jaxvllm.planner.known_models import find_config
from jaxvllm.simulator import virtual_replica
from jaxvllm.simulator.engine_run import run_on_engine
from jaxvllm.simulator.engine_setup import EngineSetup
from jaxvllm.simulator.measured_cost import MeasuredCost
from jaxvllm.simulator.measuring import StepMeasurement, measure_steps
from jaxvllm.simulator.simulation import ReplicaPool, Simulation
from tests.run_cache import run_cache
from tests.simulator.setups import FlatCost, load

pytestmark = pytest.mark.usefixtures("quick_programs")
CONFIG = EngineConfig(
    model="demo",
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    row_buckets=(8,),
    token_buckets=(16,),
    num_pages=41,
    max_decode_burst=1,
    speculation=False,
    compilation_cache=run_cache(),
    warm_up="full",
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(CONFIG, SERVING_SECONDS)
    yield engine
    engine.close()


def simulation(cost: Any) -> Simulation:
    _, hf_config = find_config("demo")
    return Simulation(
        ReplicaPool(EngineSetup.of_deployment(CONFIG, Deployment.of_config(CONFIG, hf_config, "cpu")), cost)
    )


def test_a_simulated_engine_has_the_limits_of_the_real_one(engine: Engine) -> None:
    [replica] = engine.replicas
    setup = simulation(FlatCost()).front.setup
    assert setup.ladder == replica.runner.programs.ladder
    assert setup.step_sizes.overhead == replica.runner.step_sizes.overhead
    assert set(setup.step_sizes.sizes) == set(replica.runner.step_sizes.sizes)
    assert setup.make_scheduler().cache.num_pages == replica.scheduler.cache.num_pages


def test_the_steps_are_those_of_a_real_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[tuple[int, ...]] = []
    schedule = Scheduler.schedule

    def noted(scheduler: Scheduler, *args: Any) -> StepPlan | None:
        plan = schedule(scheduler, *args)
        if plan is not None:
            plans.append((plan.num_decode, *plan.lengths.tolist(), *plan.slots.tolist()))
        return plan

    monkeypatch.setattr(Scheduler, "schedule", noted)
    monkeypatch.setattr(virtual_replica, "MOST_JOINED", 0)  # each step is planned alone, as a real engine does
    at_once = load(24, float("inf"), random_output_len=60)
    run = run_on_engine(engine, at_once)
    real, preemptions = plans.copy(), engine.replicas[0].scheduler.num_preemptions
    plans.clear()
    result = simulation(FlatCost()).run(at_once)
    assert plans == real
    assert result.pools[0].num_preemptions == preemptions > 0
    summaries = [ledger.summary([50.0]) for ledger in (run.ledger, result.ledger)]
    counts = [(one.completed, one.failed, one.total_input, one.total_output) for one in summaries]
    assert counts[0] == counts[1]


def test_a_request_that_does_not_fit_fails_in_both(engine: Engine) -> None:
    lengths = load(8, float("inf"), random_input_len=240, random_output_len=10, random_range_ratio=0.1)
    summaries = [
        one.ledger.summary([50.0]) for one in (run_on_engine(engine, lengths), simulation(FlatCost()).run(lengths))
    ]
    counts = [(one.completed, one.failed, one.total_input, one.total_output) for one in summaries]
    assert counts[0] == counts[1]
    assert 0 < summaries[0].failed < 8


def test_a_table_of_an_engine_serves_a_simulation(engine: Engine, tmp_path: Path) -> None:
    told: list[str] = []
    measured = StepMeasurement()
    measure_steps(engine, 0.0, measured, told.append)
    table = measured.table("demo", "cpu")
    assert len(told) == 2
    assert not engine.has_work
    file = tmp_path / "table.json"
    file.write_text(table.to_json())
    result = simulation(MeasuredCost.read(file)).run(load(20))
    assert result.ledger.num_ended == 20
    assert result.ledger.summary([50.0]).latencies["ttft"].mean > 0


def test_steps_with_drafts_are_not_measured(engine: Engine) -> None:
    drafting = replace(CONFIG, speculation=True)

    class Drafting:
        config, replicas = drafting, engine.replicas

    with pytest.raises(ValueError, match="give --no-speculation"):
        measure_steps(Drafting(), 1.0, StepMeasurement())  # type: ignore[arg-type]
