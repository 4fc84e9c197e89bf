"""`jaxvllm bench auto-tune`: searches options for a service level objective, by simulation first and real runs last."""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxvllm.cli.bench.result import check_output
from jaxvllm.cli.flags import add_flags as add_flags_of
from jaxvllm.cli.flags import real, whole
from jaxvllm.cli.parser import ENGINE_EPILOG
from jaxvllm.cli.simulate import (
    SIMULATED,
    Devices,
    add_deployment_flags,
    add_workload_flags,
    check_no_links,
    chosen_config,
    chosen_workload,
    read_table,
)
from jaxvllm.config import MOST_SEQS, MOST_TOKENS, EngineConfig
from jaxvllm.ranges import MOST_REPLICAS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxvllm.bench.summary import Summary
    from jaxvllm.simulator.auto_tune import Options
    from jaxvllm.simulator.measured_cost import MeasuredCost
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
        "--attainment",
        type=real(0.001, 1),
        default=0.9,
        metavar="SHARE",
        help="of requests within the limits (default: 0.9)",
    )
    search.add_argument(
        "--num-seqs-list", nargs="+", type=whole(1, MOST_SEQS), metavar="N", help="default: the engine's own, / 2, / 4"
    )
    search.add_argument(
        "--num-batched-tokens-list",
        nargs="+",
        type=whole(1, MOST_TOKENS),
        metavar="N",
        help="default: 1/2, 1, 2, 4 of it",
    )
    search.add_argument(
        "--disaggregate",
        type=whole(2, MOST_REPLICAS),
        metavar="N",
        help="try every P+D of N replicas, and N replicas that do both (-)",
    )
    search.add_argument(
        "--real-runs",
        type=whole(0, 1000),
        default=0,
        metavar="K",
        help="also run the best K on the engine of this process, and choose the best that keeps the limits there",
    )
    search.add_argument("--output-json", type=Path, metavar="FILE", help="write all figures")
    parser.set_defaults(model_name=None, pools=None)
    add_deployment_flags(parser, has_pools=False)
    add_workload_flags(parser, has_rate=False)
    skipped = [name for name in EngineConfig.__dataclass_fields__ if name not in SIMULATED or name in _SEARCHED]
    add_flags_of(parser, EngineConfig, "engine", skip=skipped)


def run(args: argparse.Namespace) -> int:
    """Returns 1 when no options keep the promise, at any rate in the simulation, or at their best one in a real run."""
    from jaxvllm.bench.summary import Goodput
    from jaxvllm.simulator.auto_tune import Promise, all_options, heading, row, tune

    check_output(args.output_json)
    promise = Promise(Goodput.parse(args.goodput), args.attainment)
    table = read_table(args.table)
    config = chosen_config(args, table)
    count = args.disaggregate
    if count is not None and args.real_runs:
        raise ValueError(
            "--real-runs needs one pool, as pools are engines of their own: leave out --real-runs or --disaggregate"
        )
    if count is None:
        check_no_links(args, "--disaggregate N")
    pools = [None] if count is None else [None, *((prefill, count - prefill) for prefill in range(1, count))]
    devices = Devices.of_flags(args, config, table)
    if args.real_runs:
        _check_devices(config, devices.name)
    deployment = devices.deployment(config)
    workload = chosen_workload(args, deployment.max_model_len, "bench")
    seqs, tokens = deployment.max_num_seqs, deployment.max_num_batched_tokens
    options = list(
        all_options(
            args.num_seqs_list or sorted({max(seqs // part, 1) for part in (4, 2, 1)}),
            args.num_batched_tokens_list or [tokens // 2, tokens, 2 * tokens, 4 * tokens],
            pools,
        )
    )
    if not options:
        raise ValueError("a step needs a token for each request: give --num-batched-tokens-list larger numbers")
    if table is not None:
        _tell_largest(table, options)

    def simulation_of(options: "Options") -> "Simulation":
        changed = _with(config, options)
        if count is not None and options.pools is None:
            changed = replace(changed, mesh=str(replace(config.mesh_shape, data=count)))
        return devices.simulation(changed, options.pools)

    print(heading())
    found = tune(options, simulation_of, workload, promise, lambda tuned: print(row(tuned), flush=True))
    best = [tuned for tuned in found if tuned.rate > 0]
    measured: list[Summary | None] = [None] * len(found)
    if best and args.real_runs:
        print(f"\nthe best {len(best[: args.real_runs])}, simulated and on this machine\n{heading(True)}", flush=True)
        for index, tuned in enumerate(best[: args.real_runs]):
            changed = _with(config, tuned.options)
            measured[index] = _real_run(changed, workload.at_rate(tuned.rate, workload.traffic.num_prompts), promise)
            print(row(tuned, measured[index]), flush=True)
    if args.output_json is not None:
        _write(args.output_json, config, found, measured)
    if not best:
        print("no options keep these limits at any rate: allow more time, or give more devices")
        return 1
    if args.real_runs:
        pairs = zip(found, measured, strict=True)
        best = [tuned for tuned, real in pairs if real is not None and promise.is_kept(real)]
        if not best:
            print(
                "no real run kept these limits: the machine is slower than the simulation. Measure its steps again "
                "(jaxvllm bench steps), try more (--real-runs), or allow more time"
            )
            return 1
    where = "simulated and on this machine" if args.real_runs else "simulated"
    print(f"\nbest: {best[0].options}, {best[0].rate:.2f} requests per second, {where}")
    return 0


def _check_devices(config: EngineConfig, name: str) -> None:
    """Raises ValueError when the devices at hand are others than those of the simulation, before it takes its time."""
    import jax

    from jaxvllm.runtime.memory import claim_gpu_memory
    from jaxvllm.simulator.measuring import device_name
    from sharding.placement import make_mesh

    claim_gpu_memory(config.memory_utilization)  # it has no effect once JAX has looked for devices
    if name != device_name():
        raise ValueError(f"--real-runs runs on the {device_name()} at hand, and the simulation is of {name}")
    make_mesh(config.mesh_shape, jax.devices())


def _tell_largest(table: "MeasuredCost", options: "Sequence[Options]") -> None:
    num_rows, num_tokens = table.largest
    if any(one.max_num_seqs > num_rows or one.max_num_batched_tokens > num_tokens for one in options):
        print(
            f"jaxvllm bench: the table has steps of at most {num_rows} requests and {num_tokens} tokens. Larger ones "
            "take as much a token: measure them (jaxvllm bench steps --max-num-seqs N) for better figures",
            file=sys.stderr,
        )


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
