"""Compiles programs for one chip, in a process that a compiler's fatal error may end. `tools.aot` starts it.

It writes the names of the programs to stdout as one JSON list, and then for each program, in order, a JSON object that
is a `tools.aot_outcome.Outcome`. It needs JAX_PLATFORMS=cpu and, for kernels' resources, the variables of
`dump_environment`.
"""

import argparse
import ctypes
import json
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.sharding import Mesh

from jaxvllm.planner.hlo import largest_vmem_array
from pallas_kernels.chips import GpuChip, chip_named, chip_of
from pallas_kernels.deviceless import compile_only_devices, lowering_for
from sharding.placement import make_mesh
from tools.aot_outcome import KINDS, Outcome
from tools.aot_programs import Program, programs
from tools.kernel_resources import STDOUT, read_resources


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chip")
    parser.add_argument("kinds", help=f"some of {', '.join(KINDS)}, with commas between them")
    parser.add_argument("dumps", type=Path, help="where this process's compilers dump to, if they do; emptied")
    parser.add_argument("programs", nargs="*", help="their names; none: all of the chip")
    arguments = parser.parse_args()
    # What compilers print goes elsewhere, because stdout is for the outcomes alone.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    chip = chip_named(arguments.chip)
    kinds = [kind for kind in KINDS if kind in arguments.kinds.split(",")]
    known = {program.name: program for kind in kinds for program in programs(chip, kind)}
    chosen = [known[name] for name in arguments.programs or known]
    meshes = {
        shape: make_mesh(shape, compile_only_devices(chip, shape.num_devices))
        for shape in {program.mesh for program in chosen}
    }
    print(json.dumps([program.name for program in chosen]), file=answers)
    for program in chosen:
        shutil.rmtree(arguments.dumps, ignore_errors=True)
        arguments.dumps.mkdir()
        with (arguments.dumps / STDOUT).open("wb") as stdout:
            os.dup2(stdout.fileno(), sys.stdout.fileno())
        print(compile_program(program, meshes[program.mesh], arguments.dumps).to_json(), file=answers)


def compile_program(program: Program, mesh: Mesh, dumps: Path) -> Outcome:
    """Compiles the program and returns its outcome, which may be an exception."""
    before = _cpu_seconds()
    outcome = _compile(program, mesh, dumps)
    return replace(outcome, cpu_seconds=_cpu_seconds() - before)


def _cpu_seconds() -> float:
    """Returns those of this process, and of the assemblers that it started and that have ended."""
    return sum(os.times()[:4])


def _compile(program: Program, mesh: Mesh, dumps: Path) -> Outcome:
    start = time.monotonic()
    try:
        with lowering_for(mesh):
            _check_generation(mesh.devices.flat[0])
            compiled = program.compile(mesh)
    except NotImplementedError as error:
        return Outcome(program.name, "refused", time.monotonic() - start, _first_line(error))
    except Exception as error:  # whatever it is, the next program may compile
        return Outcome(
            program.name, "failed", time.monotonic() - start, f"{type(error).__name__}: {_first_line(error)}"
        )
    seconds = time.monotonic() - start
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and hlo is not None, "every compiler of ours tells"
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)  # what compilers have printed
    kernels = read_resources(dumps, hlo)
    spilling = next((kernel for kernel in kernels if kernel.spills_on_gpu), None)
    chip = chip_of(mesh.devices.flat[0].device_kind)
    target = chip.ptx_target if isinstance(chip, GpuChip) else None
    of_another = next((kernel for kernel in kernels if kernel.ptx_target != target), None)
    on_tpu = mesh.devices.flat[0].platform == "tpu"
    vmem_array_bytes, vmem_array = largest_vmem_array(hlo) if on_tpu else (0, "")
    message = ""
    if of_another is not None:
        message = f"{of_another.name} was compiled for {of_another.ptx_target}, and the chip is {target}"
    elif program.needs_kernel and not kernels:
        message = "no kernel of ours is in it"
    elif memory.alias_size_in_bytes < program.in_place_bytes:
        message = f"{program.in_place_bytes} bytes of pages and state are not updated in place"
    elif memory.temp_size_in_bytes >= program.copy_bytes:
        message = f"temporaries reach {program.copy_bytes} bytes: pages or a weight are copied"
    elif vmem_array_bytes >= program.copy_bytes:
        message = f"{vmem_array} in VMEM reaches {program.copy_bytes} bytes: pages or a weight are copied"
    elif spilling is not None and not program.may_spill:
        message = f"{spilling.name} spills {spilling.spill_bytes} bytes of registers"
    return Outcome(
        program.name,
        "failed" if message else "ok",
        seconds,
        message,
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        vmem_array_bytes=vmem_array_bytes,
        kernels=kernels,
    )


def _check_generation(device: jax.Device) -> None:
    """Raises AssertionError where Mosaic GPU would lower kernels for another generation than that of the device."""
    chip = chip_of(device.device_kind)
    if isinstance(chip, GpuChip):
        arch = mgpu.utils.get_arch()
        assert (arch.major, arch.minor) == chip.compute_capability, f"Mosaic GPU lowers for {arch}, not for {chip.name}"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


if __name__ == "__main__":
    main()
