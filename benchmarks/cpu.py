"""Measures this engine beside its peers on two CPU cores, in one run that alternates between them, and draws it.

The models have random weights: S (Qwen3 architecture, 25M), one with experts (Qwen3 MoE, 32 experts a layer of which a
token chooses 4), and the shape of Qwen3 0.6B. S and experts run one request, or sixteen at once, with 128 tokens in and
128 out, 64 at once of mixed lengths, and prompts of 512 and 4,096 tokens up to their first token; 0.6B runs one
request and eight, with 64 tokens in and 128 out. All is greedy, and the end of text is ignored. Each round gives all
engines the same new token ids (so no prefix is cached), and the next round turns their order round. Before each run an
engine answers a short request, so that its weights are in memory again. All engines read the same numbers; with
--weights each rounds them to 8 or 4 bits in its own way, and is named by its format where it has several.

The peers are OpenVINO GenAI, llama.cpp's server, vLLM's build for CPUs and transformers; docs/performance.md says how
they are installed. vLLM and transformers make no 8 or 4 bits of a checkpoint, so they run plain weights alone, and
transformers gets no mixed lengths, because its batches are static. A peer that is not installed is left out.

This prints medians and ranges beside the rates that the memory and the arithmetic of this machine would allow, measured
here. The record, benchmarks/results/cpu-MODEL-DTYPE-WEIGHTS-DATE-COMMIT.json, has all rounds, the versions, the options
of each engine, and how many of the first tokens are those of this engine, which shows that all run the same model;
where weights are rounded in different ways they part soon. A picture is drawn beside it, with matplotlib, and again by
benchmarks/cpu_picture.py. Other load on the machine makes such figures several times worse, so the load average is part
of the record.

    python -m benchmarks.cpu [--model S] [--dtype float32] [--weights plain] [--peers OpenVINO vLLM] [--rounds 5]
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cpu_picture import draw
from benchmarks.peer_engines import (
    INSTALLATIONS,
    OUR_FORMS,
    Engine,
    Installation,
    Peer,
    Run,
    Setting,
    chosen_installations,
    our_engines,
)
from benchmarks.peer_files import PeerFiles
from benchmarks.qwen3 import MODEL_EXPERTS, MODEL_S, qwen3_600m
from benchmarks.result_files import ROOT, machine, spread, write_record
from benchmarks.roofline import Bound, Roofline, measure_roofline
from benchmarks.workload import Workload
from jaxvllm.cli.flags import whole

THREADS = 2
# Pools of threads are made when their library is imported, which these variables must precede.
POOLS = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), str(THREADS))
# Threads of some peers spin for 0.2 s after their work, which would take a core from the next engine.
PAUSE_SECONDS = 0.3
# What an engine does before each run, and is not measured. While others ran, its weights may have lost their place in
# memory: of 0.6B in four bits, llama.cpp gave 5 tokens a second in one round and 50 in the next.
WAKING = Workload.uniform(1, 8, 16)

LONGEST = 8192  # positions: the longest prompt and more
MODELS = {
    "S": MODEL_S | {"max_position_embeddings": LONGEST},
    "experts": MODEL_EXPERTS | {"max_position_embeddings": LONGEST},
    "0.6B": qwen3_600m(max_position_embeddings=LONGEST),
}
WORKLOADS = (
    Workload.uniform(1, 128, 128),
    Workload.uniform(16, 128, 128),
    Workload.mixed(64, (16, 512), (16, 128)),
    Workload.prompt(512),
    Workload.prompt(4096),
)
LARGE_WORKLOADS = (Workload.uniform(1, 64, 128), Workload.uniform(8, 64, 128))
# A number's bytes at least: scales come on top.
WEIGHT_BYTES = {"int8": 1.0, "int4": 0.5}


def workloads(model: str) -> tuple[Workload, ...]:
    return LARGE_WORKLOADS if model == "0.6B" else WORKLOADS


def measure(engines: Sequence[Engine], load: Workload, rounds: int) -> dict[str, list[Run]]:
    """Measures the engines. Round 0 warms them up and is dropped; after that, each round turns their order round."""
    engines = [engine for engine in engines if engine.takes(load)]
    runs: dict[str, list[Run]] = {engine.name: [] for engine in engines}
    for round_ in range(rounds + 1):
        prompts = load.prompts(round_)
        for engine in engines if round_ % 2 else engines[::-1]:
            time.sleep(PAUSE_SECONDS)
            engine.run(WAKING.prompts(round_), WAKING.output_tokens)
            run = engine.run(prompts, load.output_tokens)
            counts = [len(tokens) for tokens in run.tokens]
            if counts != list(load.output_tokens):
                raise RuntimeError(f"{engine.name} gave {counts} tokens, not {load.output_tokens}")
            if round_:
                runs[engine.name].append(run)
    return runs


def result(load: Workload, name: str, series: Sequence[Run], ours: Sequence[Run]) -> dict[str, Any]:
    """Returns the record of an engine's rounds. `ours` are those of this engine with the same prompts."""
    rates = [sum(load.output_tokens) / run.seconds for run in series]
    waits = [1000 * run.first_token_seconds for run in series]
    agreeing = [count for run, own in zip(series, ours, strict=True) for count in run.agreeing(own)]
    return {
        "workload": asdict(load),
        "engine": name,
        "tokens_per_second": rates,
        "tokens_per_second_median": statistics.median(rates),
        "first_token_ms": waits,
        "first_token_ms_median": statistics.median(waits),
        "first_tokens_that_agree": {
            "median": statistics.median(agreeing),
            "least": min(agreeing),
        },
    }


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=tuple(MODELS), default="S", help="(default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of what is computed (default: %(default)s)"
    )
    parser.add_argument(
        "--weights", choices=tuple(OUR_FORMS), default="plain", help="how they are rounded (default: %(default)s)"
    )
    names = [one.name for one in INSTALLATIONS]
    parser.add_argument("--peers", nargs="*", choices=names, help="(default: all that are installed)")
    parser.add_argument(
        "--rounds", type=whole(1, 100), default=5, metavar="N", help="after one to warm up (default: 5)"
    )


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table, and writes the record and the picture."""
    if any(os.environ.get(name) != value for name, value in POOLS.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | POOLS)
    installations, left_out = chosen_installations(args.peers, args.weights)
    print("\n".join(left_out), file=sys.stderr)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])  # the workers inherit it
    device, config = machine(), MODELS[args.model] | {"torch_dtype": args.dtype}
    loads = workloads(args.model)
    roofline = measure_roofline(args.dtype, THREADS)
    setting = Setting(args.dtype, THREADS, max(load.longest for load in loads), max(load.requests for load in loads))
    with tempfile.TemporaryDirectory() as directory:
        engines, measured = run_engines(
            PeerFiles(Path(directory), config), args.weights, setting, installations, loads, args.rounds
        )
    number_bytes = {"float32": 4.0, "bfloat16": 2.0}[args.dtype]
    bounds = {
        load.name: roofline.bound(config, load, WEIGHT_BYTES.get(args.weights, number_bytes), number_bytes)
        for load in loads
        if load.is_uniform
    }
    tell(device, roofline, measured, bounds, args.rounds)
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    for engine in engines:
        versions |= engine.versions
    record = {
        "threads": THREADS,
        "versions": versions,
        "model_name": args.model,
        "model": config,
        "dtype": args.dtype,
        "weights": args.weights,
        "settings": {engine.name: engine.settings for engine in engines},
        "prompt_seed": "[requests, tokens of all prompts, round], rounds from 1",
        "roofline": asdict(roofline) | {name: asdict(bound) for name, bound in bounds.items()},
        "load_average_at_end": os.getloadavg()[0],
        "results": [
            result(load, name, series, runs[engines[0].name])
            for load, runs in measured
            for name, series in runs.items()
        ],
    }
    path = write_record("-".join(("cpu", args.model, args.dtype, args.weights)), device, record)
    print(f"\nwritten to {path.relative_to(ROOT)}")
    if find_spec("matplotlib") is not None:
        draw([path], path.with_suffix(".png"))
    return 0


def run_engines(
    files: PeerFiles,
    weights: str,
    setting: Setting,
    installations: Sequence[Installation],
    loads: Sequence[Workload],
    rounds: int,
) -> tuple[list[Engine], list[tuple[Workload, dict[str, list[Run]]]]]:
    """Starts the engines, the first of which is this one, and returns them with what they did."""
    peers: list[Peer] = []
    try:
        for installation in installations:
            for name, kind in installation.engine_names(weights):
                print(f"starting {name}", file=sys.stderr)
                peers.append(Peer(name, installation, files.path(kind), setting))
        engines: list[Engine] = [*our_engines(files, weights, setting), *peers]
        measured = []
        for load in loads:
            print(f"measuring {load.name}", file=sys.stderr)
            measured.append((load, measure(engines, load, rounds)))
        return engines, measured
    finally:
        for peer in peers:
            peer.close()


def tell(
    device: dict[str, Any],
    roofline: Roofline,
    measured: Sequence[tuple[Workload, dict[str, list[Run]]]],
    bounds: dict[str, Bound],
    rounds: int,
) -> None:
    """Prints the table."""
    print(f"{device['cpu']}, {THREADS} threads, load average {device['load_average_at_start']:.2f}")
    print(
        f"reads {roofline.read / 1e9:.1f} GB/s, copies {roofline.copy / 1e9:.1f} GB/s,"
        f" {roofline.flops / 1e9:.0f} GFLOP/s\n"
    )
    print(f"median (range) of {rounds} rounds; of all requests, the median number of first tokens that are jaxvllm's\n")
    print("| workload | engine | output tokens/s | first token, ms | same first tokens |\n|---|---|---|---|---|")
    for load, runs in measured:
        ours = next(iter(runs.values()))
        for name, series in runs.items():
            one = result(load, name, series, ours)
            rates = "" if load.is_prompt else spread(one["tokens_per_second"])
            same = f"{one['first_tokens_that_agree']['median']:g} of {statistics.median(load.output_tokens):g}"
            print(f"| {load.name} | {name} | {rates} | {spread(one['first_token_ms'], 0)} | {same} |")
        if bound := bounds.get(load.name):
            rate = "" if load.is_prompt else f"{bound.tokens_per_second:.0f}"
            print(f"| {load.name} | roofline | {rate} | {1000 * bound.first_token_seconds:.0f} | |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    args = parser.parse_args()
    try:
        run(args)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
