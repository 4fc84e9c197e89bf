"""`jaxvllm bench latency`: times one batch of requests in this process, like `vllm bench latency`."""

import argparse
from functools import partial
from pathlib import Path

from jaxvllm.cli.bench.result import check_output, tell
from jaxvllm.cli.flags import add_flags as add_flags_of
from jaxvllm.cli.flags import given
from jaxvllm.cli.parser import ENGINE_EPILOG
from jaxvllm.config import EngineConfig

# The same prompts come again and again, so a prefix cache would answer for the engine. vLLM turns it off here, too.
ENGINE_DEFAULTS = {"enable_prefix_caching": False}


def add_flags(parser: argparse.ArgumentParser) -> None:
    from jaxvllm.bench.offline.latency import LatencyOptions

    parser.epilog = ENGINE_EPILOG
    add_flags_of(parser, LatencyOptions, "benchmark")
    add_output_flags(parser, "trace one run, which is not timed, into this directory")
    add_flags_of(parser, EngineConfig, "engine", defaults=ENGINE_DEFAULTS)


def add_output_flags(parser: argparse.ArgumentParser, what_profile_does: str) -> None:
    """Adds the flags that `bench throughput` has, too."""
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the figures and their origin")
    parser.add_argument("--profile", type=Path, metavar="DIR", help=f"{what_profile_does} (for xprof or Perfetto)")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    from jaxvllm.bench.offline.latency import LatencyBenchmark, LatencyOptions
    from jaxvllm.bench.offline.trace import traced
    from jaxvllm.engine.llm import LLM
    from jaxvllm.engine.multihost import follow_config

    options = LatencyOptions(**given(args, LatencyOptions))
    config = EngineConfig.from_options(**(ENGINE_DEFAULTS | given(args, EngineConfig)))
    check_output(args.output_json)
    if config.has_others and follow_config(config):
        return 0
    with LLM.from_config(config) as llm:
        benchmark = LatencyBenchmark(llm, options, config.seed, not args.disable_tqdm)
        if args.profile is not None:
            benchmark.profile(partial(traced, args.profile))
            return 0
        tell(benchmark.run(), config.model, args.output_json)
    return 0
