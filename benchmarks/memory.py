"""Measures the peak memory of the offline engine on CPU and its parts, beside another checkout in one run.

The model has 0.6 billion random float32 parameters (shapes of Qwen3-0.6B, 2.2 GiB), and the engine its defaults for
64 sequences of 1024 tokens. A process of its own loads it, waits until every bucket is compiled, and answers 64
requests at once. This prints and writes the memory of the process after each stage, in MiB: its peak (VmHWM, with the
mapped file of weights), and the part without a file behind it (RssAnon).

    python -m benchmarks.memory [--other CHECKOUT] [--input-tokens 96] [--output-tokens 8]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

REQUESTS = 64


def measure(directory: Path, input_tokens: int, output_tokens: int) -> None:
    """Prints a line of JSON for each stage of an engine in this process."""
    start = time.monotonic()

    def tell(stage: str) -> None:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        sizes = {name: int(fields[name].split()[0]) // 1024 for name in ("VmHWM", "RssAnon", "RssFile")}
        print(json.dumps({"stage": stage, "seconds": round(time.monotonic() - start, 1)} | sizes), flush=True)

    from jaxvllm import LLM, SamplingParams

    tell("imported")
    with LLM(model=str(directory), max_model_len=1024, max_num_seqs=REQUESTS, warm_up="full") as llm:
        tell("all buckets compiled")
        rng = np.random.default_rng(1)
        prompts: list[Any] = [
            {"prompt_token_ids": ids.tolist()} for ids in rng.integers(0, 100_000, (REQUESTS, input_tokens))
        ]
        params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)
        tell("answered")


def run(checkout: Path, directory: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs an engine of `checkout` in a process of its own, without a compile cache, and returns its stages."""
    lengths = [str(arguments.input_tokens), str(arguments.output_tokens)]
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, __file__, "--measure", str(directory), "--lengths", *lengths],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout), "JAX_COMPILATION_CACHE_DIR": cache},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, help="another checkout, measured first")
    parser.add_argument("--input-tokens", type=int, default=96)
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--lengths", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        measure(arguments.measure, *arguments.lengths)
        return
    from benchmarks.qwen3 import qwen3_600m, write_model, write_weights
    from benchmarks.result_files import ROOT, machine, write_record

    device = machine()
    checkouts = {"here": ROOT} if arguments.other is None else {"other": arguments.other.resolve(), "here": ROOT}
    stages = {}
    with tempfile.TemporaryDirectory() as name:
        config = qwen3_600m(max_position_embeddings=1024, rope_theta=1e4, torch_dtype="float32")
        write_model(Path(name), config)
        write_weights(Path(name), config)
        for label, checkout in checkouts.items():
            stages[label] = run(checkout, Path(name), arguments)
            for stage in stages[label]:
                print(label, json.dumps(stage), flush=True)
    record = {"requests": REQUESTS, "input": arguments.input_tokens, "output": arguments.output_tokens}
    print(write_record("memory", device, record | {"mebibytes": stages}))


if __name__ == "__main__":
    main()
