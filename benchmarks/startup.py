"""Measures process start to first token, cold (nothing compiled before) and warm, of `jaxvllm generate`.

There are three models: the embedded one, and one of Qwen3 0.6B's shape with random weights, which are written to a
temporary directory as a checkpoint, and as a GGUF file in Q4_K_M, and read from there. Each start is a process of its
own, which completes one prompt of 5 tokens with 16 tokens. Cold starts have an empty cache directory each. Warm ones
have that of the first cold start.
With `--other`, starts of another checkout of this project (for example one of an older commit) alternate with ours,
with their own cache directories. Prints medians and ranges, where the time of a median start went, and with `--ladder`
how long all programs take. Writes benchmarks/results/startup-DATE-COMMIT.json.

    python -m benchmarks.startup [--runs 5] [--cold-runs 2] [--models 0.6B-Q4_K_M] [--other ../wt/base] [--ladder]

Have bytecode made before (`make venv` does), or each start compiles the sources of all libraries where
PYTHONDONTWRITEBYTECODE is set.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.qwen3 import qwen3_600m, write_model, write_weights
from benchmarks.qwen3_gguf import write_q4_k_m
from benchmarks.result_files import ROOT, machine, spread, write_record

LARGE = ["--max-model-len", "2048"]
OPTIONS = {"demo": [], "0.6B": LARGE, "0.6B-Q4_K_M": LARGE}
PROMPT = "t1 t2 t3 t4 t5"
SINCE_START = re.compile(r"([\d.]+) s after the process started$", re.MULTILINE)
STAGES = re.compile(r"^engine started in .*$", re.MULTILINE)


def start(checkout: Path, model: str, cache: Path, options: list[str]) -> dict[str, Any]:
    """Returns what one start took, by its own account and by ours."""
    command = [sys.executable, "-m", "jaxvllm.generate", "--model", model, "--compilation-cache", str(cache)]
    command += ["--temperature", "0", "--max-tokens", "16", "--ignore-eos", *options, PROMPT]
    environment = os.environ | {"PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"}
    load, begun = os.getloadavg()[0], time.perf_counter()
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=True)
    whole = time.perf_counter() - begun
    first, stages = SINCE_START.search(done.stdout), STAGES.search(done.stdout)
    assert first is not None, done.stdout
    return {
        "first_token_seconds": float(first[1]),
        "seconds": whole,
        "load_average": load,
        "stages": "" if stages is None else stages[0],
    }


def measure(model: str, path: str, checkouts: dict[str, Path], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the starts of each checkout, which alternate."""
    results: list[dict[str, Any]] = []
    options = OPTIONS[model]

    def note(name: str, kind: str, one: dict[str, Any]) -> None:
        print(f"  {model} {name} {kind}: {one['first_token_seconds']:.2f} s. {one['stages']}", flush=True)
        results.append({"model": model, "checkout": name, "kind": kind} | one)

    with tempfile.TemporaryDirectory() as directory:
        for run in range(args.cold_runs):
            for name, checkout in checkouts.items():
                note(name, "cold", start(checkout, path, Path(directory, f"{name}-{run}"), options))
        caches = {name: Path(directory, f"{name}-0") for name in checkouts}  # the first cold start has filled them
        for name, checkout in checkouts.items() if args.ladder else ():
            note(name, "filling", start(checkout, path, caches[name], [*options, "--warm-up", "full"]))
            note(name, "whole ladder, warm", start(checkout, path, caches[name], [*options, "--warm-up", "full"]))
        for _ in range(args.runs):
            for name, checkout in checkouts.items():
                note(name, "warm", start(checkout, path, caches[name], options))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="warm starts of each model")
    parser.add_argument("--cold-runs", type=int, default=2, help="cold starts of each model, at least one")
    parser.add_argument("--ladder", action="store_true", help="also compile every program, and load every program")
    parser.add_argument("--models", nargs="+", default=["demo", "0.6B"], choices=list(OPTIONS))
    parser.add_argument("--other", type=Path, help="another checkout of this project")
    args = parser.parse_args()
    device = machine()
    checkouts = {"this": ROOT} | ({} if args.other is None else {"other": args.other.resolve()})
    results = []
    with tempfile.TemporaryDirectory() as directory:
        for model in args.models:
            path = model if model == "demo" else str(Path(directory, f"{model}.gguf" if "Q4" in model else model))
            if model == "0.6B":
                Path(path).mkdir()
                write_model(Path(path), qwen3_600m())
                write_weights(Path(path), qwen3_600m())
            elif model != "demo":
                write_q4_k_m(Path(path), qwen3_600m())
            results += measure(model, path, checkouts, args)
    print("\n| model | checkout | start | first token, s | where a median start's time went |")
    print("|---|---|---|---|---|")
    for kind in dict.fromkeys((one["model"], one["checkout"], one["kind"]) for one in results):
        runs = [one for one in results if (one["model"], one["checkout"], one["kind"]) == kind]
        times = [one["first_token_seconds"] for one in runs]
        median = min(runs, key=lambda one: abs(one["first_token_seconds"] - statistics.median(times)))
        print(f"| {' | '.join(kind)} | {spread(times, 2)} | {median['stages']} |")
    print(f"\nwritten to {write_record('startup', device, {'results': results}).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
