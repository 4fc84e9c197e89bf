"""Measures the products of a CPU's steps, each with 1 to 512 rows: our kernels, XLA's, and oneDNN's through torch.

A product is repeated with one matrix, which stays in the caches where it fits. All take turns in short pieces, and the
shortest time of all repetitions counts. Torch is a process of its own (benchmarks/peers/matmul_torch.py), and is left
out without `--torch`. With `--one-core` each computes on one core, and the CPU time of its process counts: two threads
that wait for each other are no measure where other programs compute as well. It prints a table and writes
benchmarks/results/cpu-products-DATE-COMMIT.json.

    python -m benchmarks.cpu_products [--torch .oracle/bin/python] [--one-core] [--seconds 0.2] [--rounds 3]
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers.process import PeerProcess
from benchmarks.result_files import ROOT, machine, write_record
from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms.cpu_kernel import CpuKernel
from jaxvllm.models.forms.form import Experts, Form
from jaxvllm.models.forms.packed import Packed
from jaxvllm.models.forms.plain import PLAIN
from jaxvllm.runtime.host_heap import keep_temporaries
from pallas_kernels.cpu.host import host_chip

ROWS = (1, 2, 4, 8, 16, 64, 512)
SHAPES = ((4096, 384), (6144, 1024), (640, 384), (384, 2048), (1024, 2048))  # [out, in]
NUM_EXPERTS, CHOSEN, WIDTH, FEATURES = 32, 8, 512, 256
WORKER = ROOT / "benchmarks" / "peers" / "matmul_torch.py"
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Product:
    """x [rows, in] times a matrix [out, in], or times the matrices of experts, of which each row takes some."""

    size_out: int
    size_in: int
    dtype: str
    of_experts: bool = False

    @property
    def name(self) -> str:
        return f"{NUM_EXPERTS} x " * self.of_experts + f"{self.size_out}x{self.size_in}"

    @property
    def decl(self) -> ParamDecl:
        shape = (self.size_out, self.size_in)
        if self.of_experts:
            return ParamDecl((NUM_EXPERTS, *shape), (None,) * 3, storage="experts", dtype=self.dtype)
        return ParamDecl(shape, (None,) * 2, storage="matrix", dtype=self.dtype)

    def flops(self, rows: int) -> int:
        return 2 * rows * self.size_out * self.size_in * (CHOSEN if self.of_experts else 1)

    def calls(self, rows: int) -> Iterator[tuple[str, Callable[[], jax.Array]]]:
        """Yields what is measured in this process, by name."""
        rng, chip = np.random.default_rng(0), host_chip()
        matrix = jnp.asarray(rng.standard_normal(self.decl.shape, np.float32), self.dtype)
        num_rows = rows * (CHOSEN if self.of_experts else 1)
        x = jnp.asarray(rng.standard_normal((num_rows, self.size_in), np.float32), self.dtype)
        chosen = [rng.permutation(NUM_EXPERTS)[:CHOSEN] for _ in range(rows)]
        counts = np.bincount(np.concatenate(chosen), minlength=NUM_EXPERTS)
        starts = jnp.asarray(np.concatenate([[0], np.cumsum(counts)]), jnp.int32)
        forms: dict[str, Form] = {"packed": Packed(chip, self.dtype), "as_stored": CpuKernel(chip), "xla": PLAIN}
        for name, of_all in forms.items():
            form = of_all.of_matrix(self.decl)
            arrays = form.keep(matrix, {})

            def product(x: jax.Array, arrays: Any, starts: jax.Array, form: Form = form) -> jax.Array:
                if self.of_experts:
                    return form.grouped_product(x, Experts([arrays]), starts)
                return form.product(x, arrays, None)

            compiled = jax.jit(product).lower(x, arrays, starts).compile()
            yield name, partial(compiled, x, arrays, starts)


# Returns the seconds that have gone by, of the world or of the process.
Clock = Callable[[], float]


def shortest(call: Callable[[], jax.Array], seconds: float, clock: Clock) -> float:
    """Returns the seconds of the shortest of all repetitions."""
    call().block_until_ready()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = clock()
        call().block_until_ready()
        best = min(best, clock() - start)
    return best


def measured(
    product: Product, rows: int, peer: PeerProcess | None, seconds: float, rounds: int, one_core: bool
) -> dict[str, Any]:
    """Returns the shortest seconds of each, and what they are in operations and in bytes of the matrix."""
    clock = time.process_time if one_core else time.perf_counter
    calls, best = dict(product.calls(rows)), dict[str, float]()
    request = {"rows": rows, "out": product.size_out, "in": product.size_in, "dtype": product.dtype}
    for _ in range(rounds):
        for name, call in calls.items():
            best[name] = min(best.get(name, float("inf")), shortest(call, seconds, clock))
        if peer is not None and not product.of_experts:
            answer = peer.ask(request | {"seconds": seconds, "one_core": one_core})
            best["torch"] = min(best.get("torch", float("inf")), answer["seconds"])
    speeds = {name: product.flops(rows) / took / 1e9 for name, took in best.items()}
    return asdict(product) | {"product": product.name, "rows": rows, "seconds": best, "gflops": speeds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", type=Path, help="a Python that has torch")
    parser.add_argument("--seconds", type=float, default=0.2, help="for which each is repeated in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one-core", action="store_true", help="compute on one core, and count CPU time")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    args = parser.parse_args()
    if args.one_core:  # before JAX makes its threads; torch's process has the same core
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    keep_temporaries()  # as in an engine
    device = machine()
    peer = None if args.torch is None else PeerProcess(args.torch, WORKER)
    experts = ((FEATURES, WIDTH), (WIDTH, FEATURES))
    products = [Product(*shape, dtype) for dtype in args.dtypes for shape in SHAPES]
    products += [Product(*shape, dtype, of_experts=True) for dtype in args.dtypes for shape in experts]
    names = ("packed", "as_stored", "xla", "torch")
    print(f"GFLOP/s of the shortest repetition{', on one core' * args.one_core}\n")
    print("| matrix | dtype | rows | packed | as stored | XLA | torch | packed / the better of XLA and torch |")
    print("|---|---|---|---|---|---|---|---|")
    results = []
    for product in products:
        for rows in ROWS:
            one = measured(product, rows, peer, args.seconds, args.rounds, args.one_core)
            results.append(one)
            speeds = [one["gflops"].get(name) for name in names]
            ratio = speeds[0] / max(speed for speed in speeds[2:] if speed is not None)
            cells = " | ".join("-" if speed is None else f"{speed:.0f}" for speed in speeds)
            print(f"| {product.name} | {product.dtype} | {rows} | {cells} | {ratio:.2f} |", flush=True)
    versions = {"jax": jax.__version__, "numpy": np.__version__}
    if peer is not None:
        peer.close()
    path = write_record("cpu-products", device, {"versions": versions, "one_core": args.one_core, "results": results})
    print(f"\nwritten to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
