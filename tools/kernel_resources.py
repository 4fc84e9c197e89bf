"""Reads what a compiled Pallas kernel takes of its core from the dumps of compilers, which are the only source.

This is best effort, for the compilers that constraints.txt pins. Figures that are not found are None.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

_TPU_KERNEL = re.compile(r'^\s*(?:ROOT )?%?([\w.-]+) = .*custom_call_target="tpu_custom_call"', re.MULTILINE)
# The report is a page that shows one JSON object.
_VMEM_REPORT = "const DATA ="
# The name in a dump's directory of what a process has printed while it compiled.
STDOUT = "stdout"
_PTXAS_REPORT = re.compile(
    r"Compiling entry function '(?P<name>\w+?)(_mosaic_gpu_kernel)?' for '(?P<target>sm_\w+)'"
    r"(?P<rest>.*?)(?=Compiling entry function|\Z)",
    re.DOTALL,
)


@dataclass(frozen=True)
class KernelResources:
    """The resources of one kernel in bytes: of one core on a TPU, and of one thread block on a GPU."""

    name: str
    vmem_bytes: int | None = None  # the kernel's buffers, spilled registers included
    shared_memory_bytes: int | None = None  # beside barriers
    registers: int | None = None  # of a thread
    spill_bytes: int | None = None  # of all spilled vector registers, on a GPU of one thread
    ptx_target: str | None = None  # the generation of GPUs that ptxas compiled for

    @property
    def spills_on_gpu(self) -> bool:
        """Whether threads of a GPU keep registers in memory. Kernels for TPUs may: docs/kernels.md lists those."""
        return self.registers is not None and bool(self.spill_bytes)


def dump_environment(directory: Path) -> dict[str, str]:
    """Returns the environment with which a process's compilers write to `directory`, and those for GPUs to stdout."""
    return {
        # This gives a report on VMEM, without the dozens of texts of each operation.
        "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_pass_label_regex=^$",
        # With MOSAIC_GPU_DUMP_TO there would also be the module after each pass: 146 MB for the chunks of a state,
        # which then took 11.3 s and not 8.4.
        "MOSAIC_GPU_DUMP_RESOURCES": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
    }


def read_resources(directory: Path, hlo: str) -> tuple[KernelResources, ...]:
    """Returns the kernels of the one program whose dumps lie in `directory`, and whose optimized HLO is `hlo`."""
    return (*_tpu_kernels(directory, hlo), *_gpu_kernels(directory))


def _tpu_kernels(directory: Path, hlo: str) -> Iterator[KernelResources]:
    names = set(_TPU_KERNEL.findall(hlo))
    for report in sorted(directory.glob("*-vmem_report.html")):
        text = report.read_text()
        data = json.JSONDecoder().raw_decode(text, text.index(_VMEM_REPORT) + len(_VMEM_REPORT))[0]
        for name, use in data["hlo_breakdowns"].items():
            if name in names:
                buffers = [buffer for block in use["blocks"] for buffer in block["allocations"]]
                spilled = sum(buffer["size"] for buffer in buffers if buffer["tag"] == "SPILL")
                yield KernelResources(name, vmem_bytes=use["total_size"], spill_bytes=spilled)


def _gpu_kernels(directory: Path) -> Iterator[KernelResources]:
    """Pairs the kernels that were lowered with those that were compiled: both are printed in the same order."""
    stdout = directory / STDOUT
    text = stdout.read_text() if stdout.is_file() else ""
    shared = [int(number) for number in re.findall(r"^Resources\(smem_scratch_bytes=(\d+)", text, re.MULTILINE)]
    reports = list(_PTXAS_REPORT.finditer(text))
    of_each = shared if len(shared) == len(reports) else [None] * len(reports)
    for number, shared_memory_bytes, report in zip(count(), of_each, reports):
        yield KernelResources(
            f"{report['name']}_{number}",
            shared_memory_bytes=shared_memory_bytes,
            registers=_number(r"Used (\d+) registers", report["rest"]),
            spill_bytes=_number(r"(\d+) bytes spill stores", report["rest"]),
            ptx_target=report["target"],
        )


def _number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(found[1]) if found else None
