"""Tells how long libtpu expects the product of a few rows with a matrix to take, in each form that the matrix may have.

Nothing runs: programs are compiled for TPUs that are not here, in the environment .aot. The matrix is gate and up of
Qwen3-8B, 4096 by 24,576, in a stack of two layers. XLA multiplies by bfloat16, and our kernel by the others,
and the compiled program says how many cycles it expects. It has no estimate for our kernel, and reports how many
bundles of instructions each loop of it has, one a cycle. While they compute, the next codes are fetched, so the kernel
takes its bundles or its bytes, whichever is more, and a byte takes what the same compiler expects of a copy. `within`
is the time beside that of bfloat16, over the bytes beside those of bfloat16: 1 is faster by as much as there are fewer
bytes. It prints a table and writes benchmarks/results/quantized-estimate-DATE-COMMIT.json.

    JAX_PLATFORMS=cpu .aot/bin/python -m benchmarks.quantized_estimate [CHIP ..]
"""

import argparse
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from benchmarks.result_files import ROOT, machine, write_record
from benchmarks.states_estimate import bundle_dumps, cost_of, cycles_per_byte, tpu_named
from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms import Form, Matrix
from jaxvllm.models.forms.choice import QUANTIZATIONS, FewBitsForms
from jaxvllm.models.forms.few_bits import StoredAs
from jaxvllm.models.forms.plain import PLAIN
from jaxvllm.models.forms.scaled_groups import CODES, SCALES, ZEROS
from jaxvllm.models.forms.scaled_rows import ScaledRows
from jaxvllm.models.forms.tpu_groups import TpuGroups
from jaxvllm.models.ops import InStack, Slice, project
from pallas_kernels.backend import Backend
from pallas_kernels.chips import TpuChip
from pallas_kernels.deviceless import compile_only_devices
from pallas_kernels.quantized_matmul.code import E4M3, FLOAT4, UINT4
from pallas_kernels.quantized_matmul.tpu import QuantizedMatrices, choose_blocks, loop_lengths
from sharding.mesh import MeshShape
from sharding.placement import make_mesh, place

CHIPS = ("v5e", "v5p", "v6e", "v7x")
ROWS = (1, 2, 16)
LAYERS = 2
MATRIX = ParamDecl((24576, 4096), (None, None), storage="matrix")
WAYS: Mapping[str, StoredAs | Form] = {
    "bfloat16": PLAIN,
    "int8, by XLA": ScaledRows(),
    "int8": QUANTIZATIONS["int8"],
    "FP8, by XLA": ScaledRows(code=E4M3),
    "FP8": QUANTIZATIONS["fp8"],
    "FP8, blocks of 128": StoredAs(E4M3, 128, "float32"),
    "int4, groups of 128": QUANTIZATIONS["int4"],
    "int4, groups of 32": QUANTIZATIONS["int4_g32"],
    "int4, 128, with zeros": StoredAs(UINT4, 128, "float16", has_zeros=True),
    "MXFP4": StoredAs(FLOAT4, 32, "float8_e8m0fnu"),
    "NVFP4": StoredAs(FLOAT4, 16, "float32"),
}

_BUNDLE = re.compile(r"^ *(?:0x)?[0-9a-f]+ [A-Z]* *: (>*)")


def bundles_of(dumps: Path, lengths: tuple[int, ...]) -> int:
    """Returns the bundles that the only kernel whose dumps are there executes, where its loops have these lengths."""
    [file] = [path for path in dumps.iterdir() if "-quantized_matmul" in path.name and "01-final_bundles" in path.name]
    # The compiler marks the bundles of a loop with > and those of a loop within it with >>.
    depths = [len(found[1]) for line in file.read_text().splitlines() if (found := _BUNDLE.match(line))]
    loops = [length for length in lengths if length > 1]
    assert max(depths) == len(loops), (max(depths), lengths)
    return sum(math.prod(loops[:depth]) for depth in depths)


@dataclass(frozen=True)
class QuantizedEstimate:
    """The cycles of a product. `kernel` are the bundles of ours, and None where XLA multiplies."""

    chip: str
    form: str
    rows: int
    bytes: int
    cycles: float
    kernel: int | None
    within: float

    def row(self) -> str:
        kernel = "-" if self.kernel is None else f"{self.kernel / 1000:,.0f}"
        numbers = f"{self.bytes / 2**20:.0f}", f"{self.cycles / 1000:,.0f}", kernel, f"{self.within:.2f}"
        return f"| {' | '.join((self.chip, self.form, str(self.rows), *numbers))} |"


def compiled(form: Form, num_rows: int, mesh: Mesh) -> str:
    """Returns the text of the program that multiplies rows by one of the matrices of a stack."""
    everywhere = place(mesh)(())

    def on_device(shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)  # type: ignore[no-untyped-call]

    arrays = {
        name: on_device((LAYERS, *decl.shape), decl.dtype_in(jnp.bfloat16))
        for name, decl in form.declare(MATRIX).items()
    }

    def run(x: jax.Array, stack: jax.Array | Matrix, number: jax.Array) -> jax.Array:
        if form.reads_stacks:
            return project(x, InStack(stack, number))
        return project(x, Slice(jax.tree.map(lambda array: array[number], stack)))

    x, number = on_device((num_rows, MATRIX.shape[-1]), jnp.bfloat16), on_device((), jnp.int32)
    text = jax.jit(run).lower(x, form.wrapped(arrays), number).compile().as_text()
    assert text is not None
    return text


def lengths_of(form: TpuGroups, num_rows: int) -> tuple[int, ...]:
    """Returns the lengths of the kernel's loops."""

    def found(x: jax.Array, arrays: Mapping[str, jax.Array]) -> jax.Array:
        w = QuantizedMatrices(
            form.groups.code, form.group_of(MATRIX.shape[-1]), arrays[CODES], arrays[SCALES], arrays.get(ZEROS)
        )
        lengths.extend(loop_lengths(w, choose_blocks(x, w, 1, form.chip)))
        return x

    lengths: list[int] = []
    x = jnp.zeros((num_rows, MATRIX.shape[-1]), jnp.bfloat16)
    arrays = {
        name: jax.eval_shape(partial(jnp.zeros, (LAYERS, 1, *decl.shape), decl.dtype_in(jnp.bfloat16)))
        for name, decl in form.declare(MATRIX).items()
    }
    jax.eval_shape(found, x, arrays)
    return tuple(lengths)


def estimates(chip: TpuChip, dumps: Path) -> Iterator[QuantizedEstimate]:
    mesh = make_mesh(MeshShape(1, 1), compile_only_devices(chip, 1))
    per_byte, forms = cycles_per_byte(mesh), FewBitsForms(Backend.of_chip(chip))
    for num_rows in ROWS:
        plain = 0.0
        for name, way in WAYS.items():
            form = forms.of(way, way.group) if isinstance(way, StoredAs) else way
            assert form is not None
            for path in dumps.iterdir():
                path.unlink()
            decls = form.declare(MATRIX).values()
            num_bytes = sum(math.prod(decl.shape) * decl.dtype_in(jnp.bfloat16).itemsize for decl in decls)
            cycles, bundles = float(cost_of(compiled(form, num_rows, mesh)).once), None
            if isinstance(form, TpuGroups):
                bundles = bundles_of(dumps, lengths_of(form, num_rows)) // chip.num_cores
                cycles += max(bundles, num_bytes * per_byte)
            plain = plain or cycles
            within = cycles / plain * (2 * math.prod(MATRIX.shape)) / num_bytes
            yield QuantizedEstimate(chip.name, name, num_rows, num_bytes, cycles, bundles, within)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chips", nargs="*", default=CHIPS)
    chips, about, found = parser.parse_args().chips, machine(), []
    print("| chip | form | rows | MiB | thousand cycles | of the kernel's bundles | within |")
    print("|---|---|---|---|---|---|---|")
    with bundle_dumps() as dumps:
        for name in chips:
            for estimate in estimates(tpu_named(name), dumps):
                found.append(estimate)
                print(estimate.row(), flush=True)
    path = write_record("quantized-estimate", about, {"estimates": [asdict(estimate) for estimate in found]})
    print(f"\nwritten to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
