"""Measures the time of a step, and the memory, against the context (512 to 32k tokens) and the rows (1 to 256).

The model is small (4 layers, random weights), so that the curves show what grows and not what is constant. Contexts:
one prompt as long as the longest context is computed in chunks; those that end at a context, and the two before each,
are the first curve. Then requests that find most of that prompt in the prefix cache decode at each context, alone and
eight at a time. Rows: so many requests of one length decode at once; counts between two buckets are measured, too.
Every point is the median of its steps. Where a time grows by much more than the size since the point before, the table
marks a cliff.

Memory is what the process holds without a file behind it (RssAnon). A CPU maps KV pages when they are first written, so
it grows with the tokens that were ever held, and by nothing else. This writes
benchmarks/results/scaling-DATE-COMMIT.json and, with matplotlib, a picture beside it.

    python -m benchmarks.scaling [--longest 32768] [--most-rows 256]
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.qwen3 import qwen3, write_model
from benchmarks.result_files import ROOT, machine, write_record
from jaxvllm import LLM, SamplingParams
from jaxvllm.engine.stats import StepReport

MODEL = qwen3(4, 256, 768, 4, 2, 64, 512, max_position_embeddings=2**20, torch_dtype="float32")
CHUNK = 512  # tokens of a step with prompts
CHUNKS = 3  # of a point
STEPS = 24  # decode steps of a point
ROWS_CONTEXT = 65  # tokens before the first decode step of the curve over rows: four pages, and one that starts a row
ROW_GROUP = 8  # rows of the third curve over contexts
# Of a point, in multiples of the point before: the time may grow 1.3 times as fast as the size, to leave room for a
# noisy machine and for a bucket that is twice as large.
CLIFF = 1.3


@dataclass(frozen=True)
class Point:
    """The steps of one size."""

    size: int  # tokens of context, or rows
    step_ms: float  # median
    quickest_ms: float
    slowest_ms: float
    num_steps: int
    memory_mib: int  # RssAnon after the last step

    @classmethod
    def of(cls, size: int, reports: Sequence[StepReport]) -> "Point":
        times = [1e3 * report.device_seconds / report.num_steps for report in reports]
        return cls(size, statistics.median(times), min(times), max(times), len(times), anonymous_mib())


def anonymous_mib() -> int:
    """Returns the memory of this process without a file behind it."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) // 1024


def cliffs(points: Sequence[Point]) -> list[int]:
    """Returns the sizes at which the time grew by more than CLIFF times what the size did."""
    return [
        now.size
        for before, now in zip(points, points[1:], strict=False)
        if now.step_ms / before.step_ms > CLIFF * now.size / before.size
    ]


def doublings(smallest: int, largest: int) -> list[int]:
    """Returns the doublings of `smallest` up to `largest`."""
    return [smallest << power for power in range((largest // smallest).bit_length())]


def decoded(llm: LLM, prompts: Sequence[list[int]]) -> list[StepReport]:
    """Completes the prompts at once, and returns the steps in which all of them decoded and nothing else did."""
    params = SamplingParams(temperature=0.0, max_tokens=STEPS + 1, ignore_eos=True, detokenize=False)
    llm.engine.take_reports()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    reports = llm.engine.take_reports()
    return [one for one in reports if one.num_prefill == 0 and one.num_decode == len(prompts)]


def engine(directory: str, **options: Any) -> LLM:
    """Builds an engine that takes one step at a time, with all its programs compiled."""
    common: dict[str, Any] = dict(load_format="dummy", dtype="float32", max_decode_burst=1, warm_up="full")
    return LLM(model=directory, **common, **options)


def over_contexts(directory: str, longest: int) -> Iterator[tuple[str, list[Point]]]:
    """Yields a curve for chunks of a prompt, for one row that decodes, and for several."""
    contexts = doublings(CHUNK, longest)
    room = longest + STEPS + 2
    # Each row has its own last page and the tokens that it decodes. If these pages were few, the ends of earlier points
    # would push the end of the long prompt out of the prefix cache.
    pages = 1 + (longest + (1 + ROW_GROUP) * (STEPS + 40) * len(contexts)) // 16
    options = dict(row_buckets=(1, ROW_GROUP), token_buckets=(CHUNK,), num_pages=pages)
    with engine(directory, max_model_len=room, max_num_seqs=ROW_GROUP, max_num_batched_tokens=CHUNK, **options) as llm:
        prompt = np.random.default_rng(0).integers(3, MODEL["vocab_size"], longest).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        llm.engine.take_reports()
        llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        chunks = [report for report in llm.engine.take_reports() if report.num_prefill == CHUNK]
        ends = [(context, context // CHUNK) for context in contexts]
        yield (
            f"a chunk of {CHUNK} tokens",
            [Point.of(context, chunks[max(end - CHUNKS, 0) : end]) for context, end in ends],
        )
        for rows in (1, ROW_GROUP):
            curve = []
            for context in contexts:
                # The last tokens differ, or the rows would be one prompt.
                prompts = [prompt[: context - STEPS - 2] + [3 + row] for row in range(rows)]
                curve.append(Point.of(context, decoded(llm, prompts)))
            yield f"{rows} row{'s' if rows > 1 else ''} that decode{'' if rows > 1 else 's'}", curve


def over_rows(directory: str, most: int) -> list[Point]:
    """Returns the curve over rows: powers of two, and counts between them."""
    powers = doublings(1, most)
    counts = sorted({*powers, *(count + 1 for count in powers if 4 <= count < most)})
    length = ROWS_CONTEXT + STEPS + 2
    with engine(directory, max_model_len=length, max_num_seqs=most, max_num_batched_tokens=max(CHUNK, most)) as llm:
        rng = np.random.default_rng(1)
        curve = []
        for count in counts:
            prompts = rng.integers(3, MODEL["vocab_size"], (count, ROWS_CONTEXT)).tolist()
            decoded(llm, prompts)  # now their pages are cached, so that all rows can start in one step
            curve.append(Point.of(count, decoded(llm, prompts)))
        return curve


def draw(contexts: dict[str, list[Point]], rows: list[Point], title: str, path: Path) -> None:
    """Draws the times over contexts and over rows, and the memory."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    for name, points in contexts.items():
        left.plot([p.size for p in points], [p.step_ms for p in points], marker="o", label=name)
        right.plot([p.size for p in points], [p.memory_mib for p in points], marker="o", label=name)
    middle.plot([p.size for p in rows], [p.step_ms for p in rows], marker="o", label="rows that decode")
    for axes, label in ((left, "tokens of context"), (middle, "rows"), (right, "tokens of context")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
        axes.legend()
    for axes in (left, middle):
        axes.set_yscale("log")
        axes.set_ylabel("milliseconds a step")
    right.set_ylabel("RssAnon, MiB")
    right.set_ylim(bottom=0)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, default=32768, help=f"tokens of the longest context, from {CHUNK}")
    parser.add_argument("--most-rows", type=int, default=256, help="of the curve over rows")
    args = parser.parse_args()
    if args.longest < CHUNK or args.most_rows < 1:
        parser.error(f"--longest must be at least {CHUNK} and --most-rows at least 1")
    host = machine()
    contexts: dict[str, list[Point]] = {}
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), MODEL)
        for name, points in over_contexts(directory, args.longest):
            contexts[name] = points
            tell(name, "context", points)
        rows = over_rows(directory, args.most_rows)
        tell(f"rows that decode at a context of {ROWS_CONTEXT}", "rows", rows)
    curves = {"context": contexts, "rows": {"decode": rows}}
    record = {
        "model": MODEL,
        "curves": {
            axis: {name: [asdict(p) for p in points] for name, points in of.items()} for axis, of in curves.items()
        },
        "cliffs": {axis: {name: cliffs(points) for name, points in of.items()} for axis, of in curves.items()},
    }
    path = write_record("scaling", host, record)
    print(f"\nwritten to {path.relative_to(ROOT)}")
    if find_spec("matplotlib") is not None:
        draw(contexts, rows, f"{host['cpu']}, {path.stem}", path.with_suffix(".png"))


def tell(name: str, axis: str, points: Sequence[Point]) -> None:
    """Prints a curve as a table."""
    marked = cliffs(points)
    print(f"\n{name}\n\n| {axis} | ms a step, median (range) | steps | memory, MiB | |\n|---|---|---|---|---|")
    for p in points:
        cells = f"{p.step_ms:.2f} ({p.quickest_ms:.2f}-{p.slowest_ms:.2f}) | {p.num_steps} | {p.memory_mib}"
        print(f"| {p.size} | {cells} | {'cliff' if p.size in marked else ''} |", flush=True)


if __name__ == "__main__":
    main()
