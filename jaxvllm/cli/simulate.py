"""`jaxvllm simulate`: tells in virtual time how a deployment would answer a load, on devices that need not be here."""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxvllm.cli.exit_code import exit_code
from jaxvllm.cli.flags import add_flags, given, with_model
from jaxvllm.cli.parser import ENGINE_EPILOG, Parser
from jaxvllm.config import EngineConfig

if TYPE_CHECKING:
    from jaxvllm.simulator.measured_cost import MeasuredCost
    from jaxvllm.simulator.simulation import Simulation
    from jaxvllm.simulator.workload import Workload

# The fields of EngineConfig that change plans, pages or the time of a step.
SIMULATED = (
    "model",
    "mesh",
    "dtype",
    "kv_cache_dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "page_size",
    "num_pages",
    "memory_utilization",
    "enable_prefix_caching",
    "scheduler",
    "row_buckets",
    "token_buckets",
    "max_decode_burst",
)
LOADS = ("random", "prefix_repetition", "conversations", "trace")
_POOLS = re.compile(r"([1-9]\d*)\+([1-9]\d*)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the simulation and returns the exit code: 0, or 2 for a wrong option."""
    args = _parser().parse_args(argv)
    return exit_code("simulate", lambda: _run(args))


def _parser() -> argparse.ArgumentParser:
    from jaxvllm.cli.bench.figures import add_figure_flags

    parser = Parser(
        prog="jaxvllm simulate",
        usage="%(prog)s [MODEL] (--device DEVICE | --table FILE) [OPTION ...]",
        description="Run the real scheduler and router in virtual time, with steps that take as long as the planner's "
        "roofline or a measured table says. MODEL may also be a config.json or the name of a well-known model, such "
        "as Llama-3.1-8B; nothing is downloaded.",
        epilog=ENGINE_EPILOG,
    )
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="the same as --model")
    add_deployment_flags(parser)
    add_workload_flags(parser)
    add_figure_flags(parser, "ttft,tpot,itl,e2el", "50,90,99")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with the keys of bench serve")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw KV pages, requests and TTFT over time")
    skipped = [name for name in EngineConfig.__dataclass_fields__ if name not in SIMULATED]
    add_flags(parser, EngineConfig, "engine", skip=skipped)
    return parser


def add_deployment_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say which devices there are, how quick they are, and how they are divided."""
    group = parser.add_argument_group("devices")
    group.add_argument(
        "--device", help="v5e, v5p, v6e, v7x, h100, h200, b200, a100, l4 or cpu (default: that of --table)"
    )
    group.add_argument("--table", type=Path, metavar="FILE.json", help="step times that bench steps wrote")
    group.add_argument(
        "--efficiency", type=float, metavar="SHARE", help="share of the chip's published rates (default: 1, a floor)"
    )
    group.add_argument("--host-ms", type=float, metavar="MS", help="time of the host for each step, in milliseconds")
    group.add_argument(
        "--pools", metavar="P+D", help="replicas that only compute prompts + replicas that only decode, such as 2+6"
    )
    group.add_argument(
        "--kv-bandwidth", type=float, metavar="GB/S", help="that a replica sends from pool to pool (default: 25)"
    )
    group.add_argument("--kv-latency-ms", type=float, metavar="MS", help="that a transfer takes beside (default: 1)")


def add_workload_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of every load."""
    from jaxvllm.bench.samples import PrefixRepetition, Random
    from jaxvllm.bench.traffic import Traffic
    from jaxvllm.simulator.workload import Conversations

    group = parser.add_argument_group("load")
    group.add_argument("--load", choices=LOADS, default="random", help="default: %(default)s, or trace with --trace")
    group.add_argument("--trace", type=Path, metavar="FILE", help="a .jsonl of Mooncake's, or a .csv of BurstGPT's")
    group.add_argument("--load-seed", type=int, default=0, metavar="N", help="seed of the load (default: %(default)s)")
    add_flags(parser, Traffic, "load: arrivals", skip=("max_concurrency",))
    add_flags(parser, Random, "load: random")
    add_flags(parser, PrefixRepetition, "load: prefix_repetition")
    add_flags(parser, Conversations, "load: conversations")


def chosen_workload(args: argparse.Namespace) -> "Workload":
    """Returns the load that the flags describe. Raises ValueError when they contradict each other."""
    from jaxvllm.bench.samples import PrefixRepetition, Random
    from jaxvllm.bench.traffic import Traffic
    from jaxvllm.simulator.trace import TraceWorkload
    from jaxvllm.simulator.workload import Conversations, ConversationWorkload, PrefixWorkload, RandomWorkload

    if args.trace is not None:
        wanted = given(args, Traffic)
        return TraceWorkload(args.trace, wanted.get("num_prompts"), wanted.get("request_rate"))
    traffic = Traffic(**given(args, Traffic))
    match args.load:
        case "trace":
            raise ValueError("--load trace reads a file: give --trace")
        case "prefix_repetition":
            return PrefixWorkload(traffic, PrefixRepetition(**given(args, PrefixRepetition)), args.load_seed)
        case "conversations":
            return ConversationWorkload(traffic, Conversations(**given(args, Conversations)), args.load_seed)
    return RandomWorkload(traffic, Random(**given(args, Random)), args.load_seed)


def chosen_config(args: argparse.Namespace, table: "MeasuredCost | None") -> EngineConfig:
    """Returns the engine's options. A table knows its model."""
    options = with_model(given(args, EngineConfig), args.model_name)
    if table is not None and table.model:
        options = {"model": table.model} | options
    return EngineConfig.from_options(**options)


def chosen_simulation(args: argparse.Namespace, config: EngineConfig, table: "MeasuredCost | None") -> "Simulation":
    """Returns the deployment that the flags describe. Raises ValueError when it is impossible."""
    from jaxvllm.planner.deployment import Deployment
    from jaxvllm.planner.known_models import find_config
    from jaxvllm.simulator.engine_setup import EngineSetup
    from jaxvllm.simulator.roofline_cost import RooflineCost
    from jaxvllm.simulator.simulation import Pool, Simulation
    from jaxvllm.simulator.step_cost import StepCost
    from jaxvllm.simulator.transfer import Transfer

    device = args.device or (table.device if table is not None else None)
    if device is None:
        raise ValueError("say how quick the devices are: give --device, such as h100, or --table")
    _, hf_config = find_config(config.model)
    deployment = Deployment.of_config(config, hf_config, device)
    setup = EngineSetup.of_deployment(config, deployment)
    cost: StepCost
    if table is not None:
        if args.efficiency is not None or args.host_ms is not None:
            raise ValueError("--table has measured times: leave out --efficiency and --host-ms")
        cost = table
    else:
        cost = RooflineCost.of(deployment, 1.0 if args.efficiency is None else args.efficiency)
        if args.host_ms is not None:
            cost = cost.with_host(args.host_ms / 1000)
    links: dict[str, Any] = {}
    if args.kv_bandwidth is not None:
        links["bandwidth"] = args.kv_bandwidth * 1e9
    if args.kv_latency_ms is not None:
        links["latency"] = args.kv_latency_ms / 1000
    if args.pools is None:
        if links:
            raise ValueError("--kv-bandwidth and --kv-latency-ms are of --pools P+D, which is not given")
        return Simulation(Pool(setup, cost))
    pools = _POOLS.fullmatch(args.pools)
    if pools is None:
        raise ValueError(f"--pools must be P+D, such as 2+6, not {args.pools}")
    if deployment.replicas > 1:
        raise ValueError(f"--pools says how many replicas there are: use --mesh 1x{deployment.size}")
    transfer = Transfer(deployment.token_bytes, **links)
    prefill, decode = (Pool(replace(setup, num_replicas=int(count)), cost) for count in pools.groups())
    return Simulation(prefill, decode, transfer)


def read_table(path: Path | None) -> "MeasuredCost | None":
    from jaxvllm.simulator.measured_cost import MeasuredCost

    return None if path is None else MeasuredCost.read(path)


def _run(args: argparse.Namespace) -> int:
    from jaxvllm.cli.bench.figures import Figures
    from jaxvllm.simulator.report import pools_table

    if args.plot is not None:
        from jaxvllm.bench.plot import check_plot

        check_plot(args.plot)
    figures = Figures.of_flags(args)
    workload = chosen_workload(args)
    table = read_table(args.table)
    config = chosen_config(args, table)
    result = chosen_simulation(args, config, table).run(workload)
    run = result.run(figures.names, figures.percentiles, figures.goodput)
    if args.json:
        pools = {pool.name: pool.record() for pool in result.pools}
        print(json.dumps({"model_id": config.model, **run.figures(), "pools": pools}))
    else:
        print(run.table(), pools_table(result), sep="\n")
    if args.plot is not None:
        from jaxvllm.simulator.plot import draw_simulation

        draw_simulation(result, f"{config.model}, {workload.traffic.request_rate:g} requests/s", args.plot)
    return 0
