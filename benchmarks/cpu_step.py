"""Says where the time of a step goes on this CPU: matmuls, attention, KV write, sampling, the rest, and the host.

Model S of benchmarks/cpu.py decodes 1, 16 and 64 rows behind prompts of 128 tokens, and computes prompts of 512 tokens,
one at a time. A profile of XLA's operations is grouped by what each of them is; the time of a step is measured without
the profiler. It prints the table and writes benchmarks/results/cpu-step-DATE-COMMIT.json.

    python -m benchmarks.cpu_step [--dtype float32] [--attention-backend auto]
"""

import argparse
import gzip
import json
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.cpu import MODEL_S, write_model
from benchmarks.provenance import machine, write_record
from jaxvllm import LLM, SamplingParams

OUTPUT_TOKENS = 64
ROUNDS = 5
KINDS = ("matmuls", "attention", "KV write", "sampling", "norms, rope, activation")
# Operations that contain others, whose time is counted there.
_CONTAINERS = ("while", "cond", "call")
_NAME = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ", re.MULTILINE)


@dataclass(frozen=True)
class Work:
    """Requests of one shape, and what a step of them is."""

    name: str
    requests: int
    prompt_tokens: int
    output_tokens: int

    @property
    def num_steps(self) -> int:
        """Decode steps, or prompts where only one token comes out of each."""
        return self.output_tokens - 1 or self.requests


WORK = (
    Work("decode, 1 row", 1, 128, OUTPUT_TOKENS),
    Work("decode, 16 rows", 16, 128, OUTPUT_TOKENS),
    Work("decode, 64 rows", 64, 128, OUTPUT_TOKENS),
    Work("prefill, 512 tokens", 4, 512, 1),
)


def kind_of(line: str) -> str:
    """Returns the kind of an operation, given its line in a compiled program."""
    if 'custom_call_target="jaxvllm_matmul' in line or re.search(r"\bdot\(|__onednn|matmul", line):
        return "matmuls"
    if 'custom_call_target="jaxvllm_attention' in line:
        return "attention"
    scope = match[1] if (match := re.search(r'op_name="([^"]*)"', line)) else ""
    if "/sample/" in scope or "/logits/" in scope or "/history/" in scope:
        return "sampling"
    if "/attention/" in scope and "scatter" in scope:
        return "KV write"
    return "norms, rope, activation"


def kinds_of(program: str) -> dict[str, str]:
    """Returns the kinds of all operations of a compiled program by their names."""
    lines = (line for line in program.splitlines() if " = " in line)
    return {match[1]: kind_of(line) for line in lines if (match := _NAME.match(line))}


def events(directory: Path) -> Iterator[dict[str, Any]]:
    """Yields the operations that the profiler has written down."""
    for path in directory.rglob("*.trace.json.gz"):
        for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
            if event.get("ph") == "X" and "hlo_op" in event.get("args", {}):
                yield event


class Steps:
    """An engine, and the time of its steps."""

    def __init__(self, model: Path, dtype: str, backend: Any):
        self.llm = LLM(
            model=str(model),
            load_format="dummy",
            dtype=dtype,
            max_model_len=1024,
            max_num_seqs=64,
            row_buckets=(1, 16, 64),
            token_buckets=(512,),
            warm_up="full",
            attention_backend=backend,
            compilation_cache="",
        )
        self._rng = np.random.default_rng(0)

    def run(self, work: Work, output_tokens: int) -> tuple[float, float]:
        """Returns the seconds of the run, and those of them that the host spent planning and collecting."""
        prompts = [
            {"prompt_token_ids": self._rng.integers(3, MODEL_S["vocab_size"], work.prompt_tokens).tolist()}
            for _ in range(work.requests)
        ]
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        self.llm.engine.take_reports()
        start = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return seconds, sum(report.host_seconds for report in self.llm.engine.take_reports())

    def measure(self, work: Work) -> dict[str, float]:
        """Returns milliseconds of a step: the whole, each kind of operation, and the host."""
        self.run(work, work.output_tokens)
        whole = [self.run(work, work.output_tokens) for _ in range(ROUNDS)]
        seconds, host = (statistics.median(values) for values in zip(*whole, strict=True))
        if work.output_tokens > 1:  # less what the prompts took
            first = [self.run(work, 1) for _ in range(ROUNDS)]
            before, host_before = (statistics.median(values) for values in zip(*first, strict=True))
            seconds, host = seconds - before, host - host_before
        # Steps with prompts are other programs than those that decode.
        wanted = "jit_decode" if work.output_tokens > 1 else ("jit_forward", "jit_sample_rows")
        kinds = self._kinds(work)
        total: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as directory:
            with jax.profiler.trace(directory):
                self.run(work, work.output_tokens)
            for event in events(Path(directory)):
                arguments = event["args"]
                if arguments["hlo_module"].startswith(wanted) and not event["name"].startswith(_CONTAINERS):
                    total[kinds.get(event["name"], KINDS[-1])] += event["dur"] / 1e3  # microseconds
        scale = 1e3 / work.num_steps
        operations = {kind: total[kind] / work.num_steps for kind in KINDS}
        rest = seconds * scale - sum(operations.values())
        return {"step": seconds * scale} | operations | {"between operations": rest, "host": host * scale}

    def _kinds(self, work: Work) -> dict[str, str]:
        """Returns the kinds of the operations of the programs that `work` runs."""
        programs = self.llm.engine.replicas[0].runner.programs
        found: dict[str, str] = {}
        for bucket in programs.ladder.buckets:
            is_used = bucket.is_decode and bucket.num_rows == work.requests if work.output_tokens > 1 else True
            if is_used and bucket.is_decode == (work.output_tokens > 1):
                for part in programs.wait_for(bucket).parts:
                    found |= kinds_of(part.as_text() or "")
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--attention-backend", choices=("auto", "reference"), default="auto")
    args = parser.parse_args()
    device = machine()
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory))
        steps = Steps(Path(directory), args.dtype, args.attention_backend)
        results = {work.name: steps.measure(work) for work in WORK}
    columns = ("step", *KINDS, "between operations", "host")
    print("milliseconds\n")
    print(f"| | {' | '.join(columns)} |\n|---{'|---' * len(columns)}|")
    for name, result in results.items():
        print(f"| {name} | {' | '.join(f'{result[column]:.2f}' for column in columns)} |")
    record = {
        "dtype": args.dtype,
        "attention_backend": args.attention_backend,
        "model": MODEL_S,
        "milliseconds": results,
    }
    print(f"\nwritten to {write_record('cpu-step', device, record)}")


if __name__ == "__main__":
    main()
