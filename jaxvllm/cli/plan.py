"""`jaxvllm plan`: computes what a model needs on devices that need not be here."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from jaxvllm.cli.flags import add_flags, given, whole, with_model
from jaxvllm.cli.parser import ENGINE_EPILOG, Parser
from jaxvllm.config import EngineConfig
from jaxvllm.core.value_checks import MAX_INT32
from jaxvllm.model_name import local_gguf
from pallas_kernels.chips import CHIPS

REQUEST_TOKENS = 4096
CONTEXT = 2048
# The fields of EngineConfig that change what is compiled or how much memory it may take.
_PLANNED = (
    "model",
    "mesh",
    "dtype",
    "kv_cache_dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "page_size",
    "memory_utilization",
    "quantization",
    "enable_expert_parallel",
    "all2all_backend",
    "enable_eplb",
    "eplb_config",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the plan and returns the exit code: 0 if the model fits, 1 if it does not fit or compile, else 2."""
    args = _parser().parse_args(argv)
    try:
        return _run(args)
    except BrokenPipeError:
        raise
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"jaxvllm plan: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jaxvllm plan",
        usage="%(prog)s [MODEL] --device DEVICE [OPTION ...]",
        description="Compile the real step for devices that are not here, and say whether the model fits, how much KV "
        "it leaves, what the devices send each other, and how fast a step could be at best. MODEL may also be a "
        "config.json, a GGUF file or DIR:Q4_K_M, which counts as an engine would keep it, or the name of a well-known "
        "model, such as Llama-3.1-8B; no weights are read, and nothing is downloaded.",
        epilog=ENGINE_EPILOG,
    )
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--device", required=True, help=f"{', '.join(CHIPS)} or cpu")
    parser.add_argument(
        "--request-tokens",
        type=whole(1, MAX_INT32),
        metavar="N",
        help=f"length of a request (default: {REQUEST_TOKENS}, or all that the model takes)",
    )
    parser.add_argument(
        "--context",
        type=whole(1, MAX_INT32),
        metavar="N",
        help=f"tokens that a decoding request attends to (default: {CONTEXT}, or the same)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; memory in bytes, times in seconds")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the memory of each device, by part")
    skipped = [name for name in EngineConfig.__dataclass_fields__ if name not in _PLANNED]
    add_flags(parser, EngineConfig, "engine", skip=skipped)
    return parser


def _run(args: argparse.Namespace) -> int:
    config = EngineConfig.from_options(**with_model(given(args, EngineConfig), args.model_name))
    # Imported only now, because jax takes a second to import.
    from jaxvllm.planner.capacity_plan import Question, make_plan
    from jaxvllm.planner.compiler import Refusal
    from jaxvllm.planner.deployment import Deployment
    from jaxvllm.planner.known_models import find_config
    from jaxvllm.planner.report import report

    if args.plot:
        from jaxvllm.planner.plot import check_plot

        check_plot(args.plot)
    name, hf_config = find_config(config.model)
    deployment = Deployment.of_config(config, hf_config, args.device, local_gguf(config.model))
    tokens = _tokens("request-tokens", args.request_tokens, REQUEST_TOKENS, deployment.max_model_len)
    context = _tokens("context", args.context, CONTEXT, deployment.max_model_len)
    plan = make_plan(Question(name, deployment, config.memory_utilization, tokens, context))
    if isinstance(plan, Refusal):
        print(f"jaxvllm plan: {plan.message}", file=sys.stderr)
        return 2 if plan.kind == "usage" else 1
    print(json.dumps(asdict(plan)) if args.json else report(plan))
    if args.plot:
        from jaxvllm.planner.plot import draw_memory

        draw_memory(plan, args.plot)
    if not plan.fits:
        print(f"jaxvllm plan: {plan.model} does not fit on {plan.mesh} {plan.device}: {plan.advice}", file=sys.stderr)
        return 1
    return 0


def _tokens(flag: str, given: int | None, default: int, most: int) -> int:
    if given is not None and not 0 < given <= most:
        raise ValueError(f"--{flag} must be between 1 and the {most} tokens that the model serves, not {given}")
    return given or min(default, most)
