"""Measures a model on this checkout beside another one, in one run whose rounds alternate between them.

Each checkout has an engine in a process of its own, which sleeps while the other is measured. One request runs, or
sixteen or 64 at once, with 128 tokens in and 128 out, greedy; of the shape of Qwen3 0.6B one or eight, with 64 in.
This prints output tokens a second, the ratio of the medians, the host's time for a token, and how long the programs
took to compile with no cache, and writes
benchmarks/results/commits-DATE-COMMIT.json.

    python -m benchmarks.commits ../wt/base [--model 0.6B] [--dtype bfloat16] [--rounds 7]
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.bursts import Worker, measure
from benchmarks.qwen3 import MODEL_S, qwen3_600m, write_model
from benchmarks.result_files import ROOT, machine, spread, write_record
from benchmarks.workload import Workload

MODELS = {"S": MODEL_S, "0.6B": qwen3_600m(max_position_embeddings=1024)}
WORKLOADS = {
    "S": tuple(Workload.uniform(count, 128, 128) for count in (1, 16, 64)),
    "0.6B": tuple(Workload.uniform(count, 64, 128) for count in (1, 8)),
}
OPTIONS: dict[str, Any] = {"max_num_seqs": 64}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="another checkout of this project")
    parser.add_argument("--model", choices=tuple(MODELS), default="S", help="(default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds, after one to warm up")
    args = parser.parse_args()
    device, other = machine(), args.other.resolve()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), MODELS[args.model])
        options = OPTIONS | {"dtype": args.dtype}
        workers = [
            Worker(name, of, directory, options) for name, of in (("this", ROOT), (f"other: {other.name}", other))
        ]
        for workload in WORKLOADS[args.model]:
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
    record = {"model": args.model, "dtype": args.dtype, "results": results, "starts": starts}
    written = write_record("commits", device, record)
    print(f"\nwritten to {written.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
