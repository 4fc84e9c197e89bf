"""Measures speculative decoding: each proposer beside none, on the demo model and prompts that it never saw.

The prompts are of held-out documents, of two kinds: `stories`, whose text is new, and `copies`, whose answers repeat
the prompt (JSON from a text, questions about a story). 1, 16 or 64 of them are there at once, and answers end where the
model ends them. Each engine has a process of its own, which sleeps while another is measured, and rounds alternate
between them. This prints output tokens a second, the ratio to the engine without drafts, how many tokens a verification
yielded, and the ratio that theory expects: these tokens by what a step with drafts costs beside one without. It writes
benchmarks/results/speculation-DATE-COMMIT.json.

    python -m benchmarks.speculation [--methods ngram,suffix,draft,eagle3,medusa] [--rounds 5] [--dtype float32]
"""

import argparse
import multiprocessing
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Self

from benchmarks.provenance import ROOT, machine, spread, write_record
from jaxvllm import LLM, SamplingParams
from jaxvllm.engine.stats import StepReport
from tools.demo_corpus import EVALUATION_SEED, chat, is_held_out
from tools.demo_stories import story
from tools.demo_tokenizer import ChatTemplate

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "suffix": {"method": "suffix", "num_speculative_tokens": 3},
    "draft": {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 3},
    "medusa": {"method": "medusa", "model": "demo-medusa", "num_speculative_tokens": 3},
}
COPIES = ("json", "story_questions")
REQUESTS = (1, 16, 64)
# So many prompts are answered in a round, however many of them are there at once.
PROMPTS = {1: 8, 16: 32, 64: 64}
MAX_TOKENS = 160


@dataclass(frozen=True)
class Work:
    """Prompts of one kind, so many at once, at a temperature."""

    kind: str
    requests: int
    temperature: float

    def __str__(self) -> str:
        return f"{self.requests} {self.kind}, temperature {self.temperature}"

    @property
    def prompts(self) -> list[str]:
        return list(_prompts(self.kind, PROMPTS[self.requests]))

    @property
    def params(self) -> list[SamplingParams]:
        return [
            SamplingParams(temperature=self.temperature, seed=seed, max_tokens=MAX_TOKENS)
            for seed in range(PROMPTS[self.requests])
        ]


def _prompts(kind: str, count: int) -> Iterator[str]:
    rng, template, found = random.Random(EVALUATION_SEED), ChatTemplate(), 0
    while found < count:
        if kind == "stories":
            tale = story(rng)
            text, is_new = " ".join(tale.text.split()[:12]), is_held_out(tale.key)
        else:
            one = chat(rng, COPIES[found % len(COPIES)])
            text, is_new = template.render(one.task.messages[:1], prompt=True), one.held_out
        if is_new:
            found += 1
            yield text


@dataclass(frozen=True)
class Result:
    """What one engine made of a round."""

    tokens_per_second: float
    texts: list[str]
    drafts: int
    accepted: int
    reports: list[StepReport]

    @property
    def step_seconds(self) -> dict[bool, float]:
        """Seconds of the device for a decode step, with drafts and without."""
        of: dict[bool, list[float]] = {True: [], False: []}
        for report in self.reports:
            if report.num_prefill == 0:
                of[report.num_drafts > 0].append(report.device_seconds / report.num_steps)
        return {kind: statistics.median(seconds) for kind, seconds in of.items() if seconds}


def measure(llm: LLM, work: Work) -> Result:
    """Answers the prompts of `work`, as many at once as it says."""
    [replica] = llm.engine.replicas
    replica.runner.reset()  # or suffixes would be those of the same answers in the round before
    before = llm.engine.stats()
    replica.take_reports()
    texts, tokens, seconds = [], 0, 0.0
    prompts, params = work.prompts, work.params
    for first in range(0, len(prompts), work.requests):
        some = slice(first, first + work.requests)
        start = time.perf_counter()
        outputs = llm.generate(prompts[some], params[some], use_tqdm=False)
        seconds += time.perf_counter() - start
        texts += [output.outputs[0].text for output in outputs]
        tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
    after = llm.engine.stats()
    drafts, accepted = after.num_drafts - before.num_drafts, after.num_accepted_tokens - before.num_accepted_tokens
    return Result(tokens / seconds, texts, drafts, accepted, replica.take_reports())


@dataclass(frozen=True)
class Engine:
    """An engine in a process of its own: five in one have more pieces of code than Linux maps."""

    process: BaseProcess
    connection: Connection

    @classmethod
    def start(cls, dtype: str, config: dict[str, Any] | None) -> Self:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, dtype, config))
        process.start()
        theirs.close()
        return cls(process, ours)

    def run(self, work: Work) -> Result:
        self.connection.send(work)
        result: Result = self.connection.recv()
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.connection.close()
        self.process.join()


def serve(connection: Connection, dtype: str, config: dict[str, Any] | None) -> None:
    """Answers what `Engine.run` asks, until nobody does."""
    options: dict[str, Any] = {"row_buckets": REQUESTS, "enable_prefix_caching": False}
    with LLM("demo", dtype=dtype, warm_up="full", speculative_config=config, **options) as llm:
        while True:
            try:
                work = connection.recv()
            except EOFError:
                return
            connection.send(measure(llm, work))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    device = machine()
    works = [
        Work(kind, requests, heat) for kind in ("stories", "copies") for requests in REQUESTS for heat in (0.0, 0.7)
    ]
    methods: dict[str, dict[str, Any] | None] = {"none": None} | {
        name: METHODS[name] for name in args.methods.split(",")
    }
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        engines = {name: stack.enter_context(Engine.start(args.dtype, config)) for name, config in methods.items()}
        for work in works:
            results: dict[str, list[Result]] = {name: [] for name in engines}
            for number in range(args.rounds + 1):  # the first round warms up
                for name, engine in engines.items():
                    result = engine.run(work)
                    if number:
                        results[name].append(result)
            plain = results["none"]
            for name, rounds in results.items():
                assert all(result.texts == plain[0].texts for result in rounds), f"{name} changed a text of {work}"
                rows.append(row(work, name, rounds, plain))
                print(line(rows[-1]), flush=True)
    path = write_record("speculation", device, {"dtype": args.dtype, "methods": methods, "rows": rows})
    print(path.relative_to(ROOT))


def row(work: Work, name: str, rounds: list[Result], plain: list[Result]) -> dict[str, Any]:
    speeds = [result.tokens_per_second for result in rounds]
    # Rounds of two engines that follow each other meet the same machine.
    ratios = [a.tokens_per_second / b.tokens_per_second for a, b in zip(rounds, plain, strict=True)]
    drafts, accepted = sum(result.drafts for result in rounds), sum(result.accepted for result in rounds)
    found: dict[str, Any] = {"work": str(work), "proposer": name, "tokens_per_second": speeds, "ratios": ratios}
    if drafts:
        found["tokens_per_verification"] = 1 + accepted / drafts
        found["num_drafts"] = drafts
        steps = [result.step_seconds for result in rounds]
        with_drafts = [seconds[True] for seconds in steps if True in seconds]
        without = [result.step_seconds[False] for result in plain]
        if with_drafts:
            found["step_cost"] = statistics.median(with_drafts) / statistics.median(without)
            found["expected_ratio"] = found["tokens_per_verification"] / found["step_cost"]
    return found


def line(found: dict[str, Any]) -> str:
    text = f"{found['work']:34} {found['proposer']:8} {spread(found['tokens_per_second'], 0):>20} tok/s"
    text += f"  x{spread(found['ratios'], 2)}"
    if "step_cost" in found:
        text += f"  {found['tokens_per_verification']:.2f} tokens a step of cost {found['step_cost']:.2f}"
        text += f": x{found['expected_ratio']:.2f} expected"
    return text


if __name__ == "__main__":
    main()
