"""Tells what compilers expect of a decode step with adapters (LoRA) on chips that are not here.

Nothing runs: steps of 16 rows in bfloat16 are compiled, in the environment .aot, as an engine compiles them, without
adapters and with room for some of rank 16. For TPUs the compiled program says how many cycles it expects each operation
of XLA to take; our attention kernel has no such estimate and counts nothing. A compiler for GPUs tells no times: there
the bytes of weights, adapters and pages are told. Beyond `MOST_MASKED` slots a loop goes over the adapters in
use, and one turn of it in all layers is a figure of its own. It prints a table and writes
benchmarks/results/adapter-estimate-DATE-COMMIT.json.

    JAX_PLATFORMS=cpu .aot/bin/python -m benchmarks.adapter_estimate [CHIP ..]
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax.numpy as jnp

from benchmarks.qwen3 import qwen3, qwen3_600m
from benchmarks.result_files import ROOT, machine, write_record
from benchmarks.states_estimate import cost_of
from jaxvllm.models.families import find_family, model_spec
from jaxvllm.models.forms import Forms
from jaxvllm.models.lora import DOWN, LAYERS, LORA, OUTSIDE, RATIO, UP
from jaxvllm.models.lora_arrays import LoraArrays, LoraRoom
from jaxvllm.models.params import Params, abstract_params
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.cache_shape import CacheShape
from jaxvllm.runtime.step_program import StepCompiler
from pallas_kernels.backend import Backend
from pallas_kernels.chips import TpuChip, chip_named
from pallas_kernels.deviceless import compile_only_devices
from sharding.mesh import MeshShape
from sharding.placement import make_mesh

CHIPS = ("v6e", "h200")
MODELS = {"0.6B": qwen3_600m(), "8B": qwen3(36, 4096, 12288, 32, 8, 128, 151_936)}
ROWS, RANK = 16, 16
SLOTS = (0, 1, 4, 16, 64)  # 0: the step has no adapters
DTYPE = jnp.dtype(jnp.bfloat16)


@dataclass(frozen=True)
class AdapterEstimate:
    """A decode step with room for so many adapters. What the compiler does not tell is None."""

    chip: str
    model: str
    slots: int
    cycles: int | None  # of XLA's operations
    cycles_of_adapter: int | None  # for each that is in use, where a loop goes over them
    megabytes: float | None  # of weights, adapters and pages


def estimate(chip_name: str, name: str, config: dict[str, Any], slots: int) -> AdapterEstimate:
    """Compiles one step."""
    chip = chip_named(chip_name)
    mesh = make_mesh(MeshShape(1, 1), compile_only_devices(chip, 1))
    backend, spec = Backend.of_chip(chip), model_spec(config)
    forms = Forms.chosen(None, backend, may_turn=False)
    params = abstract_params(spec, DTYPE, "stacked", mesh, forms)
    if slots:
        room = LoraRoom(slots, RANK)
        spec = LoraArrays.of(spec, find_family(config), MeshShape(1, 1), "stacked", DTYPE, forms, room).spec
        with_room = abstract_params(spec, DTYPE, "stacked", mesh)
        params[LORA] = {LAYERS: _of_adapters(with_room["layers"]), OUTSIDE: _of_adapters(with_room)}
    shape = CacheShape(num_pages=256, page_size=16, num_slots=ROWS, max_pages=256, dtype=DTYPE, step_tokens=256)
    compiler = StepCompiler(params, shape.pages(spec, backend, mesh), spec, shape, backend, mesh)
    program = compiler.compile_begin(replace(Bucket(ROWS, ROWS), is_adapted=slots > 0))
    if isinstance(chip, TpuChip):
        text = program.as_text()
        assert text is not None, "libtpu tells"
        cost = cost_of(text)
        return AdapterEstimate(chip_name, name, slots, cost.once, cost.each, None)
    memory = program.memory_analysis()
    assert memory is not None, "XLA tells"
    return AdapterEstimate(chip_name, name, slots, None, None, memory.argument_size_in_bytes / 1e6)


def _of_adapters(arrays: Params) -> Params:
    return {name: array for name, array in arrays.items() if name.startswith((DOWN, UP, RATIO))}


def estimates(chip: str) -> Iterator[AdapterEstimate]:
    for name, config in MODELS.items():
        for slots in SLOTS:
            yield estimate(chip, name, config, slots)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chips", nargs="*", default=CHIPS)
    chips, about, found = parser.parse_args().chips, machine(), list[AdapterEstimate]()
    columns = ("chip", "model", "slots", "cycles", "cycles_of_adapter", "megabytes")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for chip in chips:
        for one in estimates(chip):
            found.append(one)
            values = asdict(one).values()
            told = (f"{value:,.1f}" if isinstance(value, float) else str(value) for value in values)
            print(f"| {' | '.join(told)} |", flush=True)
    record = {"rows": ROWS, "rank": RANK, "models": MODELS, "estimates": [asdict(one) for one in found]}
    print(f"\nwritten to {write_record('adapter-estimate', about, record).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
