"""`jaxvllm bench ladder`: the same requests through the ideas of LLM serving, one on top of the other."""

import argparse
import json
import sys
from pathlib import Path

from jaxvllm.cli.bench.result import check_output
from jaxvllm.cli.flags import add_flags as add_flags_of
from jaxvllm.cli.flags import given


def add_flags(parser: argparse.ArgumentParser) -> None:
    from jaxvllm.bench.ladder.measure import LadderOptions
    from jaxvllm.bench.ladder.rung import RUNGS

    add_flags_of(parser, LadderOptions, "benchmark")
    names = ",".join(rung.name for rung in RUNGS)
    parser.add_argument("--rungs", default="", metavar="NAMES", help=f"some of {names} (default: all)")
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="draw the ladder (needs matplotlib)")
    parser.add_argument("--output-json", "--json", type=Path, metavar="FILE", help="write the figures and their origin")


def run(args: argparse.Namespace) -> int:
    from jaxvllm.bench.ladder import report
    from jaxvllm.bench.ladder.measure import DifferentTokens, LadderOptions, measure_ladder
    from jaxvllm.bench.ladder.plot import check_plot, draw_ladder
    from jaxvllm.bench.ladder.rung import Sizes, chosen_rungs
    from jaxvllm.bench.offline.origin import origin

    options = LadderOptions(**given(args, LadderOptions))
    rungs = chosen_rungs([name for name in args.rungs.split(",") if name])
    check_output(args.output_json)
    if args.output is not None:
        check_plot(args.output)
    try:
        ladder = measure_ladder(rungs, options, Sizes(), lambda line: print(line, file=sys.stderr, flush=True))
    except DifferentTokens as error:
        print(f"jaxvllm bench: {error}", file=sys.stderr)
        return 1
    print("\n".join(report.lines(ladder)))
    if args.output_json is not None:
        args.output_json.write_text(json.dumps(origin() | report.record(ladder), indent=1) + "\n", encoding="utf-8")
    if args.output is not None:
        draw_ladder(ladder, args.output)
        print(f"drawn in {args.output}")
    return 0
