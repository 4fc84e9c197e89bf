"""Measures model S on this checkout beside another one, in one run whose rounds alternate between them.

Each checkout has an engine in a process of its own, which sleeps while the other is measured. One request runs, or
sixteen or 64 at once, with 128 tokens in and 128 out, greedy. This prints output tokens a second, the ratio of the
medians, the host's time for a token, and how long the programs took to compile with no cache, and writes
benchmarks/results/commits-DATE-COMMIT.json.

    python -m benchmarks.commits ../wt/base [--rounds 7]
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.bursts import Worker, measure
from benchmarks.qwen3 import MODEL_S, write_model
from benchmarks.result_files import ROOT, machine, spread, write_record
from benchmarks.workload import Workload

WORKLOADS = tuple(Workload.uniform(count, 128, 128) for count in (1, 16, 64))
OPTIONS: dict[str, Any] = {"max_num_seqs": 64}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="another checkout of this project")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds, after one to warm up")
    args = parser.parse_args()
    device, other = machine(), args.other.resolve()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), MODEL_S)
        workers = [
            Worker(name, of, directory, OPTIONS) for name, of in (("this", ROOT), (f"other: {other.name}", other))
        ]
        for workload in WORKLOADS:
            results += measure(workers, workload, args.rounds)
        for worker in workers:
            worker.__exit__()
    print("| workload | engine | tokens a second | of the other | host us a token |")
    print("|---|---|---|---|---|")
    for here, there in zip(results[::2], results[1::2], strict=True):
        ratio = statistics.median(here["tokens_per_second"]) / statistics.median(there["tokens_per_second"])
        for one, beside in ((here, f"{ratio:.3f}"), (there, "")):
            speed, host = spread(one["tokens_per_second"], 0), spread(one["host_us_per_token"], 1)
            print(f"| {one['workload']} | {one['engine']} | {speed} | {beside} | {host} |")
    starts = [{"engine": worker.name} | worker.start for worker in workers]
    for one in starts:
        print(f"{one['engine']}: {one['seconds']:.1f} s ({one['cpu_seconds']:.1f} s of CPU) until all was compiled")
    written = write_record("commits", device, {"results": results, "starts": starts})
    print(f"\nwritten to {written.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
