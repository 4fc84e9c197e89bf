"""`jaxvllm generate`: completes prompts with the same engine that serves."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxvllm.cli.flags import add_flags, given
from jaxvllm.cli.parser import ENGINE_EPILOG, Parser
from jaxvllm.config import LORA_FIELDS, EngineConfig
from jaxvllm.core.sampling_params import RequestOutputKind, SamplingParams
from jaxvllm.engine.startup import seconds_since_process_start, uncollected

if TYPE_CHECKING:
    from jaxvllm.core.request import GenerationRequest
    from jaxvllm.engine.engine import Engine
    from jaxvllm.engine.outputs import RequestOutput

# vLLM's default of 16 tokens is enough to test an API, but not for a person who reads the text.
DEFAULTS = {"max_tokens": 128}
_HIDDEN_SAMPLING = ("output_kind", "detokenize", "spaces_between_special_tokens", "flat_logprobs", "skip_clone")


def main(argv: Sequence[str] | None = None) -> int:
    """Completes the prompts and returns the exit code: 0, or 2 with a line on standard error for a wrong option."""
    parser = _parser()
    args = parser.parse_intermixed_args(argv)  # options may stand between prompts
    try:
        config = EngineConfig.from_options(**given(args, EngineConfig))
        chosen = given(args, SamplingParams)
        SamplingParams(**chosen)  # reports a mistake before the model is loaded
        if config.has_others and _follows(config):
            return 0
        prompts = _prompts(args)
        return _run(args, prompts, config, DEFAULTS | chosen)
    except BrokenPipeError:
        raise
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"jaxvllm generate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jaxvllm generate",
        usage="%(prog)s PROMPT ... [OPTION ...]",
        description="Complete prompts in one continuous batch. Without --model, the embedded model is used.",
        epilog=ENGINE_EPILOG,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to complete")
    parser.add_argument("--prompts-file", metavar="FILE", help="a file with a prompt in each line; - is standard input")
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message: use the chat template")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each request, and one of totals")
    parser.add_argument("--show-batch", action="store_true", help="draw which request was in which step")
    title = "sampling (the model's generation_config.json overrides these defaults)"
    add_flags(parser, SamplingParams, title, _HIDDEN_SAMPLING, DEFAULTS)
    # --seed seeds both, and prompts have no adapters.
    add_flags(parser, EngineConfig, "engine", skip=("seed", *LORA_FIELDS))
    return parser


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompts)
    if args.prompts_file == "-":
        prompts += [line.rstrip("\n") for line in sys.stdin if line.strip()]
    elif args.prompts_file is not None:
        prompts += [line for line in Path(args.prompts_file).read_text(encoding="utf-8").split("\n") if line.strip()]
    if not prompts:
        raise ValueError("there is no prompt: give some, or --prompts-file")
    return prompts


def _follows(config: EngineConfig) -> bool:
    """Computes for process 0 until that is done. Returns False at once in process 0, which takes the prompts."""
    from jaxvllm.engine.multihost import follow_config

    return follow_config(config)


@dataclass(frozen=True)
class Totals:
    """The totals that the last line prints."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    seconds: float
    first_token_seconds: float  # time of the first token since the first request was submitted
    since_process_start: float | None  # time of the first token since the process started

    def __str__(self) -> str:
        rate = self.num_output_tokens / self.seconds
        line = (
            f"{self.num_requests} requests, {self.num_prompt_tokens} tokens in, {self.num_output_tokens} tokens out, "
            f"{self.seconds:.2f} s, {rate:.1f} tokens per second; first token after {self.first_token_seconds:.2f} s"
        )
        if self.since_process_start is None:
            return line
        return f"{line}, {self.since_process_start:.2f} s after the process started"


def _run(args: argparse.Namespace, prompts: list[str], config: EngineConfig, chosen: dict[str, Any]) -> int:
    with uncollected():
        from jaxvllm.engine.llm import LLM

        llm = LLM.from_config(config)
    with llm:
        params = replace(llm.get_default_sampling_params(), **chosen)
        texts = prompts
        if args.chat:
            render = llm.get_tokenizer().apply_chat_template
            texts = [render([{"role": "user", "content": prompt}]) for prompt in prompts]
        streams = len(prompts) == 1 and params.num_sequences == 1 and not args.json
        kind = RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY
        requests = [
            llm.engine.check(str(i), text, replace(params, output_kind=kind), add_special_tokens=not args.chat)
            for i, text in enumerate(texts)
        ]
        if streams and not args.chat:
            print(prompts[0], end="", flush=True)
        timeline = StepTimeline(llm.engine) if args.show_batch else None
        outputs, totals = _complete(llm.engine, requests, timeline, streams)
        if args.json:
            for output in outputs:
                print(json.dumps(asdict(output), ensure_ascii=False))
            print(json.dumps(asdict(totals)))
            return 0
        print() if streams else _print_texts(prompts, outputs, joined=not args.chat)
        if timeline is not None:
            print(timeline.draw(prompts))
        print(f"\n{llm.engine.startup()}\n{totals}", flush=True)
    return 0


def _complete(
    engine: "Engine", requests: list["GenerationRequest"], timeline: "StepTimeline | None", streams: bool
) -> tuple[list["RequestOutput"], Totals]:
    start = time.monotonic()
    finished: dict[str, RequestOutput] = {}
    num_output_tokens = 0
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for output in engine.step():
            num_output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
            if streams:
                print(output.outputs[0].text, end="", flush=True)
            if output.finished:
                finished[output.request_id] = output
        if timeline is not None:
            timeline.record()
    end = time.monotonic()
    outputs = [finished[request.request_id] for request in requests]
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    first = min(output.metrics.first_token_time or end for output in outputs if output.metrics)
    lived = seconds_since_process_start()
    since_start = None if lived is None else lived - (time.monotonic() - first)
    return outputs, Totals(len(outputs), num_prompt_tokens, num_output_tokens, end - start, first - start, since_start)


def _print_texts(prompts: list[str], outputs: list["RequestOutput"], joined: bool) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        for completion in output.outputs:
            number = (
                f"[{output.request_id}.{completion.index}]" if len(output.outputs) > 1 else f"[{output.request_id}]"
            )
            text = prompt + completion.text if joined else f"{prompt}\n  {completion.text}"
            print(f"{number} {text}\n")


class StepTimeline:
    """Records which requests were in which step, and draws them as text."""

    def __init__(self, engine: "Engine"):
        self._engine = engine
        self._steps: list[dict[str, str]] = []

    def record(self) -> None:
        """Records the requests in the batch after a step: `P` computes its prompt, `#` decodes."""
        marks: dict[str, str] = {}
        for replica in self._engine.replicas:
            slots = replica.scheduler.slots
            for slot, request in replica.scheduler.running():
                marks[request.request_id] = "P" if slots.num_known[slot] == slots.num_prompt[slot] else "#"
        self._steps.append(marks)

    def draw(self, prompts: list[str], width: int = 64) -> str:
        """Draws a line for each request. A column is one step, or several when there are many."""
        stride = max(1, -(-len(self._steps) // width))
        columns = [_merged(self._steps[i : i + stride]) for i in range(0, len(self._steps), stride)]
        lines = [f"the batch at work: P prompt, # decode; a column is {stride} of {len(self._steps)} steps"]
        for index, prompt in enumerate(prompts):
            marks = (next((m for i, m in step.items() if i.split("#")[0] == str(index)), " ") for step in columns)
            lines.append(f"  {prompt[:20]:20} |{''.join(marks)}")
        lines.append(f"  {'requests':20} |{''.join(_digit(len(step)) for step in columns)}")
        return "\n".join(lines)


def _merged(steps: list[dict[str, str]]) -> dict[str, str]:
    """Merges several steps into one column, which shows each request's first mark in them."""
    return {request_id: mark for step in reversed(steps) for request_id, mark in step.items()}


def _digit(count: int) -> str:
    return str(count) if count < 10 else "+"
