"""`jaxvllm explain`: completes prompts, and tells step by step what the engine did for each of them."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxvllm.cli.flags import add_flags, given
from jaxvllm.cli.parser import ENGINE_EPILOG, Parser
from jaxvllm.config import LORA_FIELDS, EngineConfig
from jaxvllm.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxvllm.engine.llm import LLM

# A page of text in a terminal: every token of the answer has a place in the report.
DEFAULTS = {"max_tokens": 32}
_HIDDEN_SAMPLING = ("output_kind", "detokenize", "spaces_between_special_tokens", "flat_logprobs", "skip_clone")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report and returns the exit code: 0, or 2 with a line on standard error for a wrong option."""
    args = _parser().parse_intermixed_args(argv)  # options may stand between prompts
    try:
        config = EngineConfig.from_options(**given(args, EngineConfig))
        chosen = given(args, SamplingParams) | _form(args)
        SamplingParams(**chosen)  # reports a mistake before the model is loaded
        if config.has_others and _follows(config):
            return 0
        if not args.prompts:
            raise ValueError("there is no prompt: give one, or several to see how they share the engine")
        return _run(args, config, DEFAULTS | chosen)
    except BrokenPipeError:
        raise
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"jaxvllm explain: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jaxvllm explain",
        usage="%(prog)s PROMPT ... [OPTION ...]",
        description="Complete prompts in one continuous batch, and tell what every step of the engine did for each of "
        "them: tokens, pages, chunks, queries, candidates, drafts, masks. Without --model, the embedded model is used.",
        epilog=ENGINE_EPILOG,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to complete")
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="each prompt is a user's message, not a text to continue (default: if the model has a chat template)",
    )
    parser.add_argument("--html", metavar="FILE", help="also draw the report as one HTML file, which loads nothing")
    parser.add_argument("--json", metavar="FILE", help="also write the report as JSON, for programs")
    parser.add_argument(
        "--structured-outputs",
        metavar="JSON",
        dest="form",
        help="""the form that the texts must have, such as '{"regex": "[0-9]+"}' or '{"choice": ["yes", "no"]}'""",
    )
    parser.add_argument(
        "--no-candidates",
        action="store_true",
        help="ask for no log-probabilities, which rule out that a grammar forces several tokens at once",
    )
    title = "sampling (the model's generation_config.json overrides these defaults)"
    add_flags(parser, SamplingParams, title, _HIDDEN_SAMPLING, DEFAULTS)
    # --seed seeds both, and prompts have no adapters.
    add_flags(parser, EngineConfig, "engine", skip=("seed", *LORA_FIELDS))
    return parser


def _form(args: argparse.Namespace) -> dict[str, Any]:
    if args.form is None:
        return {}
    try:
        return {"structured_outputs": json.loads(args.form)}
    except ValueError as error:
        raise ValueError(f"--structured-outputs {args.form} is not valid JSON: {error}") from None


def _follows(config: EngineConfig) -> bool:
    """Computes for process 0 until that is done. Returns False at once in process 0, which takes the prompts."""
    from jaxvllm.engine.multihost import follow_config

    return follow_config(config)


def _run(args: argparse.Namespace, config: EngineConfig, chosen: dict[str, Any]) -> int:
    from rich.console import Console

    from jaxvllm.engine.llm import LLM
    from jaxvllm.explainer.report import CANDIDATES, explain

    with LLM.from_config(config) as llm:
        params = replace(llm.get_default_sampling_params(), **chosen)
        prompts = args.prompts
        if is_chat := _has_template(llm) if args.chat is None else args.chat:
            render = llm.get_tokenizer().apply_chat_template
            prompts = [render([{"role": "user", "content": prompt}]) for prompt in prompts]
        candidates = None if args.no_candidates else CANDIDATES
        report = explain(llm, prompts, params, candidates=candidates, add_special_tokens=not is_chat)
        note = _note(llm)
    for name, data in ((args.html, report.html.encode), (args.json, report.to_json)):
        if name is not None:
            Path(name).write_bytes(data())
    report.print(Console()) if sys.stdout.isatty() else print(report)
    if note is not None:
        print(note)
    return 0


def _has_template(llm: "LLM") -> bool:
    tokenizer = llm.engine.tokenizer
    return tokenizer is not None and tokenizer.chat_template.source_with_tools is not None


def _note(llm: "LLM") -> str | None:
    """Returns what a reader should know about the buckets of an engine that has just started."""
    programs = [holder.programs for holder in llm.engine.holders]
    missing, whole = sum(one.num_missing for one in programs), sum(len(one.ladder.buckets) for one in programs)
    if not missing:
        return None
    made = f"{whole - missing} of {whole} programs were compiled"
    return f"At the end {made}, so buckets were larger than need be: see --warm-up."
