"""Eight minutes on a GPU or TPU that was never seen before: is it right, and how fast is it?

The parts run one after the other, each in a process of its own with a time limit, and the most valuable come first.
What a part finds is written at once, so a part that fails, hangs or is cut off hides nothing:

1. `errors`: every case of attention by the device's own kernel, compared with float32. The worst error is told.
2. `attention`: the cases that have goals, timed beside the device's own copies and matrix products.
3. `8B` and `0.6B`: engines with dummy weights in 16 bits, or in int4 where the device has no room for them. Prefill of
   2k and 8k tokens, decode steps with 1, 8, 64 and 256 rows, then 256 requests of 512 tokens in and 256 out, with the
   share of the time in which the device had nothing to do. Beside each decode step stands the least that it must read,
   and how much of the copy bandwidth that is.
4. `peers`: attention of the libraries that are installed (FlashInfer, vLLM, torch, cuDNN) on the same cases.
5. `transformers`, where it is installed: prefill and decode steps of the 0.6B model, as in part 3.

    python -m benchmarks.first_light [--minutes 8] [--size tiny]

It runs on each of Colab's devices, a T4, an L4, an A100 or a TPU v5e-1, too. What has no kernel of ours there says so.
`--size tiny` runs all of it on a CPU, with interpreted kernels and small shapes, to prove this program. It writes
benchmarks/results/first_light-DATE-COMMIT.json.
"""

import argparse
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.peers.process import PeerProcess
from benchmarks.qwen3 import qwen3, qwen3_600m
from benchmarks.result_files import ROOT, machine, write_record

GOALS = r"^(decode-(64x4096|256x4096|8x32768)|prefill-(2048|8192))-q32-d128$"
# Seconds of each part. Together they are more than eight minutes: a part that ends early leaves its time to the others.
LIMITS = {"errors": 120, "attention": 90, "8B": 200, "0.6B": 120, "peers": 90, "transformers": 60}
LIMITS |= {"products": 90, "experts": 60, "states": 60}


@dataclass(frozen=True)
class Size:
    """The commands that the parts run."""

    models: Mapping[str, dict[str, Any]]
    engine: Mapping[str, Any]  # options of both engines
    error_cases: str  # a regular expression
    error_dtypes: tuple[str, ...]  # auto: the one of 16 bits that the device multiplies
    timed_cases: str
    backend: str  # of the kernels
    prompts: tuple[int, ...]  # tokens
    rows: tuple[int, ...]
    context: int  # tokens before the first decode step
    steps: int  # decode steps of a point
    requests: int  # end to end
    input: int
    output: int


FULL = Size(
    models={
        "8B": qwen3(36, 4096, 12288, 32, 8, 128, 151_936),
        "0.6B": qwen3_600m(),
    },
    engine=dict(
        dtype="auto",  # bfloat16, but float16 where the device does not multiply that
        max_model_len=8320,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        row_buckets=(1, 8, 64, 256),
        token_buckets=(512, 2048),
        page_size=64,
    ),
    error_cases=".",
    error_dtypes=("auto", "float32"),
    timed_cases=GOALS,
    backend="auto",
    prompts=(2048, 8192),
    rows=(1, 8, 64, 256),
    context=512,
    steps=32,
    requests=256,
    input=512,
    output=256,
)
TINY = Size(
    models=dict.fromkeys(("8B", "0.6B"), qwen3(1, 32, 64, 4, 2, 16, 128)),
    engine=dict(
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        row_buckets=(4,),
        token_buckets=(16,),
        num_pages=40,
        compilation_cache="",
    ),
    error_cases="^decode-gqa$",
    error_dtypes=("float32",),
    timed_cases="^decode-gqa$",
    backend="reference",
    prompts=(40,),
    rows=(1, 4),
    context=8,
    steps=6,
    requests=6,
    input=12,
    output=4,
)
SIZES = {"full": FULL, "tiny": TINY}

# What a part tells, a value after the other.
type Facts = Iterator[dict[str, Any]]


def make_quick() -> None:
    """Lets this process compile quickly and measure little, for the tiny size, whose figures nobody uses.

    Its programs take longer to compile than to run, and layers and copies that no cache of the CPU can hold take longer
    still.
    """
    import jax

    from jaxvllm.bench.kernels import ceilings, inputs, timing
    from jaxvllm.runtime.recipe import COMPILER_OPTIONS

    jax.config.update("jax_disable_most_optimizations", True)  # type: ignore[no-untyped-call]
    COMPILER_OPTIONS["cpu"]["xla_backend_optimization_level"] = 0
    inputs.MAX_LAYERS = 2
    timing.SAMPLES = 2
    ceilings.MATMUL_SIZE["cpu"] = 64
    ceilings.COPY_SIZE["cpu"] = 2**20


def errors(size: Size) -> Facts:
    """Compares every case with float32, on a small case of the same kind, and tells the worst one so far."""
    import jax
    import jax.numpy as jnp

    from jaxvllm.bench.kernels.contender import MAX_ERROR
    from jaxvllm.bench.kernels.device import describe
    from jaxvllm.bench.kernels.measure import KernelOptions
    from jaxvllm.bench.kernels.paged import OurAttention, PagedContender
    from pallas_kernels.backend import Backend, multiplies_bf16
    from pallas_kernels.ragged_paged_attention import backend_for

    device = jax.devices()[0]
    yield {"what": device.device_kind} | describe(device)
    auto = "bfloat16" if multiplies_bf16(device) else "float16"
    for dtype in (jnp.dtype(auto if name == "auto" else name) for name in size.error_dtypes):
        backend = Backend.of_device("interpret" if size is TINY else "auto", device, dtype)
        worst, failed, by_xla, count = ("", 0.0), [], 0, 0
        for case in KernelOptions(size.error_cases).chosen:
            own = backend_for(case.head_size, backend, case.latent_size, case.num_heads // case.num_kv_heads)
            ours, by_xla = PagedContender(own.kind, OurAttention(own), own, device), by_xla + (own != backend)
            try:
                error, count = ours.error(case, dtype), count + 1
            except Exception as problem:
                failed.append(f"{case.name}: {type(problem).__name__}: {str(problem).partition(chr(10))[0][:200]}")
                continue
            worst = max(worst, (case.name, error), key=lambda one: one[1])
            if not error <= MAX_ERROR[dtype]:
                failed.append(f"{case.name}: error {error:.1e}")
            yield {
                "what": f"errors of {backend.kind} in {dtype.name}",
                "cases": count,
                "left to plain XLA": by_xla,
                "worst": worst[0],
                "error": worst[1],
                "limit": MAX_ERROR[dtype],
                "failed": failed,
            }


def attention(size: Size) -> Facts:
    """Times the cases that have goals, ours and the reference."""
    from jaxvllm.bench.kernels.measure import KernelBenchmark, KernelOptions

    benchmark = KernelBenchmark(KernelOptions(size.timed_cases, attention_backend=size.backend))  # type: ignore[arg-type]
    yield {
        "what": "ceilings",
        "copy_bytes_per_second": benchmark.ceilings.copy,
        "matmul_flops_per_second": benchmark.ceilings.matmul,
    }
    for result in benchmark.run():
        yield {"what": result.line()} | result.record()


def engine(size: Size, name: str) -> Facts:
    """Measures prefill, decode and the whole of an engine with dummy weights."""
    import statistics

    import numpy as np

    from benchmarks.kernel_times import kernel_times
    from jaxvllm import LLM, SamplingParams
    from jaxvllm.bench.offline.padding import Padding

    rng, vocab = np.random.default_rng(0), size.models[name]["vocab_size"]

    def prompts(count: int, length: int) -> list[Any]:
        return [{"prompt_token_ids": ids} for ids in rng.integers(3, vocab, (count, length)).tolist()]

    def complete(llm: LLM, what: list[Any], output: int) -> tuple[float, list[Any]]:
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        llm.engine.take_reports()
        start = time.perf_counter()
        llm.generate(what, params, use_tqdm=False)
        return time.perf_counter() - start, llm.engine.take_reports()

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(size.models[name]))
        quantization = None if has_room_for(size.models[name]) else "int4"
        llm = LLM(model=directory, load_format="dummy", max_decode_burst=1, quantization=quantization, **size.engine)
    with llm:
        yield {
            "what": "engine takes requests",
            "seconds": time.perf_counter() - start,
            "quantization": quantization,
            "pages_hold": llm.engine.holders[0].memory_use().num_tokens,
        }
        seconds, _ = complete(llm, prompts(1, 8), 1)
        yield {"what": "first token", "seconds": time.perf_counter() - start, "request_seconds": seconds}
        llm.wait_until_compiled()
        yield {"what": "every program compiled", "seconds": time.perf_counter() - start}
        memory = llm.engine.holders[0].memory_use()
        kv_bytes = memory.pages / memory.num_tokens
        for length in size.prompts:
            complete(llm, prompts(1, length), 1)
            seconds = min(complete(llm, prompts(1, length), 1)[0] for _ in range(3))
            yield {"what": f"prefill of {length}", "seconds": seconds, "tokens_per_second": length / seconds}
        for rows in size.rows:
            if rows * (size.context + size.steps) > memory.num_tokens:
                yield {"what": f"decode step of {rows} rows", "problem": f"pages hold {memory.num_tokens} tokens"}
                continue
            # The first row decodes while the prompts of others are computed, and goes on until all have decoded.
            meanwhile = rows * size.context // size.engine["max_num_batched_tokens"]
            _, reports = complete(llm, prompts(rows, size.context), meanwhile + size.steps)
            steps = [one.device_seconds for one in reports if one.num_decode == rows and not one.num_prefill]
            least = memory.weights + rows * size.context * kv_bytes
            yield {
                "what": f"decode step of {rows} rows",
                "seconds": statistics.median(steps) if steps else None,
                "steps": len(steps),
                "least_bytes": least,
            }
        rows = size.rows[len(size.rows) // 2]
        times = kernel_times(lambda: complete(llm, prompts(rows, size.context), size.steps))
        yield {"what": f"kernels of {size.steps} steps of {rows} rows, and of their prompts", "kernels": times}
        before = llm.engine.stats()
        seconds, reports = complete(llm, prompts(size.requests, size.input), size.output)
        busy = sum(report.device_seconds for report in reports)
        yield {
            "what": f"{size.requests} requests of {size.input} in and {size.output} out",
            "seconds": seconds,
            "output_tokens_per_second": size.requests * size.output / seconds,
            "device_idle_share": max(0.0, 1 - busy / seconds),
            "host_seconds": sum(report.host_seconds for report in reports),
            "padding": Padding.between(before, llm.engine.stats()).record(),
        }


def has_room_for(config: Mapping[str, Any]) -> bool:
    """Returns whether the weights in 16 bits take no more than three quarters of the device, if its memory is known."""
    import jax

    from jaxvllm.models.families import model_spec
    from jaxvllm.models.params import num_parameters

    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    return limit is None or 2 * num_parameters(model_spec(config)) <= 0.75 * limit


def peers(size: Size) -> Facts:
    """Times the attention of installed libraries on the cases that have goals."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import jax.numpy as jnp

    from benchmarks.kernels.session import chosen, contenders, measure
    from benchmarks.kernels.worker import TorchWorker
    from pallas_kernels.backend import multiplies_bf16

    device, worker = jax.devices()[0], TorchWorker()
    in_16_bits = "bfloat16" if multiplies_bf16(device) else "float16"
    dtype = jnp.dtype("float32" if device.platform == "cpu" else in_16_bits)
    try:
        for case in chosen(size.timed_cases):
            for name, outcome in measure(case, dtype, contenders(device, dtype, worker)):
                seconds = None if outcome.timing is None else outcome.timing.median
                yield {"what": f"{case.name}, {name}", "seconds": seconds, "problem": outcome.problem}
    finally:
        worker.close()


def transformers(size: Size) -> Facts:
    """Measures prefill and decode steps of transformers: static batches of one length, a cache that grows, SDPA."""
    python = ROOT / ".oracle" / "bin" / "python"
    if not python.exists():
        if find_spec("transformers") is None or find_spec("torch") is None:
            yield {"what": "transformers", "problem": "not installed"}
            return
        python = Path(sys.executable)
    worker = PeerProcess(python, ROOT / "benchmarks" / "peers" / "transformers_worker.py")
    rng, config = random.Random(0), size.models["0.6B"]

    def generate(rows: int, length: int, output: int) -> dict[str, Any]:
        prompts = [rng.choices(range(3, config["vocab_size"]), k=length) for _ in range(rows)]
        return worker.ask({"prompts": prompts, "max_tokens": [output] * rows})

    try:
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(config))
            answer = worker.ask({"load": directory, "threads": os.cpu_count(), "dtype": size.engine["dtype"]})
        yield {"what": ", ".join(map(" ".join, answer["versions"].items()))} | answer
        for length in size.prompts:
            seconds = min(generate(1, length, 1)["seconds"] for _ in range(3))
            yield {"what": f"prefill of {length}", "seconds": seconds, "tokens_per_second": length / seconds}
        for rows in size.rows:
            generate(rows, size.context, 2)
            whole = generate(rows, size.context, size.steps)
            step = (whole["seconds"] - whole["first_token_seconds"]) / (size.steps - 1)
            yield {"what": f"decode step of {rows} rows", "seconds": step, "steps": size.steps - 1}
    finally:
        worker.close()


def step_kernels(part: str) -> Facts:
    """Compares and times the kernels beside attention, which are for GPUs."""
    from benchmarks.step_kernels import PARTS

    yield from PARTS[part](".")


PARTS: dict[str, Callable[[Size], Facts]] = {
    "errors": errors,
    "attention": attention,
    "8B": lambda size: engine(size, "8B"),
    "0.6B": lambda size: engine(size, "0.6B"),
    "peers": peers,
    "transformers": transformers,
    "products": lambda _: step_kernels("products"),
    "experts": lambda _: step_kernels("experts"),
    "states": lambda _: step_kernels("states"),
}


def run_part(name: str, size: str, seconds: float, take: Callable[[dict[str, Any]], None]) -> str | None:
    """Runs a part in a process of its own, and gives each of its facts to `take`. Returns why it did not end well."""
    command = [sys.executable, "-m", "benchmarks.first_light", "--size", size, "--part", name]
    end, rest = time.monotonic() + seconds, b""
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, cwd=ROOT, bufsize=0) as process,
    ):
        assert process.stdout is not None
        while True:
            left = end - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                process.kill()
                return f"cut off after {seconds:.0f} s"
            if not (data := os.read(process.stdout.fileno(), 1 << 16)):
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                take(json.loads(line))
        if process.wait():
            complaints.seek(0)
            *_, last = ["no message", *complaints.read().strip().splitlines()]
            return f"ended with status {process.returncode}: {last[:500]}"
    return None


def told(fact: Mapping[str, Any], copy: float | None) -> str:
    """Returns a fact as a line."""
    least, seconds = fact.get("least_bytes"), fact.get("seconds")
    share = f", {least / seconds / copy:.0%} of the copy bandwidth" if least and seconds and copy else ""
    numbers = {key: value for key, value in fact.items() if isinstance(value, int | float) and key != "least_bytes"}
    shown = ", ".join(f"{key.replace('_', ' ')} {value:.4g}" for key, value in numbers.items())
    problems = "".join(f"; {fact[key]}" for key in ("failed", "problem") if fact.get(key))
    return f"  {fact.get('what', '')}: {shown}{share}{problems}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="for all parts together (default: %(default)s)")
    parser.add_argument("--size", choices=SIZES, default="full", help="tiny: small shapes, on a CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all, in this order")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        if args.size == "tiny":
            make_quick()
        for fact in PARTS[args.part](SIZES[args.size]):
            print(json.dumps(fact), flush=True)
        return
    host, end = machine(), time.monotonic() + 60 * args.minutes
    results: dict[str, dict[str, Any]] = {}
    copy: float | None = None
    path = write_record("first_light", host, {"size": args.size, "parts": results})
    for name in args.parts:
        part = results[name] = {"facts": [], "problem": None, "seconds": 0.0}
        start = time.monotonic()

        def take(fact: dict[str, Any], part: dict[str, Any] = part) -> None:
            nonlocal copy
            copy = fact.get("copy_bytes_per_second", copy)
            part["facts"].append(fact)
            print(told(fact, copy), flush=True)
            write_record("first_light", host, {"size": args.size, "parts": results})

        print(f"\n{name}", flush=True)
        left = end - start
        part["problem"] = "no time left" if left < 1 else run_part(name, args.size, min(LIMITS[name], left), take)
        part["seconds"] = time.monotonic() - start
        if part["problem"]:
            print(f"  {name}: {part['problem']}", flush=True)
        write_record("first_light", host, {"size": args.size, "parts": results})
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
