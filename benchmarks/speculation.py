"""Measures speculative decoding: each proposer beside none, on the demo model and prompts that it never saw.

The prompts are of held-out documents, of two kinds: `stories`, whose text is new, and `copies`, whose answers repeat
the prompt (JSON from a text, questions about a story). 1, 4, 16 or 64 of them are there at once, and answers end where
the model ends them. `default` is an engine without any option, and `none` one with --no-speculation.

Each engine has a process of its own, which sleeps while another is measured. In each round an engine answers all
prompts, and then the next one does. Another engine begins each round. This prints output tokens a second, and the ratio
to the engine without drafts: of the shortest times of each batch, since other work on the machine only adds to these,
of the least CPU times of all threads, and the median of all pairs with its quartiles. For one request there is what
theory expects beside it: time goes into decode steps, whose number follows from the tokens that a verification yields,
and into the rest, which drafts do not change. It writes benchmarks/results/speculation-DATE-COMMIT.json.

    python -m benchmarks.speculation [--methods default,ngram,suffix,draft,eagle3,medusa] [--requests 1,4,16,64]
        [--rounds 9] [--dtype float32]
"""

import argparse
import multiprocessing
import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Self

from benchmarks.result_files import ROOT, machine, write_record
from jaxvllm import LLM, SamplingParams
from tools.demo_corpus import EVALUATION_SEED, chat, is_held_out
from tools.demo_stories import story
from tools.demo_tokenizer import ChatTemplate

METHODS: dict[str, dict[str, Any]] = {
    "default": {},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "suffix": {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}},
    "draft": {"speculative_config": {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3}},
    "eagle3": {"speculative_config": {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 5}},
    "medusa": {"speculative_config": {"method": "medusa", "model": "demo-medusa", "num_speculative_tokens": 3}},
}
COPIES = ("json", "story_questions")
REQUESTS = (1, 4, 16, 64)
# So many prompts are answered in a round, however many of them are there at once.
PROMPTS = {1: 8, 4: 16, 16: 32, 64: 64}
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
        return _prompts(self.kind, PROMPTS[self.requests])

    @property
    def params(self) -> list[SamplingParams]:
        return [
            SamplingParams(temperature=self.temperature, seed=seed, max_tokens=MAX_TOKENS)
            for seed in range(PROMPTS[self.requests])
        ]


@cache
def _prompts(kind: str, count: int) -> list[str]:
    rng, template = random.Random(EVALUATION_SEED), ChatTemplate()
    found: list[str] = []
    while len(found) < count:
        if kind == "stories":
            tale = story(rng)
            text, is_new = " ".join(tale.text.split()[:12]), is_held_out(tale.key)
        else:
            one = chat(rng, COPIES[len(found) % len(COPIES)])
            text, is_new = template.render(one.task.messages[:1], prompt=True), one.held_out
        if is_new:
            found.append(text)
    return found


@dataclass(frozen=True)
class Batch:
    """The answer of one engine to some prompts that were there at once."""

    seconds: float
    cpu_seconds: float  # of all threads
    texts: list[str]
    num_tokens: int
    num_verifications: int
    num_accepted: int
    steps: dict[bool, tuple[int, float]]  # decode steps with drafts and without, and seconds of the device for them


def measure(llm: LLM, work: Work, first: int) -> Batch:
    """Answers the prompts of `work` from number `first` on, as many at once as it says."""
    [replica] = llm.engine.replicas
    if first == 0:
        llm.engine.holders[0].reset()  # or suffixes would be those of the same answers in the round before
    some = slice(first, first + work.requests)
    prompts, params = work.prompts[some], work.params[some]
    before = llm.engine.stats()
    replica.take_reports()
    start, cpu_start = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    after, reports = llm.engine.stats(), replica.take_reports()
    steps = {}
    for drafted in (True, False):
        of_kind = [report for report in reports if not report.num_prefill and (report.num_drafts > 0) == drafted]
        steps[drafted] = sum(one.num_steps for one in of_kind), sum(one.device_seconds for one in of_kind)
    return Batch(
        seconds,
        cpu_seconds,
        [output.outputs[0].text for output in outputs],
        sum(len(output.outputs[0].token_ids) for output in outputs),
        after.num_verifications - before.num_verifications,
        after.num_accepted_tokens - before.num_accepted_tokens,
        steps,
    )


@dataclass(frozen=True)
class Engine:
    """An engine in a process of its own: five in one have more pieces of code than Linux maps."""

    process: BaseProcess
    connection: Connection

    @classmethod
    def start(cls, dtype: str, options: dict[str, Any]) -> Self:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, dtype, options))
        process.start()
        theirs.close()
        return cls(process, ours)

    def run(self, work: Work, first: int) -> Batch:
        self.connection.send((work, first))
        batch: Batch = self.connection.recv()
        return batch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.connection.close()
        self.process.join()


def serve(connection: Connection, dtype: str, options: dict[str, Any]) -> None:
    """Answers what `Engine.run` asks, until nobody does."""
    with LLM("demo", dtype=dtype, warm_up="full", row_buckets=REQUESTS, enable_prefix_caching=False, **options) as llm:
        while True:
            try:
                work, first = connection.recv()
            except EOFError:
                return
            connection.send(measure(llm, work, first))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--requests", default=",".join(map(str, REQUESTS)))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    device = machine()
    works = [
        Work(kind, requests, heat)
        for kind in ("stories", "copies")
        for requests in map(int, args.requests.split(","))
        for heat in (0.0, 0.7)
    ]
    chosen = {"none": {"speculation": False}} | {name: METHODS[name] for name in args.methods.split(",")}
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        engines = {name: stack.enter_context(Engine.start(args.dtype, options)) for name, options in chosen.items()}
        for work in works:
            firsts = range(0, PROMPTS[work.requests], work.requests)
            rounds: dict[str, list[list[Batch]]] = {name: [] for name in engines}
            for number in range(args.rounds + 2):  # two rounds warm up
                of_round: dict[str, list[Batch]] = {}
                turn = number % len(engines)  # so that none of them is always behind the same other
                order = [*engines][turn:] + [*engines][:turn]
                for name in order:
                    of_round[name] = [engines[name].run(work, first) for first in firsts]
                for name, batches in of_round.items():
                    if number > 1:
                        rounds[name].append(batches)
            for name in engines:
                rows.append(row(work, name, rounds[name], rounds["none"]))
                print(line(rows[-1]), flush=True)
    path = write_record("speculation", device, {"dtype": args.dtype, "options": chosen, "rows": rows})
    print(path.relative_to(ROOT))


def row(work: Work, name: str, rounds: list[list[Batch]], plain: list[list[Batch]]) -> dict[str, Any]:
    batches, plain_batches = [b for one in rounds for b in one], [b for one in plain for b in one]
    for batch, other in zip(batches, plain_batches, strict=True):
        assert batch.texts == other.texts, f"{name} changed a text of {work}"
    num_tokens = sum(batch.num_tokens for batch in rounds[0])
    ratios = [b.seconds / a.seconds for a, b in zip(batches, plain_batches, strict=True)]
    found: dict[str, Any] = {
        "work": str(work),
        "proposer": name,
        "tokens_per_second": [num_tokens / sum(batch.seconds for batch in one) for one in rounds],
        "ratio_of_shortest": least(plain, "seconds") / least(rounds, "seconds"),
        "ratio_of_cpu": least(plain, "cpu_seconds") / least(rounds, "cpu_seconds"),
        "ratios": ratios,
    }
    drafts = sum(batch.num_verifications for batch in batches)
    if drafts:
        found["tokens_per_verification"] = 1 + sum(batch.num_accepted for batch in batches) / drafts
        found["num_drafts"] = drafts
    if work.requests == 1 and drafts:
        found |= theory(batches, plain_batches)
    return found


def least(rounds: list[list[Batch]], what: str) -> float:
    """Returns the time of all batches, each in the round in which it took least."""
    return float(sum(min(getattr(batch, what) for batch in batches) for batches in zip(*rounds, strict=True)))


def theory(batches: list[Batch], plain: list[Batch]) -> dict[str, float]:
    """Returns the ratio that follows from the number and the cost of steps, and the share of steps with drafts."""

    def total(some: list[Batch], drafted: bool) -> tuple[int, float]:
        return sum(one.steps[drafted][0] for one in some), float(sum(one.steps[drafted][1] for one in some))

    (drafted, drafted_seconds), (others, _) = total(batches, True), total(batches, False)
    plain_steps, plain_seconds = total(plain, False)
    all_seconds = sum(one.seconds for one in plain)
    cost = (drafted_seconds / drafted) / (plain_seconds / plain_steps)
    decoding = plain_seconds * (drafted * cost + others) / plain_steps
    return {
        "share_of_steps": drafted / (drafted + others),
        "step_cost": cost,
        "expected_ratio": all_seconds / (all_seconds - plain_seconds + decoding),
    }


def line(found: dict[str, Any]) -> str:
    low, middle, high = statistics.quantiles(found["ratios"], n=4)
    text = f"{found['work']:34} {found['proposer']:8} {statistics.median(found['tokens_per_second']):6.0f} tok/s"
    text += f"  x{found['ratio_of_shortest']:.2f} shortest, x{found['ratio_of_cpu']:.2f} CPU"
    text += f", x{middle:.2f} ({low:.2f}-{high:.2f}) of pairs"
    if "tokens_per_verification" in found:
        text += f"  {found['tokens_per_verification']:.2f} tokens a verification"
    if "step_cost" in found:
        text += f" of cost {found['step_cost']:.2f} in {found['share_of_steps']:.0%} of steps"
        text += f": x{found['expected_ratio']:.2f} expected"
    return text


if __name__ == "__main__":
    main()
