"""Measures attention on this CPU: GFLOP/s of prompts and GB/s of decoding, beside the machine's rate and torch's.

Keys and values are in their pages already, of eight layers where a row decodes. Ours, torch and a loop that only
multiplies and adds in registers take turns, and the fastest call of each counts: others may compute on the machine
meanwhile. Under `taskset -c 0` all of them have one thread. It prints the table and writes
benchmarks/results/cpu-attention-DATE-COMMIT.json.

    python -m benchmarks.cpu_attention [--cases REGEX] [--torch .oracle/bin/python]
"""

import argparse
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.peers.process import PeerProcess
from benchmarks.result_files import ROOT, machine, write_record
from jaxvllm.bench.kernels.counts import Work
from jaxvllm.bench.kernels.inputs import Inputs, random_pages
from pallas_kernels.backend import Backend
from pallas_kernels.cpu.emit import Emitter
from pallas_kernels.cpu.frame import Frame
from pallas_kernels.cpu.handlers import Handler
from pallas_kernels.cpu.host import host_chip
from pallas_kernels.cpu.pool import parallel_loop
from pallas_kernels.cpu.values import Value
from pallas_kernels.cpu.vectors import dot_pairs
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.cases import RaggedCase, RowCase

DECODE_LAYERS = 8  # as many bytes as a model reads, so that they are not in the first caches
SECONDS, ROUNDS = 0.7, 3  # of each contender in a round
SUMS, STEPS, ITEMS = 24, 20_000, 32  # of the loop in registers


def _cases() -> dict[str, RaggedCase]:
    """Returns prompts and rows that decode, with the heads of model S of benchmarks/cpu.py and of Qwen3 0.6B."""
    found = {}
    for model, (heads, kv_heads, size) in {"s": (6, 2, 64), "0.6b": (16, 8, 128)}.items():
        one = RaggedCase(model, heads, kv_heads, size, 16, 1, (RowCase(1, 1),))
        for tokens in (512, 2048, 4096):
            row = RowCase(tokens, tokens)
            found[f"{model}-prefill-{tokens}"] = replace(one, num_tokens=tokens, rows=(row,))
        for context in (2048, 4096):
            rows = (RowCase(1, context),)
            found[f"{model}-decode-{context}"] = replace(one, rows=rows)
            for dtype in ("int8", "float8_e4m3fn"):
                found[f"{model}-decode-{context}-{dtype}"] = replace(one, rows=rows, kv_dtype=dtype)
    return found


def fastest(call: Callable[[], jax.Array]) -> float:
    """Returns the seconds of the fastest of some calls."""
    call().block_until_ready()
    end, best = time.perf_counter() + SECONDS, float("inf")
    while time.perf_counter() < end:
        start = time.perf_counter()
        call().block_until_ready()
        best = min(best, time.perf_counter() - start)
    return best


class OurCalls:
    """Our kernel, layer after layer."""

    def __init__(self, case: RaggedCase, dtype: jnp.dtype):
        backend = Backend("cpu", host_chip())
        self._num_layers = DECODE_LAYERS if case.is_decode else 1
        self._pages = random_pages(case, dtype, self._num_layers, backend)
        self._inputs = Inputs.random(case, dtype)

        @jax.jit
        def layers(inputs: Inputs, pages: jax.Array) -> jax.Array:
            rows = inputs.rows()

            def layer(number: jax.Array, q: jax.Array) -> jax.Array:
                out, _ = ragged_paged_attention(
                    q, None, None, pages, number, rows, scale=case.scale, window=case.window,
                    quantization=case.quantization, kv_scales=inputs.kv_scales, backend=backend,
                )  # fmt: skip
                return out

            last: jax.Array = lax.fori_loop(0, self._num_layers, layer, inputs.q)
            return last

        self._layers = layers

    def seconds(self) -> float:
        """Returns the seconds of a layer."""
        return fastest(lambda: self._layers(self._inputs, self._pages)) / self._num_layers


def multiply_in_registers(e: Emitter, frame: Frame, dtype: str) -> None:
    """Emits ITEMS loops that add products to as many sums as registers hold, on all threads."""

    def item(t: Emitter, item: Value, captured: Sequence[Value]) -> None:
        sums = [t.variable(t.vector(0)) for _ in range(SUMS)]
        a = t.load(captured[0])
        with t.loop(0, t.integer(STEPS)):
            for total in sums:
                total.set((dot_pairs if dtype == "bfloat16" else t.fma)(a, a, total.get()))
        everything = sums[0].get()
        for total in sums[1:]:
            everything = everything + total.get()
        t.store(captured[1], everything)

    parallel_loop(e, frame, e.integer(ITEMS), (frame.argument(0).data, frame.result(0).data), item)


def machine_rate(dtype: str) -> float:
    """Returns the FLOP/s of products that are added up in registers."""
    chip = host_chip()
    paired = dtype == "bfloat16" and chip.has_bf16_dot
    handler = Handler(multiply_in_registers, (dtype if paired else "float32",), chip)
    x = jnp.ones(chip.lanes, jnp.float32)
    call = jax.jit(lambda x: handler(jax.typeof(x), x))
    return ITEMS * STEPS * SUMS * chip.lanes * (4 if paired else 2) / fastest(lambda: call(x))


def torch_seconds(peer: PeerProcess, case: RaggedCase, dtype: str) -> dict[str, Any]:
    row = case.rows[0]
    sizes = {name: getattr(case, name) for name in ("num_heads", "num_kv_heads", "head_size")}
    return peer.ask(sizes | {"query_len": row.query_len, "kv_len": row.kv_len, "dtype": dtype})


def measure(case: RaggedCase, dtype: str, peer: PeerProcess | None) -> dict[str, Any]:
    """Returns the seconds of a layer, ours and torch's, and the machine's rate."""
    ours = OurCalls(case, jnp.dtype(dtype))
    work = Work.of(case, jnp.dtype(dtype))
    rounds = []
    for _ in range(ROUNDS):
        theirs = None if peer is None or case.kv_dtype else torch_seconds(peer, case, dtype)
        rounds.append((ours.seconds(), machine_rate(dtype), theirs))
    seconds, rate = min(one for one, _, _ in rounds), max(one for _, one, _ in rounds)
    theirs = min((one for _, _, one in rounds if one), key=lambda one: float(one["seconds"]), default=None)
    return {"dtype": dtype, "flops": work.flops, "bytes": work.bytes, "seconds": seconds, "rate": rate, "torch": theirs}


def line(name: str, record: dict[str, Any]) -> str:
    seconds, rate, theirs = record["seconds"], record["rate"], record["torch"]
    told = f"{name:28} {record['dtype']:9} {seconds * 1e3:8.3f} ms, {record['flops'] / seconds / 1e9:6.1f} GFLOP/s"
    told += (
        f" ({record['flops'] / seconds / rate:4.0%} of {rate / 1e9:.0f}), {record['bytes'] / seconds / 1e9:5.1f} GB/s"
    )
    return told if theirs is None else f"{told}; torch {theirs['seconds'] * 1e3:.3f} ms ({theirs['way']})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=".", help="a regular expression that finds names such as s-prefill-4096")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--torch", type=Path, help="a Python that has torch")
    options = parser.parse_args()
    device = machine()
    peer = options.torch and PeerProcess(options.torch, ROOT / "benchmarks" / "peers" / "attention_torch_cpu.py")
    records = {}
    for name, case in _cases().items():
        if re.search(options.cases, name):
            for dtype in options.dtypes:
                records[f"{name}-{dtype}"] = record = measure(case, dtype, peer)
                print(line(name, record), flush=True)
    if peer:
        peer.close()
    print(write_record("cpu-attention", device, {"records": records}))


if __name__ == "__main__":
    main()
