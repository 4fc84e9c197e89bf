"""`jaxvllm bench sweep`: puts several loads on a running server, one after the other."""

import argparse
import math
from pathlib import Path

from jaxvllm.cli.bench.load import add_load_flags, benchmark
from jaxvllm.cli.flags import real, whole
from jaxvllm.client.server import Server
from jaxvllm.ranges import MOST


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--request-rates", nargs="+", type=real(1e-6, math.inf), default=[], metavar="RATE", help="a point for each"
    )
    parser.add_argument(
        "--max-concurrencies", nargs="+", type=whole(1, MOST), default=[], metavar="N", help="a point for each"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", default=Path("sweep.jsonl"), help="default: %(default)s")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the sweep (needs jaxvllm[plot])")
    add_load_flags(parser)


def run(args: argparse.Namespace) -> int:
    from jaxvllm.bench.plot import check_plot, draw_sweep
    from jaxvllm.bench.sweep import heading, loads, sweep
    from jaxvllm.client.api import Api

    if args.plot is not None:
        check_plot(args.plot)
    server = Server.from_flags(args)
    with Api(server) as api:
        bench = benchmark(args, server, api)
        traffics = loads(bench.traffic, args.request_rates, args.max_concurrencies)
        print(heading())
        points = []
        for point in sweep(bench, api, traffics, args.output):
            points.append(point)
            print(point.row(), flush=True)
    if args.plot is not None:
        draw_sweep(points, f"{bench.target.model} at {server.base_url}", args.plot)
    return 1 if any(point.run.summary.failed for point in points) else 0
