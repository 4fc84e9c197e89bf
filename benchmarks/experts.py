"""Measures a layer of experts on this CPU, beside the bytes that it must read and beside a dense network.

The layer has 32 experts of 256 inner features on a hidden size of 512, of which a token chooses 4, in float32. An
engine goes through its layers in turn, and so does this, through so many that none stays in the caches. Two things
stand beside the milliseconds of a layer, its router included. One is the time in which this machine reads the experts
that were chosen, at the speed at which NumPy multiplies a large matrix by a vector just before and after. The other is
a dense network of as many operations: it has the size of one expert, and a row for each pair of a token and its expert.
XLA multiplies it in one measurement and our kernel in another, and the quicker one counts. All take turns, compiled as
steps are. It prints a table and writes benchmarks/results/experts-DATE-COMMIT.json.

    python -m benchmarks.experts [--rounds 25]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.result_files import ROOT, machine, spread, write_record
from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.experts import ExpertsFfn
from jaxvllm.models.ffn import Ffn, GatedFfn
from jaxvllm.models.forms import PLAIN_FORMS, Forms
from jaxvllm.models.layer_input import LayerInput, no_recur
from jaxvllm.models.ops import OneOf
from jaxvllm.models.params import dummy_array
from jaxvllm.runtime.recipe import COMPILER_OPTIONS
from pallas_kernels.backend import Backend
from pallas_kernels.cpu.host import host_chip
from sharding.axis import ALONE
from sharding.mesh import MeshShape
from sharding.placement import make_mesh, place

TOKENS = (1, 16, 64, 512)
HIDDEN, SIZE, NUM_EXPERTS, TOP_K = 512, 256, 32, 4
EXPERTS = ExpertsFfn(HIDDEN, SIZE, ExpertRouter(HIDDEN, NUM_EXPERTS, TOP_K))
DENSE = GatedFfn(HIDDEN, SIZE)
EXPERT_BYTES = 3 * HIDDEN * SIZE * 4
# A layer of experts is 50 MB, and as many dense layers would be 1.6: these come from a cache, as an expert's own
# matrices do once its first rows have been multiplied.
NUM_LAYERS = 8


@dataclass(frozen=True)
class Contender:
    """A network in the forms of some kernels, on so many rows for each token."""

    name: str
    ffn: Ffn
    forms: Forms
    rows_of_token: int

    def layers(self) -> dict[str, Any]:
        """Returns the arrays of all layers by name, each in a list that an index chooses from."""
        sharding = place(make_mesh(MeshShape(1, 1), jax.devices()[:1]))
        return {
            name: [
                self.forms.kept(
                    jnp.asarray(dummy_array(name, decl, layer, "float32", 0)),
                    name,
                    decl,
                    layer,
                    lambda part: sharding(part.axes),
                )
                for layer in range(NUM_LAYERS)
            ]
            for name, decl in self.ffn.declare().items()
        }

    def through_all(self, layers: dict[str, Any], x: jax.Array) -> jax.Array:
        """Returns the sum of what each of the layers returns for x."""
        nobody: Any = None
        where = {"memory": nobody, "number": 0, "window": 0, "backend": _kernels()}
        given = LayerInput(jnp.arange(len(x)), None, _no_attend, no_recur, ALONE, **where)

        def one(layer: jax.Array, total: jax.Array) -> jax.Array:
            weights = {name: OneOf(tuple(arrays), layer) for name, arrays in layers.items()}
            # The next layer's tokens depend on this one's, as in a model, and choose other experts.
            return total + self.ffn.apply(weights, x + total, given)

        total: jax.Array = jax.lax.fori_loop(0, NUM_LAYERS, one, jnp.zeros_like(x))
        return total


def _kernels() -> Backend:
    """Returns this machine's kernels."""
    return Backend("cpu", host_chip())


def _no_attend(*_: Any, **__: Any) -> Any:
    raise AssertionError("a feed-forward network attends to nothing")


@dataclass(frozen=True)
class Measured:
    """The milliseconds of one layer in each round."""

    name: str
    tokens: int
    ms: tuple[float, ...]


def chosen_bytes(layers: dict[str, Any], x: jax.Array) -> float:
    """Returns the mean bytes of the experts that the tokens choose, over the layers."""
    total, counts = jnp.zeros_like(x), []
    given = LayerInput(jnp.arange(len(x)), None, _no_attend, no_recur, ALONE, memory=None, number=0, window=0)  # type: ignore[arg-type]
    for layer in range(NUM_LAYERS):
        weights = {name: arrays[layer] for name, arrays in layers.items()}
        chosen, _ = EXPERTS.router.choose(weights, x + total, given.backend)
        counts.append(len(np.unique(np.asarray(chosen))))
        total = total + EXPERTS.apply(weights, x + total, given)
    return EXPERT_BYTES * statistics.fmean(counts)


def read_seconds_of_byte() -> float:
    """Returns the median seconds for a byte of 256 MiB that a product with a vector reads, of seven."""
    matrix, vector = np.ones((8192, 8192), np.float32), np.ones(8192, np.float32)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        matrix @ vector
        times.append(time.perf_counter() - start)
    time.sleep(0.3)  # OpenBLAS' threads spin for a while after a product, and would take a core from what comes next
    return statistics.median(times) / matrix.nbytes


def seconds(run: Callable[[], jax.Array]) -> float:
    start = time.perf_counter()
    run().block_until_ready()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="measured rounds, after one to warm up")
    args = parser.parse_args()
    device = machine()
    ours = Forms.chosen(None, _kernels(), may_turn=True)
    contenders = (
        Contender("experts", EXPERTS, ours, 1),
        Contender("dense, our kernel", DENSE, ours, TOP_K),
        Contender("dense, XLA", DENSE, PLAIN_FORMS, TOP_K),
    )
    layers = {one.name: one.layers() for one in contenders}
    random, results = np.random.default_rng(0), []
    read_bytes, read_ms = {}, {}
    for tokens in TOKENS:
        x = jnp.asarray(random.normal(size=(tokens, HIDDEN)), jnp.float32)
        read_bytes[tokens] = chosen_bytes(layers["experts"], x)
        runs = {
            one.name: partial(
                jax.jit(one.through_all, compiler_options=COMPILER_OPTIONS["cpu"]),
                layers[one.name],
                jnp.repeat(x, one.rows_of_token, axis=0),
            )
            for one in contenders
        }
        times: dict[str, list[float]] = {name: [] for name in runs}
        byte_seconds = read_seconds_of_byte()
        for round_ in range(args.rounds + 1):
            for name, run in runs.items():
                took = seconds(run)
                if round_:
                    times[name].append(1000 * took / NUM_LAYERS)
        byte_seconds = (byte_seconds + read_seconds_of_byte()) / 2
        read_ms[tokens] = 1000 * read_bytes[tokens] * byte_seconds
        results += [Measured(name, tokens, tuple(ms)) for name, ms in times.items()]
    print(f"{device['cpu']}, load average {device['load_average_at_start']:.2f}")
    print(f"milliseconds of a layer, median (range) of {args.rounds}\n")
    print("| tokens | network | ms | ms to read the chosen experts | times the reading | times the quicker dense one |")
    print("|---|---|---|---|---|---|")
    median = {(one.tokens, one.name): statistics.median(one.ms) for one in results}
    for one in results:
        line = f"| {one.tokens} | {one.name} | {spread(one.ms, 3)} |"
        if one.name == "experts":
            reading = read_ms[one.tokens]
            dense = min(median[one.tokens, other.name] for other in contenders if other.ffn is DENSE)
            ours_ms = median[one.tokens, one.name]
            line += f" {reading:.3f} | {ours_ms / reading:.2f} | {ours_ms / dense:.2f} |"
        else:
            line += " | | |"
        print(line)
    record = {
        "versions": {"jax": jax.__version__, "numpy": np.__version__},
        "layer": {"experts": NUM_EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "size": SIZE, "dtype": "float32"},
        "layers": NUM_LAYERS,
        "read_bytes": {str(tokens): num_bytes for tokens, num_bytes in read_bytes.items()},
        "read_ms": {str(tokens): ms for tokens, ms in read_ms.items()},
        "results": [asdict(one) | {"ms_median": statistics.median(one.ms)} for one in results],
    }
    path = write_record("experts", device, record)
    print(f"\nwritten to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
