"""Measures output tokens per second of the embedded model on each mesh of eight virtual CPU devices, in one run.

The devices share THREADS cores, so no mesh can be faster than 1x1. The figures show the price of spreading: the
collectives and thinner matmuls of 1xM, and the schedulers and smaller batches of Dx1. Sixteen greedy requests run at
once, with 32 tokens in and 64 out, and ignore the end of text. Each round gives every mesh the same new token ids, in
another order of meshes. This prints medians and ranges, and writes benchmarks/results/meshes-DATE-COMMIT.json.

    python -m benchmarks.meshes [--rounds 5]
"""

import os

# This must come before jax is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

import argparse
import importlib.metadata
import platform
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.result_files import ROOT, machine, spread, write_record
from jaxvllm import LLM, SamplingParams, __version__
from sharding.mesh import MeshShape

THREADS = 2
MESHES = ("1x1", "1x2", "1x4", "1x8", "2x1", "2x4", "8x1")
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 32, 64
VOCAB_SIZE = 2048  # of the embedded model


def engine(mesh: str) -> LLM:
    """Returns an engine whose replicas' batches are full with their share of requests, so no row is padding."""
    rows = REQUESTS // MeshShape.parse(mesh).data
    return LLM(
        mesh=mesh,
        max_model_len=PROMPT_TOKENS + OUTPUT_TOKENS,
        max_num_seqs=rows,
        max_num_batched_tokens=128,
        row_buckets=(rows,),
        token_buckets=(128,),
        compilation_cache=None,  # so that building means compiling
        warm_up="full",
    )


def prompts(round_: int) -> list[list[int]]:
    """Returns the token ids of a round."""
    ids = np.random.default_rng(round_).integers(3, VOCAB_SIZE, (REQUESTS, PROMPT_TOKENS))
    return [[int(token) for token in row] for row in ids]


def run(llm: LLM, round_: int) -> float:
    """Completes the prompts of a round, and returns output tokens per second."""
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts(round_)], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    count = sum(len(output.outputs[0].token_ids) for output in outputs)
    if count != REQUESTS * OUTPUT_TOKENS:
        raise RuntimeError(f"mesh {llm.config.mesh} gave {count} tokens, not {REQUESTS * OUTPUT_TOKENS}")
    return count / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one to warm up")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    device = machine()
    engines: dict[str, LLM] = {}
    build_seconds: dict[str, float] = {}
    for mesh in MESHES:
        start = time.perf_counter()
        engines[mesh] = engine(mesh)
        build_seconds[mesh] = time.perf_counter() - start
    rates: dict[str, list[float]] = {mesh: [] for mesh in MESHES}
    try:
        for round_ in range(args.rounds + 1):
            shift = round_ % len(MESHES)
            for mesh in (*MESHES[shift:], *MESHES[:shift]):
                rate = run(engines[mesh], round_)
                if round_:
                    rates[mesh].append(rate)
    finally:
        for llm in engines.values():
            llm.close()

    print(f"{device['cpu']}, {THREADS} threads, load average {device['load_average_at_start']:.2f}\n")
    print(f"median (range) of {args.rounds} rounds\n")
    print("| mesh | output tokens/s | of 1x1 | load and compile, s |\n|---|---|---|---|")
    alone = statistics.median(rates["1x1"])
    results: list[dict[str, Any]] = []
    for mesh in MESHES:
        median = statistics.median(rates[mesh])
        print(f"| {mesh} | {spread(rates[mesh], 0)} | {median / alone:.2f} | {build_seconds[mesh]:.1f} |")
        results.append(
            {
                "mesh": mesh,
                "tokens_per_second": rates[mesh],
                "tokens_per_second_median": median,
                "build_seconds": build_seconds[mesh],
            }
        )
    record = {
        "threads": THREADS,
        "virtual_devices": 8,
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "jaxvllm": __version__,
            "jax": importlib.metadata.version("jax"),
        },
        "model": "demo",
        "dtype": "float32",
        "requests": REQUESTS,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "prompt_seed": "the round, from 1",
        "results": results,
    }
    path = write_record("meshes", device, record)
    print(f"\nwritten to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
