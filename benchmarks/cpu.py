"""Measures output tokens per second on two CPU cores, of this engine and of its peers, in one run.

The model is S (Qwen3 architecture, 25.2M random weights), or one with experts (Qwen3 MoE, 32 experts a layer of which a
token chooses 4). One request runs, or sixteen at once, with 128 tokens in and 128 out, or 64 at once of mixed lengths;
all greedy, and the end of text is ignored. Each round gives all engines the same new token ids (so no prefix is
cached), and the next round turns their order round. This prints medians and ranges beside the rates that the memory and
the arithmetic of this machine would allow, measured here, and writes benchmarks/results/cpu-DATE-COMMIT.json
(cpu-experts- for the other model, and -bfloat16 before the date). Other load on the machine makes such figures several
times worse, so the load average is part of the record.

    python -m benchmarks.cpu [--model S] [--rounds 5] [--dtype float32]

The peers are transformers (`make oracle`), which gets no mixed lengths because its batches are static, and vLLM's build
for CPUs (`make .vllm/.stamp`). A peer that is not installed is left out.
"""

import os

# This must come before any library that starts a pool of threads is imported. See THREADS.
os.environ["OPENBLAS_NUM_THREADS"] = "2"
os.environ["OMP_NUM_THREADS"] = "2"

import argparse
import importlib.metadata
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from benchmarks.peers.process import PeerProcess
from benchmarks.qwen3 import qwen3, qwen3_moe, write_model
from benchmarks.result_files import ROOT, machine, spread, write_record

THREADS = 2
PEERS = ROOT / "benchmarks" / "peers"

VOCAB_SIZE = 4096
MODEL_S = qwen3(8, 384, 2048, 6, 2, 64, VOCAB_SIZE, max_position_embeddings=1024, rope_theta=1e4, torch_dtype="float32")
MODEL_EXPERTS = qwen3_moe(
    8, 512, 256, 32, 4, 8, 2, 64, VOCAB_SIZE, max_position_embeddings=1024, rope_theta=1e4, torch_dtype="float32"
)
MODELS = {"S": MODEL_S, "experts": MODEL_EXPERTS}


@dataclass(frozen=True)
class Workload:
    """Requests that arrive at once, each with a number of tokens in and out."""

    name: str
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]

    @classmethod
    def uniform(cls, requests: int, prompt_tokens: int, output_tokens: int) -> Self:
        plural = "s" if requests > 1 else ""
        name = f"{requests} request{plural}, {prompt_tokens} in, {output_tokens} out"
        return cls(name, (prompt_tokens,) * requests, (output_tokens,) * requests)

    @classmethod
    def mixed(cls, requests: int, prompt_tokens: tuple[int, int], output_tokens: tuple[int, int]) -> Self:
        """Returns requests whose lengths are uniform from the first of a pair to the second, the same in every run."""
        rng = np.random.default_rng(requests)
        lengths = [
            tuple(rng.integers(low, high + 1, requests).tolist()) for low, high in (prompt_tokens, output_tokens)
        ]
        first, last = ("-".join(map(str, pair)) for pair in (prompt_tokens, output_tokens))
        return cls(f"{requests} requests, {first} in, {last} out", *lengths)

    @property
    def requests(self) -> int:
        return len(self.prompt_tokens)

    @property
    def is_uniform(self) -> bool:
        return len(set(self.prompt_tokens)) == len(set(self.output_tokens)) == 1

    def prompts(self, round_: int) -> list[list[int]]:
        """Returns the token ids of a round. The workload is part of the seed, so that no two share a prompt."""
        rng = np.random.default_rng([self.requests, round_])
        return [rng.integers(3, VOCAB_SIZE, count).tolist() for count in self.prompt_tokens]


WORKLOADS = (
    Workload.uniform(1, 128, 128),
    Workload.uniform(16, 128, 128),
    Workload.mixed(64, (16, 512), (16, 128)),
)


@dataclass(frozen=True)
class Run:
    """One run of a workload: wall seconds, mean seconds to a first token, and output tokens of each request."""

    seconds: float
    first_token_seconds: float
    counts: list[int]


class Engine(Protocol):
    name: str
    versions: dict[str, str]

    def takes(self, load: Workload) -> bool: ...

    def run(self, prompts: list[list[int]], output_tokens: tuple[int, ...]) -> Run: ...


class Ours:
    """jaxvllm in this process."""

    name = "jaxvllm"

    def __init__(self, model: Path, dtype: str) -> None:
        from jaxvllm import LLM, __version__

        self.llm = LLM(
            model=str(model),
            load_format="dummy",
            dtype=dtype,
            max_model_len=1024,
            max_num_seqs=64,
            warm_up="full",  # compiling in the background would take the cores from all engines
        )
        self.versions = {"jaxvllm": __version__, "jax": importlib.metadata.version("jax")}

    def takes(self, load: Workload) -> bool:
        return True

    def run(self, prompts: list[list[int]], output_tokens: tuple[int, ...]) -> Run:
        from jaxvllm import SamplingParams

        params = [
            SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in output_tokens
        ]
        start = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        waits = [output.metrics.first_token_seconds or 0.0 for output in outputs if output.metrics]
        return Run(seconds, statistics.fmean(waits), [len(output.outputs[0].token_ids) for output in outputs])


@dataclass(frozen=True)
class Installation:
    """The environment in which a peer is installed, and its worker."""

    name: str
    python: Path
    worker: Path
    is_static: bool  # whether it takes only requests of one shape


INSTALLATIONS = (
    Installation("transformers", ROOT / ".oracle" / "bin" / "python", PEERS / "transformers_worker.py", is_static=True),
    Installation("vLLM", ROOT / ".vllm" / "bin" / "python", PEERS / "vllm_cpu.py", is_static=False),
)


class Peer:
    """A peer that is installed."""

    def __init__(self, installation: Installation, model: Path, dtype: str) -> None:
        self.name, self._is_static = installation.name, installation.is_static
        self._process = PeerProcess(installation.python, installation.worker)
        self.versions = self._process.ask({"load": str(model), "threads": THREADS, "dtype": dtype})["versions"]

    def takes(self, load: Workload) -> bool:
        return load.is_uniform or not self._is_static

    def run(self, prompts: list[list[int]], output_tokens: tuple[int, ...]) -> Run:
        return Run(**self._process.ask({"prompts": prompts, "max_tokens": output_tokens}))

    def close(self) -> None:
        self._process.close()


@dataclass(frozen=True)
class Roofline:
    """The best that this machine does with THREADS threads, in bytes and float32 operations per second.

    NumPy has no matrix products in bfloat16, which take half of the time where the CPU has instructions for them.
    """

    read: float
    copy: float
    flops: float

    def tokens_per_second(self, c: dict[str, Any], load: Workload) -> float:
        """Returns the output tokens per second if a step read each weight and key once, and nothing else took time.

        It is that of float32, for the model of the config `c` and requests of one shape. Rows choose experts at random.
        """
        heads = (2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"]) * c["head_dim"]
        multiplied = read = c["intermediate_size"]
        if num_experts := c.get("num_experts"):
            multiplied = c["num_experts_per_tok"] * c["moe_intermediate_size"]
            not_chosen = (1 - c["num_experts_per_tok"] / num_experts) ** load.requests
            read = num_experts * (1 - not_chosen) * c["moe_intermediate_size"]
        of_row, weights = (
            c["hidden_size"] * (c["num_hidden_layers"] * (heads + 3 * ffn) + c["vocab_size"])
            for ffn in (multiplied, read)
        )
        kv_token = 2 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"]
        [prompt_tokens], [output_tokens] = set(load.prompt_tokens), set(load.output_tokens)
        context = prompt_tokens + output_tokens / 2
        step = max(
            4 * (weights + load.requests * context * kv_token) / self.read,
            2 * of_row * load.requests / self.flops,
        )
        prefill = 2 * of_row * load.requests * prompt_tokens / self.flops
        return float(load.requests * output_tokens / (prefill + (output_tokens - 1) * step))


def best_seconds(work: Callable[[], object], tries: int = 7) -> float:
    seconds = []
    for _ in range(tries):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure_roofline() -> Roofline:
    """Measures reads by matrix-vector products, copies by a thread on each core, and arithmetic by matrix products."""
    matrix, vector = np.ones((8192, 8192), np.float32), np.ones(8192, np.float32)  # 256 MiB: beyond any cache
    halves = [(np.empty_like(half), half) for half in np.split(matrix, THREADS)]
    square = np.ones((2048, 2048), np.float32)

    def copy() -> None:
        threads = [threading.Thread(target=np.copyto, args=pair) for pair in halves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    copy()  # the first copy pays for the pages
    return Roofline(
        read=matrix.nbytes / best_seconds(lambda: matrix @ vector),
        copy=2 * matrix.nbytes / best_seconds(copy),
        flops=2 * 2048**3 / best_seconds(lambda: square @ square),
    )


def measure(engines: list[Engine], load: Workload, rounds: int) -> dict[str, list[Run]]:
    """Measures the engines. Round 0 warms them up and is dropped; after that, each round turns their order round."""
    engines = [engine for engine in engines if engine.takes(load)]
    runs: dict[str, list[Run]] = {engine.name: [] for engine in engines}
    for round_ in range(rounds + 1):
        prompts = load.prompts(round_)
        for engine in engines if round_ % 2 else engines[::-1]:
            run = engine.run(prompts, load.output_tokens)
            if run.counts != list(load.output_tokens):
                raise RuntimeError(f"{engine.name} gave {run.counts} tokens, not {load.output_tokens}")
            if round_:
                runs[engine.name].append(run)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one to warm up")
    parser.add_argument("--model", choices=tuple(MODELS), default="S")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])  # the worker inherits it
    device, model = machine(), MODELS[args.model]
    roofline = measure_roofline()
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), model)
        engines: list[Engine] = [Ours(Path(directory), args.dtype)]
        peers: list[Peer] = []
        try:
            for installation in INSTALLATIONS:
                if installation.python.exists():
                    peers.append(Peer(installation, Path(directory), args.dtype))
                else:
                    print(f"without {installation.name}: there is no {installation.python}", file=sys.stderr)
            engines += peers
            measured = [(load, measure(engines, load, args.rounds)) for load in WORKLOADS]
        finally:
            for peer in peers:
                peer.close()

    print(f"{device['cpu']}, {THREADS} threads, load average {device['load_average_at_start']:.2f}")
    print(
        f"reads {roofline.read / 1e9:.1f} GB/s, copies {roofline.copy / 1e9:.1f} GB/s,"
        f" {roofline.flops / 1e9:.0f} GFLOP/s\n"
    )
    print(f"median (range) of {args.rounds} rounds\n")
    print("| workload | engine | output tokens/s | first token, ms |\n|---|---|---|---|")
    results = []
    for load, runs in measured:
        for name, series in runs.items():
            rates = [sum(run.counts) / run.seconds for run in series]
            waits = [1000 * run.first_token_seconds for run in series]
            print(f"| {load.name} | {name} | {spread(rates)} | {spread(waits, 0)} |")
            results.append(
                {
                    "workload": asdict(load),
                    "engine": name,
                    "tokens_per_second": rates,
                    "tokens_per_second_median": statistics.median(rates),
                    "first_token_ms": waits,
                    "first_token_ms_median": statistics.median(waits),
                }
            )
        if load.is_uniform and args.dtype == "float32":
            print(f"| {load.name} | roofline | {roofline.tokens_per_second(model, load):.0f} | |")

    versions = {"python": platform.python_version(), "numpy": np.__version__}
    for engine in engines:
        versions |= engine.versions
    record = {
        "threads": THREADS,
        "versions": versions,
        "model": model,
        "dtype": args.dtype,
        "prompt_seed": "[requests, round], rounds from 1",
        "roofline": asdict(roofline)
        | {load.name: roofline.tokens_per_second(model, load) for load in WORKLOADS if load.is_uniform},
        "results": results,
    }
    parts = ("cpu", args.model if args.model != "S" else "", args.dtype if args.dtype != "float32" else "")
    path = write_record("-".join(filter(None, parts)), device, record)
    print(f"\nwritten to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
