"""Measures products with one matrix of weights in each form that a CPU has, for a few rows and for many.

A layer's matrix is multiplied as an engine would: out of a list of layers, so many that none stays in the caches, each
in turn. The forms take turns, so that they see the same machine. Beside the time stands the speed at which the bytes of
the matrix went by, and its share of the speed at which a thread on each core reads and does no more, which takes a turn
of its own in each round. It prints a table and writes benchmarks/results/forms-DATE-COMMIT.json.

    python -m benchmarks.forms [--rounds 15]
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.result_files import ROOT, machine, spread, write_record
from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms import PLAIN
from jaxvllm.models.forms.choice import FewBitsForms
from jaxvllm.models.forms.cpu_decoded import CpuDecoded
from jaxvllm.models.forms.cpu_groups import CpuGroups
from jaxvllm.models.forms.cpu_kernel import CpuKernel
from jaxvllm.models.forms.few_bits import StoredAs
from jaxvllm.models.forms.form import Form
from jaxvllm.models.forms.packed import Packed
from jaxvllm.models.forms.scaled_rows import int8_form
from jaxvllm.models.large_pages import kept_zeros
from jaxvllm.models.ops import OneOf, project
from pallas_kernels.backend import Backend
from pallas_kernels.cpu.host import host_chip
from pallas_kernels.quantized_matmul.code import NF4, UINT4, UINT6
from sharding.mesh import MeshShape
from sharding.placement import make_mesh, place

ROWS = (1, 2, 4, 16, 64)
OUT, IN, NUM_LAYERS = 6144, 1024, 24
# Blocks of 256 inputs, whose groups of 32 have a scale and a minimum, or of 16 a scale.
Q4_K = StoredAs(UINT4, 32, "int8", span=256, has_mins=True)
Q6_K = StoredAs(UINT6, 16, "int8", span=256)
BLOCKS_OF_NF4 = StoredAs(NF4, 64, "float32")


@dataclass(frozen=True)
class Contender:
    """A form, and the dtype of the activations and, but for int8, of the matrix."""

    name: str
    form: Form
    dtype: str

    def matrices(self) -> list[Any]:
        """Returns the matrices of all layers as an engine would keep them."""
        decl = ParamDecl((OUT, IN), (None, None), storage="matrix", dtype=self.dtype)
        form = self.form.of_matrix(decl)
        sharding = place(make_mesh(MeshShape(1, 1), jax.devices()[:1]))
        where = {name: sharding(part.axes) for name, part in form.declare(decl).items()}
        random = np.random.default_rng(0)
        kept = []
        for _ in range(NUM_LAYERS):
            matrix = jnp.asarray(random.normal(size=(OUT, IN)) / IN**0.5, self.dtype)
            kept.append(form.wrapped(form.keep(matrix, where)))
        return kept


@dataclass(frozen=True)
class Measured:
    """The milliseconds of one product in each round."""

    name: str
    rows: int
    matrix_bytes: int
    ms: tuple[float, ...]

    @property
    def gigabytes_per_second(self) -> float:
        return self.matrix_bytes / statistics.median(self.ms) / 1e6


def through_all(matrices: list[Any], x: jax.Array) -> jax.Array:
    """Multiplies x by each of the matrices in turn, and returns the sum of what comes out."""

    def one(layer: jax.Array, total: jax.Array) -> jax.Array:
        return total + project(x, OneOf(tuple(matrices), layer))

    total: jax.Array = jax.lax.fori_loop(0, NUM_LAYERS, one, jnp.zeros((len(x), OUT), x.dtype))
    return total


def seconds(run: Callable[[], jax.Array]) -> float:
    start = time.perf_counter()
    run().block_until_ready()
    return time.perf_counter() - start


class Reading:
    """Reads memory, a part of it on each core, and does no more with it than NumPy's quickest reduction."""

    def __init__(self, num_bytes: int):
        num_threads = len(os.sched_getaffinity(0))
        self._threads = ThreadPoolExecutor(num_threads)
        memory = kept_zeros((num_bytes,), np.dtype(np.uint8))  # in large pages, as weights are
        memory[...] = 1
        self._parts = np.array_split(memory, num_threads)

    def gigabytes_per_second(self) -> float:
        start = time.perf_counter()
        list(self._threads.map(np.bitwise_or.reduce, self._parts))
        return sum(len(part) for part in self._parts) / (time.perf_counter() - start) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds, after one to warm up")
    args = parser.parse_args()
    device, chip = machine(), host_chip()
    integers = FewBitsForms(Backend("cpu", chip))
    contenders = (
        Contender("float32, XLA", PLAIN, "float32"),
        Contender("float32, as stored", CpuKernel(chip), "float32"),
        Contender("float32, packed", Packed(chip, "float32"), "float32"),
        Contender("bfloat16, as stored", CpuKernel(chip), "bfloat16"),
        Contender("bfloat16, packed", Packed(chip, "bfloat16"), "bfloat16"),
        Contender("int8, our kernel, float32 rows", int8_form(chip), "float32"),
        Contender("int8, our kernel, bfloat16 rows", int8_form(chip), "bfloat16"),
        Contender("int8 in panels, rounded rows", integers.named("int8"), "float32"),
        Contender("int4 in panels, rounded rows", integers.named("int4"), "float32"),
        Contender("int4_g32 in panels, rounded rows", integers.named("int4_g32"), "float32"),
        Contender("Q4_K in panels, rounded rows", CpuGroups(Q4_K, Q4_K.group, chip), "float32"),
        Contender("Q6_K in panels, rounded rows", CpuGroups(Q6_K, Q6_K.group, chip), "float32"),
        Contender("FP8 in panels, bfloat16 rows", integers.named("fp8"), "bfloat16"),
        Contender("NF4 in panels", CpuDecoded(BLOCKS_OF_NF4, BLOCKS_OF_NF4.group, chip), "float32"),
    )
    kept = {one.name: one.matrices() for one in contenders}
    num_bytes = {
        name: sum(array.nbytes for array in jax.tree.leaves(matrices)) // NUM_LAYERS for name, matrices in kept.items()
    }
    reading = Reading(OUT * IN * NUM_LAYERS)
    results, reads = [], dict[int, list[float]]()
    for rows in ROWS:
        runs = {
            one.name: partial(jax.jit(through_all), kept[one.name], jnp.ones((rows, IN), one.dtype))
            for one in contenders
        }
        times: dict[str, list[float]] = {name: [] for name in runs}
        reads[rows] = []
        for round_ in range(args.rounds + 1):
            reads[rows].append(reading.gigabytes_per_second())
            for name, run in runs.items():
                took = seconds(run)
                if round_:
                    times[name].append(1000 * took / NUM_LAYERS)
        results += [Measured(name, rows, num_bytes[name], tuple(ms)) for name, ms in times.items()]
    of_reading = {rows: statistics.median(speeds) for rows, speeds in reads.items()}
    print(f"{device['cpu']}, load average {device['load_average_at_start']:.2f}")
    print("reading alone:", ", ".join(f"{speed:.1f} GB/s beside {rows} rows" for rows, speed in of_reading.items()))
    print(f"milliseconds of a product with a matrix of {OUT} by {IN}, median (range) of {args.rounds}\n")
    print("| form | rows | ms | GB/s of the matrix | of reading alone |")
    print("|---|---|---|---|---|")
    for one in results:
        speed = one.gigabytes_per_second
        print(f"| {one.name} | {one.rows} | {spread(one.ms, 3)} | {speed:.1f} | {speed / of_reading[one.rows]:.2f} |")
    record = {
        "versions": {"jax": jax.__version__, "numpy": np.__version__},
        "matrix": [OUT, IN],
        "layers": NUM_LAYERS,
        "reading_alone_gigabytes_per_second": reads,
        "results": [asdict(one) | {"ms_median": statistics.median(one.ms)} for one in results],
    }
    path = write_record("forms", device, record)
    print(f"\nwritten to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
