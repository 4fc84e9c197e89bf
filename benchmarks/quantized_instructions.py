"""Counts the instructions with which a GPU's kernel decodes matrices of few bits, beside the bytes that memory brings.

    python -m benchmarks.quantized_instructions DIR [CHIP ...]

Nothing is run, and no time is told. Each case of `SERVING` is compiled without a device; ptxas and nvdisasm, which DIR
must have, make SASS of the compiler's PTX. In the loop over stages of a matrix's rows, a warp takes 16 rows of codes
with their scales. The record tells how many bytes of them a multiprocessor could take in a clock, if its four
schedulers issued an instruction each in every clock, or if nothing but the integer units limited it, which take half a
warp's instruction in a clock (CUDA programming guide, arithmetic instructions). Where both are more than the bytes that
HBM brings a multiprocessor in a clock, memory hides the decoding as far as warps wait for nothing else.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.result_files import ROOT, machine, write_record
from pallas_kernels.chips import GpuChip, chip_named
from pallas_kernels.quantized_matmul.cases import SERVING
from pallas_kernels.quantized_matmul.gpu_tiles import choose_tiles

AOT = ROOT / ".aot" / "bin" / "python"
CHIPS = ("h100", "h200", "b200")
SCHEDULERS = 4
ROWS_OF_WARP = 16
# Instructions of the integer units, of which a multiprocessor has 64 lanes. Others have 128, or are of the whole warp.
INTEGER = ("LOP3", "SHF", "PRMT", "SGXT", "LEA", "VIADD", "IADD3", "ISETP", "SEL", "VIMNMX")
COMPILE = """
import sys, jax
from pathlib import Path
from pallas_kernels.chips import chip_named
from pallas_kernels.deviceless import compile_only_devices, lowering_for
from sharding.placement import make_mesh
from tools.aot_programs import programs

chip, directory = chip_named(sys.argv[1]), Path(sys.argv[2])
device = compile_only_devices(chip, 1)
for program in programs(chip, "quantized"):
    mesh = make_mesh(program.mesh, device)
    with lowering_for(mesh):
        program.compile(mesh)
    for dump in directory.glob("*"):
        if dump.suffix == ".ptx":
            dump.rename(directory / "ptx" / f"{program.name.split('/')[1]}.ptx")
        elif dump.is_file():
            dump.unlink()
"""


@dataclass(frozen=True)
class Loop:
    """The instructions of the innermost loop that multiplies, by name, of a program in SASS."""

    counts: Counter[str]

    @classmethod
    def of(cls, sass: str) -> "Loop":
        labels: dict[str, int] = {}
        program: list[tuple[str, str]] = []
        for line in sass.splitlines():
            if label := re.match(r"(\.L_x_\d+):", line):
                labels[label[1]] = len(program)
            elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z0-9]+)(.*)", line):
                program.append((found[1], found[2]))
        bodies = []
        for end, (name, rest) in enumerate(program):
            target = re.search(r"\((\.L_x_\d+)\)", rest)
            if name == "BRA" and target and labels.get(target[1], end + 1) <= end:
                names = [name for name, _ in program[labels[target[1]] : end + 1]]
                if any(name in ("HGMMA", "HMMA") for name in names):
                    bodies.append(names)
        return cls(min(map(Counter, bodies), key=Counter.total))

    def of_chip(self, chip: GpuChip, stage_bytes: float) -> dict[str, Any]:
        """Returns the counts and the bytes of a clock and multiprocessor, for so many bytes of a warp and stage."""
        integer = sum(self.counts[name] for name in INTEGER)
        return {
            "instructions": self.counts.total(),
            "integer": integer,
            "bytes_by_issue": round(SCHEDULERS * stage_bytes / self.counts.total(), 1),
            "bytes_by_integer_units": round(SCHEDULERS / 2 * stage_bytes / integer, 1),
            "bytes_of_memory": round(chip.hbm_bandwidth / chip.num_sms / chip.clock_ghz / 1e9, 1),
            "counts": dict(self.counts.most_common()),
        }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantized_instructions", description=__doc__)
    parser.add_argument("tools", type=Path, metavar="DIR", help="has ptxas of CUDA 12.9 or later, and nvdisasm")
    parser.add_argument("chips", nargs="*", default=CHIPS, metavar="CHIP")
    arguments = parser.parse_args()
    about, record = machine(), {}
    for name in arguments.chips:
        record[name] = count(name, arguments.tools)
        for case, row in record[name].items():
            print(name, case, *(f"{key} {value}" for key, value in row.items() if key != "counts"), flush=True)
    print(write_record("quantized-instructions", about, {"chips": record}))


def count(name: str, tools: Path) -> dict[str, dict[str, Any]]:
    """Returns what the loops of all cases take on that chip, by case."""
    chip = chip_named(name)
    assert isinstance(chip, GpuChip)
    rows = {}
    with tempfile.TemporaryDirectory(prefix="jaxvllm-sass-") as scratch:
        directory = Path(scratch)
        (directory / "ptx").mkdir()
        dumps = {"MOSAIC_GPU_DUMP_TO": scratch, "MOSAIC_GPU_DUMP_PTX": "1", "JAX_PLATFORMS": "cpu"}
        done = subprocess.run([AOT, "-c", COMPILE, name, scratch], cwd=ROOT, env=os.environ | dumps, text=True)
        if done.returncode:
            sys.exit(f"{name} does not compile: see above")
        for case in SERVING:
            ptx = directory / "ptx" / f"{case.name}.ptx"
            x = jax.ShapeDtypeStruct((case.num_rows, case.size_in), jnp.bfloat16)  # type: ignore[no-untyped-call]
            tiles = choose_tiles(x, (case.size_out, case.size_in), case.code, case.group, case.scale_dtype, 1, chip)
            if tiles is None or case.rounds_tokens or not ptx.is_file():  # in codes, no code is decoded
                continue
            # A stage has `line` bytes of codes of each row, and a part of its scales and zeros.
            share = case.num_bytes / (case.size_out * case.size_in / case.code.per_byte)
            rows[case.name] = Loop.of(disassembled(ptx, tools)).of_chip(chip, ROWS_OF_WARP * tiles.line * share)
    return rows


def disassembled(ptx: Path, tools: Path) -> str:
    """Returns the SASS that ptxas makes of a file."""
    target = re.search(r"^\.target (\w+)", ptx.read_text(), re.MULTILINE)
    assert target is not None, ptx
    cubin = ptx.with_suffix(".cubin")
    subprocess.run([tools / "ptxas", f"-arch={target[1]}", ptx, "-o", cubin], check=True)
    return subprocess.run([tools / "nvdisasm", "-c", cubin], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
