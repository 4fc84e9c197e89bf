"""Says where the time of a step goes on this CPU: matmuls, attention, KV write, sampling, the rest, and the host.

Model S of benchmarks/qwen3.py decodes 1, 16 or 64 rows after prompts of 128 tokens, and computes prompts of 512 tokens,
one at a time. A profile of XLA's operations is grouped by what each of them is; the time of a step is measured without
the profiler. It prints the table and writes benchmarks/results/cpu-step-DATE-COMMIT.json
(for bfloat16 cpu-step-bfloat16-DATE-COMMIT.json).

    python -m benchmarks.cpu_step [--dtype float32] [--attention-backend auto]
"""

import argparse
import gzip
import json
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.qwen3 import MODEL_EXPERTS, MODEL_S, write_model
from benchmarks.result_files import ROOT, machine, write_record
from benchmarks.workload import VOCAB_SIZE
from jaxvllm import LLM, SamplingParams
from jaxvllm.engine.stats import StepReport

MODELS = {"S": MODEL_S, "experts": MODEL_EXPERTS}
OUTPUT_TOKENS = 64
ROUNDS = 5
KINDS = ("matmuls", "experts", "attention", "KV write", "sampling", "norms, rope, activation")
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

    def holds(self, report: StepReport) -> bool:
        """Returns whether a step was one of these: all rows decode, or a whole prompt is computed."""
        if self.output_tokens > 1:
            return report.num_prefill == 0 and report.num_decode == self.requests
        return report.num_prefill == self.prompt_tokens


WORK = (
    Work("decode, 1 row", 1, 128, OUTPUT_TOKENS),
    Work("decode, 16 rows", 16, 128, OUTPUT_TOKENS),
    Work("decode, 64 rows", 64, 128, OUTPUT_TOKENS),
    Work("prefill, 512 tokens", 4, 512, 1),
)


def kind_of(line: str) -> str:
    """Returns the kind of an operation, given its line in a compiled program."""
    if re.search(r"=\"jaxvllm_(matmul|gated)|\bdot\(|__onednn|matmul", line):
        return "matmuls"
    if re.search(r"=\"jaxvllm_grouped", line):
        return "experts"
    if 'custom_call_target="jaxvllm_attention' in line:
        return "attention"
    scope = match[1] if (match := re.search(r'op_name="([^"]*)"', line)) else ""
    if "/sample/" in scope or "/logits/" in scope or "/history/" in scope:
        return "sampling"
    if "/attention/" in scope and "scatter" in scope:
        return "KV write"
    return "norms, rope, activation"


def kinds_of(program: str) -> dict[tuple[str, str], str]:
    """Returns the kinds of all operations of a compiled program, by the program's name and theirs."""
    header = re.match(r"HloModule ([\w.\-]+)", program)
    assert header is not None, "no compiled program"
    lines = (line for line in program.splitlines() if " = " in line)
    return {(header[1], match[1]): kind_of(line) for line in lines if (match := _NAME.match(line))}


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

    def run(self, work: Work) -> list[StepReport]:
        """Returns the reports of the steps that count."""
        prompts = [
            {"prompt_token_ids": self._rng.integers(3, VOCAB_SIZE, work.prompt_tokens).tolist()}
            for _ in range(work.requests)
        ]
        params = SamplingParams(temperature=0.0, max_tokens=work.output_tokens, ignore_eos=True, detokenize=False)
        self.llm.engine.take_reports()
        self.llm.generate(prompts, params, use_tqdm=False)
        return [report for report in self.llm.engine.take_reports() if work.holds(report)]

    def measure(self, work: Work) -> dict[str, float]:
        """Returns milliseconds of a step: the whole, each kind of operation, and the host."""
        self.run(work)
        runs = [self.run(work) for _ in range(ROUNDS)]
        # Steps with prompts are other programs than those that decode.
        wanted = "jit_decode" if work.output_tokens > 1 else ("jit_forward", "jit_sample_rows")
        kinds = self._kinds(work)
        total: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as directory:
            with jax.profiler.trace(directory):
                num_steps = sum(report.num_steps for report in self.run(work))
            for event in events(Path(directory)):
                module, name = event["args"]["hlo_module"], event["name"]
                if module.startswith(wanted) and not name.startswith(_CONTAINERS):
                    total[kinds.get((module, name), KINDS[-1])] += event["dur"] / 1e3  # microseconds
        step = statistics.median(_milliseconds([r.device_seconds for r in run], run) for run in runs)
        host = statistics.median(_milliseconds([r.host_seconds for r in run], run) for run in runs)
        operations = {kind: total[kind] / num_steps for kind in KINDS}
        rest = step - sum(operations.values())
        return {"step": step} | operations | {"between operations": rest, "host": host}

    def _kinds(self, work: Work) -> dict[tuple[str, str], str]:
        """Returns the kinds of the operations of the programs that `work` runs."""
        programs = self.llm.engine.replicas[0].runner.programs
        found: dict[tuple[str, str], str] = {}
        for bucket in programs.ladder.buckets:
            is_used = bucket.is_decode and bucket.num_rows == work.requests if work.output_tokens > 1 else True
            if is_used and bucket.is_decode == (work.output_tokens > 1):
                for part in programs.wait_for(bucket).parts:
                    found |= kinds_of(part.as_text() or "")
        return found


def _milliseconds(seconds: list[float], reports: list[StepReport]) -> float:
    """Returns the time of a step, given those of the calls, each of which may take several steps."""
    return 1e3 * sum(seconds) / sum(report.num_steps for report in reports)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODELS), default="S")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--attention-backend", choices=("auto", "reference"), default="auto")
    args = parser.parse_args()
    device = machine()
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), MODELS[args.model])
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
        "model": MODELS[args.model],
        "milliseconds": results,
    }
    path = write_record("cpu-step" if args.dtype == "float32" else f"cpu-step-{args.dtype}", device, record)
    print(f"\nwritten to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
