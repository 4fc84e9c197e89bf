"""`jaxvllm bench kernels`: checks attention on this device, then times it beside what the device does at best."""

import argparse
import json
from pathlib import Path

from jaxvllm.cli.bench.result import check_output
from jaxvllm.cli.flags import add_flags as add_flags_of
from jaxvllm.cli.flags import given


def add_flags(parser: argparse.ArgumentParser) -> None:
    from jaxvllm.bench.kernels.measure import KernelOptions

    add_flags_of(parser, KernelOptions, "benchmark")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the figures after each case")


def run(args: argparse.Namespace) -> int:
    """Returns 1 when a case is wrong or did not run."""
    from jaxvllm.bench.kernels.measure import KernelBenchmark, KernelOptions
    from jaxvllm.bench.offline.origin import origin

    options = KernelOptions(**given(args, KernelOptions))
    check_output(args.output_json)
    benchmark = KernelBenchmark(options)
    print(benchmark.heading())
    results = []
    for result in benchmark.run():
        results.append(result)
        print(result.line(), flush=True)
        if args.output_json is not None:
            record = origin() | benchmark.record(results)
            args.output_json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if left := benchmark.record(results)["cases_not_measured"]:
        print(f"{options.minutes:g} minutes are over: {len(left)} cases are not measured")
    return 1 if any(next(iter(result.outcomes.values())).timing is None for result in results) else 0
