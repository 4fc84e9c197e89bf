"""Compares the simulator with a real engine, on the same loads.

An engine answers Poisson loads in real time, at a share of the requests that it completes in a second when all come at
once. Before each round of all loads its steps are measured (`measure_steps`), so that a machine that is slower for a
while is so for both. The simulator answers the same loads, with the same arrivals and lengths, by the table of all
measurements. This prints both figures of each load and writes benchmarks/results/simulator-DATE-COMMIT.json.

    python -m benchmarks.simulator [--small] [--seconds 40] [--shares 0.3 0.6 0.9] [--num-prompts 150]

With `--large` it simulates that many requests to Llama-3.1-8B on an H100 instead, and tells how long that takes.

    python -m benchmarks.simulator --large 1000000
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.qwen3 import MODEL_S, write_model
from benchmarks.result_files import ROOT, machine, write_record
from jaxvllm.bench.samples import PrefixRepetition, Random
from jaxvllm.bench.summary import Summary
from jaxvllm.bench.traffic import Traffic
from jaxvllm.config import EngineConfig
from jaxvllm.engine.burst_pace import SERVING_SECONDS
from jaxvllm.engine.engine import Engine
from jaxvllm.planner.deployment import Deployment
from jaxvllm.planner.known_models import find_config
from jaxvllm.simulator.engine_run import run_on_engine
from jaxvllm.simulator.engine_setup import EngineSetup
from jaxvllm.simulator.measuring import StepMeasurement, measure_steps
from jaxvllm.simulator.roofline_cost import RooflineCost
from jaxvllm.simulator.simulation import ReplicaPool, Simulation
from jaxvllm.simulator.workload import PrefixWorkload, RandomWorkload, Workload

NUM_PAGES = 4097
GOAL = 0.15


def figures(summary: Summary) -> dict[str, float]:
    """Returns what is compared: tokens per second, and milliseconds."""
    found = {"output_throughput": summary.output_throughput}
    found |= {f"mean_{name}_ms": summary.latencies[name].mean for name in ("ttft", "itl", "tpot", "e2el")}
    return found | {f"p99_{name}_ms": summary.latencies[name].percentiles[99.0] for name in ("ttft", "itl")}


def compared(real: Sequence[dict[str, float]], simulated: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Returns, for each figure, the real ones, their median, the simulated one, and how far that is from the median."""
    table = {}
    for name, value in simulated.items():
        runs = [one[name] for one in real]
        median = statistics.median(runs)
        table[name] = {"real": runs, "median": median, "simulated": value, "error": value / median - 1}
    return table


def loads(rates: Sequence[float], count: int) -> dict[str, Workload]:
    random = Random(random_input_len=100, random_output_len=64, random_range_ratio=0.8)
    found: dict[str, Workload] = {
        f"random, {rate:.1f} requests/s": RandomWorkload(Traffic(count, rate), random, seed=1) for rate in rates
    }
    shared = PrefixWorkload(Traffic(count, rates[len(rates) // 2]), PrefixRepetition(256, 32, 4, 64), seed=2)
    return found | {f"shared prefixes, {shared.traffic.request_rate:.1f} requests/s": shared}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="model S of benchmarks/qwen3.py, not the demo model")
    parser.add_argument("--seconds", type=float, default=40.0, help="time to measure steps, in all rounds")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3, 0.6, 0.9], help="of the throughput")
    parser.add_argument("--num-prompts", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=2, help="real runs of each load")
    parser.add_argument("--large", type=int, metavar="N", help="simulate N requests, and run no engine")
    parser.add_argument("--rate", type=float, default=60.0, help="requests per second of --large")
    args = parser.parse_args()
    device = machine()
    if args.large is not None:
        written = write_record("simulator-large", device, large(args.large, args.rate))
        print(f"\nwritten to {written.relative_to(ROOT)}")
        return
    with tempfile.TemporaryDirectory() as directory:
        model = "demo"
        options: dict[str, Any] = {}
        if args.small:
            write_model(Path(directory), MODEL_S)
            model, options = directory, {"load_format": "dummy", "dtype": "float32"}
        config = EngineConfig(
            model=model, max_model_len=512, num_pages=NUM_PAGES, speculation=False, warm_up="full", **options
        )
        record = compare(config, args)
    record |= {"model": "model S" if args.small else "demo", "num_prompts": args.num_prompts}
    written = write_record("simulator-s" if args.small else "simulator", device, record)
    print(f"\nwritten to {written.relative_to(ROOT)}")


def large(count: int, rate: float) -> dict[str, Any]:
    name, hf_config = find_config("Llama-3.1-8B")
    config = EngineConfig(model=name, max_model_len=8192)
    deployment = Deployment.of_config(config, hf_config, "h100")
    pool = ReplicaPool(EngineSetup.of_deployment(config, deployment), RooflineCost.of(deployment))
    workload = RandomWorkload(Traffic(count, rate), Random(512, 128, 0.5))
    result = Simulation(pool).run(workload)
    simulated = figures(summary := result.ledger.summary([99.0]))
    seconds = result.wall_seconds
    print(f"{summary.completed:,} requests in {seconds:.0f} s: {1e3 * seconds / count:.2f} ms each")
    print("\n".join(f"  {figure:20} {value:12.2f}" for figure, value in simulated.items()))
    load = {"model": name, "device": "h100", "rate": rate, "count": count, "completed": summary.completed}
    return load | {"wall_seconds": seconds, "figures": simulated, "pool": result.pools[0].record()}


def compare(config: EngineConfig, args: argparse.Namespace) -> dict[str, Any]:
    _, hf_config = find_config(config.model)
    setup = EngineSetup.of_deployment(config, Deployment.of_config(config, hf_config, "cpu"))
    engine = Engine(config, SERVING_SECONDS)
    try:
        everything = RandomWorkload(Traffic(args.num_prompts, math.inf), Random(100, 64, 0.8), seed=3)
        most = run_on_engine(engine, everything).ledger.summary([99.0]).request_throughput
        workloads = {"all at once": everything} | loads([share * most for share in args.shares], args.num_prompts)
        real: dict[str, list[dict[str, float]]] = {name: [] for name in workloads}
        measured = StepMeasurement()
        for _ in range(args.rounds):
            measure_steps(engine, args.seconds / args.rounds, measured)
            for name, workload in workloads.items():
                real[name].append(figures(run_on_engine(engine, workload).ledger.summary([99.0])))
    finally:
        engine.close()
    table = measured.table(config.model, "cpu")
    simulation = Simulation(ReplicaPool(setup, table))
    results = {}
    for name, workload in workloads.items():
        results[name] = compared(real[name], figures(simulation.run(workload).ledger.summary([99.0])))
        print(name)
        for figure, values in results[name].items():
            runs = " ".join(f"{value:.2f}" for value in values["real"])
            print(f"  {figure:20} simulated {values['simulated']:10.2f}   real {runs}   {values['error']:+.1%}")
    compared_figures = ("output_throughput", "mean_ttft_ms", "mean_itl_ms")
    worst = max(abs(one[figure]["error"]) for one in results.values() for figure in compared_figures)
    print(f"largest error of throughput, mean TTFT and mean ITL: {worst:.1%} (the goal is {GOAL:.0%})")
    return {"results": results, "largest_error": worst, "table": json.loads(table.to_json())}


if __name__ == "__main__":
    main()
