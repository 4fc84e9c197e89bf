"""`jaxvllm bench startup`: times starts of an engine without and with compiled programs, like `vllm bench startup`."""

import argparse
from pathlib import Path

from jaxvllm.cli.bench.result import check_output, tell
from jaxvllm.cli.flags import add_flags as add_flags_of
from jaxvllm.cli.flags import given
from jaxvllm.cli.parser import ENGINE_EPILOG
from jaxvllm.config import EngineConfig

# Every start has a cache of its own, or that of the starts before it.
HIDDEN = ("compilation_cache",)


def add_flags(parser: argparse.ArgumentParser) -> None:
    from jaxvllm.bench.offline.startup import StartupOptions

    parser.epilog = ENGINE_EPILOG
    add_flags_of(parser, StartupOptions, "benchmark")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the figures and their origin")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    add_flags_of(parser, EngineConfig, "engine", skip=HIDDEN)


def run(args: argparse.Namespace) -> int:
    from jaxvllm.bench.offline.startup import StartupOptions, measure_startups

    options, engine = StartupOptions(**given(args, StartupOptions)), given(args, EngineConfig)
    config = EngineConfig.from_options(**engine)  # reports a mistake before a process starts
    check_output(args.output_json)
    tell(measure_startups(options, engine, not args.disable_tqdm), config.model, args.output_json)
    return 0
