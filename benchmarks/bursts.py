"""Measures decode bursts on and off, beside another checkout of this project, in one run.

There are three engines: this checkout with bursts, this checkout without (`max_decode_burst=1`), and another checkout
as it is (`--other`, for example a worktree of an older commit). Each has a process of its own, which sleeps while
another is measured. Rounds alternate between them. This prints output tokens a second, the host's time for a token
(planning, launching, and turning tokens into outputs), how many decode steps a program took, and how long the ladder of
programs took to compile with no cache. It writes benchmarks/results/bursts-DATE-COMMIT.json.

    python -m benchmarks.bursts [--other ../wt/base] [--rounds 5]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from benchmarks.qwen3 import MODEL_S, write_model
from benchmarks.result_files import ROOT, machine, spread, write_record
from benchmarks.workload import Workload

WORKLOADS = (Workload.uniform(1, 128, 128), Workload.uniform(16, 128, 128))
DEMO = (Workload.uniform(1, 32, 200), Workload.uniform(16, 32, 200))
BURST: dict[str, dict[str, Any]] = {"with bursts": {}, "without": {"max_decode_burst": 1}}


class Worker:
    """An engine in a process of its own, with the code of `checkout`."""

    def __init__(self, name: str, checkout: Path, model: str, options: dict[str, Any]):
        self.name = name
        environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "2"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), "--worker", model, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=checkout,
            env=environment,
        )
        self.start = self._answer()

    def run(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        """Completes `prompts`, and returns the seconds that took and the steps that it was made of."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([prompts, output_tokens]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine {self.name!r} has ended: see above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.communicate()


def work(model: str, options: dict[str, Any]) -> None:
    """Runs a worker, which reads lines of JSON and answers each with one."""
    from jaxvllm import LLM, SamplingParams

    common: dict[str, Any] = dict(max_model_len=512, max_num_seqs=16, warm_up="full", compilation_cache="")
    if model != "demo":
        common |= dict(load_format="dummy", dtype="float32")
    start, cpu = time.perf_counter(), time.process_time()
    llm = LLM(model=model, **(common | options))
    print(json.dumps({"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}), flush=True)
    for line in sys.stdin:
        prompts, output_tokens = json.loads(line)
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        llm.engine.take_reports()
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        reports = llm.engine.take_reports()
        answer = {
            "seconds": seconds,
            "host_seconds": sum(report.host_seconds for report in reports),
            "num_steps": sum(getattr(report, "num_steps", 1) for report in reports),
            "num_programs": len(reports),
        }
        print(json.dumps(answer), flush=True)


def measure(workers: list[Worker], workload: Workload, rounds: int) -> list[dict[str, Any]]:
    """Returns the rounds of each worker on the same prompts, in changing order."""
    runs: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in workers}
    for round_ in range(rounds + 1):
        prompts = [[token % 500 + 3 for token in prompt] for prompt in workload.prompts(round_)]
        for index in range(len(workers)):
            worker = workers[(index + round_) % len(workers)]
            runs[worker.name].append(worker.run(prompts, workload.output_tokens[0]))
    tokens = sum(workload.output_tokens)
    results = []
    for name, all_runs in runs.items():
        measured = all_runs[1:]  # the first run warms up
        results.append(
            {
                "engine": name,
                "workload": workload.name,
                "tokens_per_second": [tokens / run["seconds"] for run in measured],
                "host_us_per_token": [1e6 * run["host_seconds"] / tokens for run in measured],
                "steps_per_program": statistics.fmean(run["num_steps"] / run["num_programs"] for run in measured),
            }
        )
    return results


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], json.loads(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, help="another checkout of this project")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one to warm up")
    args = parser.parse_args()
    device = machine()
    results: list[dict[str, Any]] = []
    starts: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), MODEL_S)
        for model, path, workloads in (("model S", directory, WORKLOADS), ("demo", "demo", DEMO)):
            workers = [Worker(name, ROOT, path, options) for name, options in BURST.items()]
            if args.other is not None:
                workers.append(Worker(f"other: {args.other.name}", args.other.resolve(), path, {}))
            starts += [{"model": model, "engine": worker.name} | worker.start for worker in workers]
            for workload in workloads:
                results += [{"model": model} | one for one in measure(workers, workload, args.rounds)]
            for worker in workers:
                worker.__exit__()
    print("| model | workload | engine | tokens a second | host us a token | steps a program |")
    print("|---|---|---|---|---|---|")
    for one in results:
        speed, host = spread(one["tokens_per_second"], 0), spread(one["host_us_per_token"], 1)
        print(
            f"| {one['model']} | {one['workload']} | {one['engine']} | {speed} | {host} "
            f"| {one['steps_per_program']:.1f} |"
        )
    for one in starts:
        print(
            f"{one['model']}, {one['engine']}: {one['seconds']:.1f} s ({one['cpu_seconds']:.1f} s of CPU) to start, "
            "every program compiled"
        )
    written = write_record("bursts", device, {"results": results, "starts": starts})
    print(f"\nwritten to {written.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
