"""`jaxvllm bench auto-tune`: searches options for a service level objective, by simulation first and real runs last."""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxvllm.cli.bench.result import check_output
from jaxvllm.cli.flags import add_flags as add_flags_of
from jaxvllm.cli.parser import ENGINE_EPILOG
from jaxvllm.cli.simulate import (
    SIMULATED,
    Devices,
    add_deployment_flags,
    add_workload_flags,
    chosen_config,
    chosen_workload,
    read_table,
)
from jaxvllm.config import EngineConfig

if TYPE_CHECKING:
    from jaxvllm.bench.summary import Summary
    from jaxvllm.simulator.auto_tune import Options
    from jaxvllm.simulator.simulation import Simulation
    from jaxvllm.simulator.workload import Workload

_SEARCHED = ("max_num_seqs", "max_num_batched_tokens")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = ENGINE_EPILOG
    search = parser.add_argument_group("search")
    search.add_argument(
        "--goodput", nargs="+", required=True, metavar="NAME:MS", help="limits of a request: ttft:500 tpot:50 e2el:9000"
    )
    search.add_argument(
        "--attainment", type=float, default=0.9, metavar="SHARE", help="of requests within the limits (default: 0.9)"
    )
    search.add_argument("--num-seqs-list", nargs="+", type=int, metavar="N", help="default: the engine's own, / 2, / 4")
    search.add_argument(
        "--num-batched-tokens-list", nargs="+", type=int, metavar="N", help="default: 1/2, 1, 2, 4 of it"
    )
    search.add_argument(
        "--disaggregate", type=int, metavar="N", help="try every P+D of N replicas, and N replicas that do both"
    )
    search.add_argument(
        "--real-runs", type=int, default=0, metavar="K", help="run the best K on the engine of this process, too"
    )
    search.add_argument("--output-json", type=Path, metavar="FILE", help="write all figures")
    parser.set_defaults(model_name=None, pools=None)
    add_deployment_flags(parser, has_pools=False)
    add_workload_flags(parser)
    skipped = [name for name in EngineConfig.__dataclass_fields__ if name not in SIMULATED or name in _SEARCHED]
    add_flags_of(parser, EngineConfig, "engine", skip=skipped)


def run(args: argparse.Namespace) -> int:
    """Returns 1 when no options keep the promise at any rate."""
    from jaxvllm.bench.summary import Goodput
    from jaxvllm.simulator.auto_tune import Promise, all_options, heading, row, tune
    from jaxvllm.simulator.measuring import device_name

    check_output(args.output_json)
    promise = Promise(Goodput.parse(args.goodput), args.attainment)
    workload = chosen_workload(args)
    table = read_table(args.table)
    config = chosen_config(args, table)
    count = args.disaggregate
    if count is not None and count < 2:
        raise ValueError(f"--disaggregate must be at least 2 replicas, one for each pool, not {count}")
    if count is not None and args.real_runs:
        raise ValueError("--real-runs needs one pool: real pools are engines of their own, see docs/simulator.md")
    pools = [None] if count is None else [None, *((prefill, count - prefill) for prefill in range(1, count))]
    devices = Devices.of_flags(args, config, table)
    if args.real_runs and devices.name != device_name():
        raise ValueError(f"--real-runs runs on the {device_name()} at hand, and the simulation is of {devices.name}")

    def simulation_of(options: "Options") -> "Simulation":
        changed = _with(config, options)
        if count is not None and options.pools is None:
            changed = replace(changed, mesh=str(replace(config.mesh_shape, data=count)))
        return devices.simulation(changed, options.pools)

    seqs, tokens = devices.limits(config)
    print(heading())
    found = tune(
        all_options(
            args.num_seqs_list or sorted({max(seqs // part, 1) for part in (4, 2, 1)}),
            args.num_batched_tokens_list or [tokens // 2, tokens, 2 * tokens, 4 * tokens],
            pools,
        ),
        simulation_of,
        workload,
        promise,
        lambda tuned: print(row(tuned), flush=True),
    )
    best = [tuned for tuned in found if tuned.rate > 0]
    measured: list[Summary | None] = [None] * len(found)
    if best and args.real_runs:
        print(f"\nthe best {min(args.real_runs, len(best))}, simulated and on this machine\n{heading(True)}")
        for index, tuned in enumerate(best[: args.real_runs]):
            changed = _with(config, tuned.options)
            measured[index] = _real_run(changed, workload.at_rate(tuned.rate, workload.traffic.num_prompts), promise)
            print(row(tuned, measured[index]), flush=True)
    if args.output_json is not None:
        _write(args.output_json, config, found, measured)
    if not best:
        print("no options keep these limits at any rate: allow more time, or give more devices")
        return 1
    print(f"\nbest: {best[0].options}, {best[0].rate:.2f} requests per second")
    return 0


def _with(config: EngineConfig, options: "Options") -> EngineConfig:
    return replace(config, max_num_seqs=options.max_num_seqs, max_num_batched_tokens=options.max_num_batched_tokens)


def _real_run(config: EngineConfig, workload: "Workload", promise: Any) -> "Summary":
    from jaxvllm.engine.burst_pace import SERVING_SECONDS
    from jaxvllm.engine.engine import Engine
    from jaxvllm.simulator.auto_tune import PERCENTILES
    from jaxvllm.simulator.engine_run import run_on_engine

    engine = Engine(replace(config, speculation=False, warm_up="full"), SERVING_SECONDS)
    try:
        return run_on_engine(engine, workload).ledger.summary(PERCENTILES, promise.goodput)
    finally:
        engine.close()


def _write(path: Path, config: EngineConfig, found: Any, measured: Any) -> None:
    from jaxvllm.bench.offline.origin import origin

    results = [
        {"options": asdict(tuned.options), "rate": tuned.rate, "simulated": asdict(tuned.summary)}
        | ({} if real is None else {"measured": asdict(real)})
        for tuned, real in zip(found, measured, strict=True)
    ]
    record = origin() | {"model": config.model, "results": results}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
