"""`jaxvllm simulate`: tells in virtual time how a deployment would answer a load, on devices that need not be here."""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from jaxvllm.cli.bench.data import fit_to_model
from jaxvllm.cli.exit_code import exit_code
from jaxvllm.cli.flags import add_flags, given, real, seed_number, with_model
from jaxvllm.cli.parser import ENGINE_EPILOG, Parser
from jaxvllm.config import EngineConfig
from jaxvllm.model_name import local_gguf
from pallas_kernels.chips import CHIPS

if TYPE_CHECKING:
    from jaxvllm.planner.deployment import Deployment
    from jaxvllm.simulator.measured_cost import MeasuredCost
    from jaxvllm.simulator.roofline_cost import RooflineCost
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
LOADS = ("random", "prefix_repetition", "conversations")
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


def add_deployment_flags(parser: argparse.ArgumentParser, has_pools: bool = True) -> None:
    """Adds the flags that say which devices there are, how quick they are, and how they are divided into pools."""
    group = parser.add_argument_group("devices")
    group.add_argument("--device", help=f"{', '.join(CHIPS)} or cpu (default: that of --table)")
    group.add_argument("--table", type=Path, metavar="FILE.json", help="step times that bench steps wrote")
    group.add_argument(
        "--efficiency",
        type=real(0.001, 1),
        metavar="SHARE",
        help="share of the chip's published rates (default: 1, a floor)",
    )
    group.add_argument(
        "--host-ms", type=real(0, 1e6), metavar="MS", help="time of the host for each step, in milliseconds"
    )
    if has_pools:
        group.add_argument(
            "--pools", metavar="P+D", help="replicas that only compute prompts + replicas that only decode, such as 2+6"
        )
    group.add_argument(
        "--kv-bandwidth",
        type=real(0.001, 1e6),
        metavar="GB/S",
        help="that a replica sends from pool to pool (default: 25)",
    )
    group.add_argument(
        "--kv-latency-ms", type=real(0, 1e6), metavar="MS", help="that a transfer takes beside (default: 1)"
    )


def add_workload_flags(parser: argparse.ArgumentParser, has_rate: bool = True) -> None:
    """Adds the flags of every load, with the rate of its arrivals unless a search finds it."""
    from jaxvllm.bench.samples import PrefixRepetition, Random
    from jaxvllm.bench.traffic import Traffic
    from jaxvllm.simulator.workload import Conversations

    group = parser.add_argument_group("load")
    group.add_argument("--load", choices=LOADS, default="random", help="default: %(default)s")
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="a recorded load: .jsonl (Mooncake) or .csv (BurstGPT, Azure)"
    )
    group.add_argument(
        "--load-seed", type=seed_number, default=0, metavar="N", help="seed of the load (default: %(default)s)"
    )
    add_flags(parser, Traffic, "load: arrivals", skip=("max_concurrency", *(() if has_rate else ("request_rate",))))
    add_flags(parser, Random, "load: random")
    add_flags(parser, PrefixRepetition, "load: prefix_repetition")
    add_flags(parser, Conversations, "load: conversations")


def chosen_workload(args: argparse.Namespace, most: int, command: str) -> "Workload":
    """Returns the load that the flags describe. The lengths that are not given shrink to a model of `most` tokens.

    Raises ValueError when the flags contradict each other, or give lengths that do not fit.
    """
    from jaxvllm.bench.samples import PrefixRepetition, Random
    from jaxvllm.bench.traffic import Traffic
    from jaxvllm.simulator.trace import TraceWorkload
    from jaxvllm.simulator.workload import Conversations, ConversationWorkload, PrefixWorkload, RandomWorkload

    if args.trace is not None:
        wanted = given(args, Traffic)
        return TraceWorkload(args.trace, wanted.get("num_prompts"), wanted.get("request_rate"))
    traffic = Traffic(**given(args, Traffic))
    match args.load:
        case "prefix_repetition":
            chosen = given(args, PrefixRepetition)
            prefixes: Any = fit_to_model(PrefixRepetition(**chosen), chosen, most, most, command)
            return PrefixWorkload(traffic, prefixes, args.load_seed)
        case "conversations":
            return ConversationWorkload(traffic, Conversations(**given(args, Conversations)), args.load_seed)
    chosen = given(args, Random)
    lengths: Any = fit_to_model(Random(**chosen), chosen, most, most, command)
    return RandomWorkload(traffic, lengths, args.load_seed)


def chosen_config(args: argparse.Namespace, table: "MeasuredCost | None") -> EngineConfig:
    """Returns the engine's options. A table knows its model. Raises ValueError for another one."""
    options = with_model(given(args, EngineConfig), args.model_name)
    if table is not None and table.model and options.setdefault("model", table.model) != table.model:
        raise ValueError(
            f"--table {args.table} has the step times of {table.model}, not of {options['model']}: leave out the "
            f"model, or measure that one: jaxvllm bench steps --model {options['model']} --output-json FILE.json"
        )
    return EngineConfig.from_options(**options)


@dataclass(frozen=True)
class Devices:
    """The devices of the flags: where steps take how long, and how pools reach each other."""

    name: str
    hf_config: dict[str, Any]
    gguf: Path | None  # the file of which that was made
    table: "MeasuredCost | None"
    efficiency: float
    host_seconds: float | None  # of a step; None: what was measured without a device
    links: dict[str, float]  # fields of a `Transfer` that are given

    @classmethod
    def of_flags(cls, args: argparse.Namespace, config: EngineConfig, table: "MeasuredCost | None") -> Self:
        """Raises ValueError when the flags contradict each other."""
        from jaxvllm.planner.known_models import find_config

        name = args.device or (table.device if table is not None else None)
        if name is None:
            raise ValueError("say how quick the devices are: give --device, such as h100, or --table")
        if table is not None and (args.efficiency is not None or args.host_ms is not None):
            raise ValueError("--table has measured times: leave out --efficiency and --host-ms")
        links = {"bandwidth": args.kv_bandwidth, "latency": args.kv_latency_ms}
        scales = {"bandwidth": 1e9, "latency": 1e-3}
        _, hf_config = find_config(config.model)
        return cls(
            name,
            hf_config,
            local_gguf(config.model),
            table,
            1.0 if args.efficiency is None else args.efficiency,
            None if args.host_ms is None else args.host_ms / 1000,
            {field: value * scales[field] for field, value in links.items() if value is not None},
        )

    def deployment(self, config: EngineConfig) -> "Deployment":
        """Returns the model on these devices, with the limits that the engine would choose, or that the config says."""
        from jaxvllm.planner.deployment import Deployment

        return Deployment.of_config(config, self.hf_config, self.name, self.gguf)

    def simulation(self, config: EngineConfig, pools: tuple[int, int] | None) -> "Simulation":
        """Returns the deployment with these options. Raises ValueError when it is impossible."""
        from jaxvllm.simulator.engine_setup import EngineSetup
        from jaxvllm.simulator.simulation import ReplicaPool, Simulation
        from jaxvllm.simulator.transfer import Transfer

        deployment = self.deployment(config)
        if deployment.stages > 1:
            raise NotImplementedError(f"mesh {config.mesh} has stages, which are not simulated: use a mesh of DxM")
        setup = EngineSetup.of_deployment(config, deployment)
        cost = self._cost(deployment) if self.table is None else self.table
        if pools is None:
            return Simulation(ReplicaPool(setup, cost))
        if deployment.replicas > 1:
            raise ValueError(f"pools say how many replicas there are: use --mesh 1x{deployment.size}")
        prefill, decode = (ReplicaPool(replace(setup, num_replicas=count), cost) for count in pools)
        return Simulation(prefill, decode, Transfer(deployment.token_bytes, **self.links))

    def _cost(self, deployment: "Deployment") -> "RooflineCost":
        from jaxvllm.simulator.roofline_cost import RooflineCost

        cost = RooflineCost.of(deployment, self.efficiency)
        return cost if self.host_seconds is None else cost.with_host(self.host_seconds)


def _pools(args: argparse.Namespace) -> tuple[int, int] | None:
    if args.pools is None:
        check_no_links(args, "--pools P+D")
        return None
    pools = _POOLS.fullmatch(args.pools)
    if pools is None:
        raise ValueError(f"--pools must be P+D, such as 2+6, not {args.pools}")
    return int(pools[1]), int(pools[2])


def check_no_links(args: argparse.Namespace, pools: str) -> None:
    """Raises ValueError for flags of what is between pools. `pools` is the flag that would make some."""
    if args.kv_bandwidth is not None or args.kv_latency_ms is not None:
        raise ValueError(f"--kv-bandwidth and --kv-latency-ms are of {pools}, which is not given")


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
    table = read_table(args.table)
    config = chosen_config(args, table)
    devices = Devices.of_flags(args, config, table)
    workload = chosen_workload(args, devices.deployment(config).max_model_len, "simulate")
    result = devices.simulation(config, _pools(args)).run(workload)
    result.check_served()
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
