"""`jaxvllm bench throughput`: completes many requests in this process, like `vllm bench throughput`."""

import argparse
from contextlib import nullcontext
from typing import Any

from jaxvllm.cli.bench.data import add_data_flags, chosen_dataset, fit_to_model
from jaxvllm.cli.bench.latency import ENGINE_DEFAULTS, add_output_flags
from jaxvllm.cli.bench.result import check_output, tell
from jaxvllm.cli.flags import add_flags as add_flags_of
from jaxvllm.cli.flags import given, whole
from jaxvllm.cli.parser import ENGINE_EPILOG
from jaxvllm.config import EngineConfig
from jaxvllm.core.value_checks import MAX_INT32


def add_flags(parser: argparse.ArgumentParser) -> None:
    from jaxvllm.bench.offline.throughput import ThroughputOptions

    parser.epilog = ENGINE_EPILOG
    add_flags_of(parser, ThroughputOptions, "benchmark")
    add_output_flags(parser, "trace the run, which makes it slower, into this directory")
    add_data_flags(parser)
    lengths = parser.add_argument_group("data: short names")
    lengths.add_argument("--input-len", type=whole(0, MAX_INT32), metavar="N", help="the same as --random-input-len")
    lengths.add_argument(
        "--output-len", type=whole(1, MAX_INT32), metavar="N", help="tokens of an answer, for any data set"
    )
    add_flags_of(parser, EngineConfig, "engine", defaults=ENGINE_DEFAULTS)


def run(args: argparse.Namespace) -> int:
    import numpy as np

    from jaxvllm.bench.offline.throughput import EngineTokens, ThroughputOptions, measure_throughput
    from jaxvllm.bench.offline.trace import traced
    from jaxvllm.bench.vocabulary import Vocabulary
    from jaxvllm.engine.llm import LLM
    from jaxvllm.engine.multihost import follow_config

    options = ThroughputOptions(**given(args, ThroughputOptions))
    config = EngineConfig.from_options(**(ENGINE_DEFAULTS | given(args, EngineConfig)))
    for name, value in _lengths(args).items():
        setattr(args, name, value)
    dataset, chosen = chosen_dataset(args)
    check_output(args.output_json)
    if config.has_others and follow_config(config):
        return 0
    with LLM.from_config(config) as llm:
        most = llm.engine.max_model_len
        dataset = fit_to_model(dataset, chosen, most, room=most)
        vocabulary = Vocabulary(EngineTokens(llm), args.random_vocab_size or llm.engine.vocab_size, sends_text=False)
        rng = np.random.default_rng(config.seed)
        samples = dataset.sample(options.num_prompts, vocabulary, args.dataset_path, rng)
        with nullcontext() if args.profile is None else traced(args.profile):
            result = measure_throughput(llm, samples, options, not args.disable_tqdm)
        tell(result, config.model, args.output_json)
    return 0


def _lengths(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what the short names stand for. Raises ValueError for a data set that has no such length."""
    lengths = {}
    if args.output_len is not None:
        lengths[f"{args.dataset_name}_output_len"] = args.output_len
    if args.input_len is not None:
        if args.dataset_name != "random":
            raise ValueError(f"--input-len {args.input_len} is for random prompts, not for {args.dataset_name}")
        lengths["random_input_len"] = args.input_len
    return lengths
