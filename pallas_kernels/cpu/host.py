"""The CPU of this machine, as LLVM names it."""

import ctypes
import logging
import os
from functools import cache
from importlib.util import find_spec

from pallas_kernels.chips import CpuChip
from pallas_kernels.extras import install_command

logger = logging.getLogger(__name__)

# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) of Linux on x86-64: Documentation/arch/x86/xstate.rst.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


@cache
def host_chip() -> CpuChip:
    """Returns this machine's CPU. Raises NotImplementedError where there are no kernels for it, or no llvmlite.

    Linux lets a process use the tile registers of AMX once it has asked. Where it refuses, the CPU has none.
    """
    if find_spec("llvmlite") is None:
        raise NotImplementedError(f"the cpu kernels need llvmlite: {install_command('cpu')}")
    # Imported here: it takes a tenth of a second, which only an engine on CPU needs.
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features().flatten()
    chip = CpuChip(name=llvm.get_host_cpu_name(), triple=llvm.get_process_triple(), features=features)
    check_features(chip)
    return permitted(chip)


def permitted(chip: CpuChip) -> CpuChip:
    """Returns `chip` without the tile registers of AMX where the system refuses them to this process.

    The permission is one for all threads, also for those to come, and for child processes until they start another
    program.
    """
    if not chip.has("amx-tile"):
        return chip
    if refusal := _request_tiles():
        logger.warning("kernels use vectors and no AMX: Linux refuses this process the tile registers (%s)", refusal)
        return chip.without(*(one[1:] for one in chip.features.split(",") if one.startswith("+amx-")))
    return chip


def _request_tiles() -> str:
    """Asks for the tile registers. Returns why they are refused, or nothing."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0:
        return ""
    return os.strerror(ctypes.get_errno())


def kernels_multiply_bfloat16() -> bool:
    """Returns whether there are kernels for this machine's CPU and it multiplies bfloat16 without converting it.

    ARM64 does not count: nobody has measured whether its instruction gains anything.
    """
    try:
        chip = host_chip()
    except NotImplementedError:
        return False
    return chip.has("avx512bf16") or chip.has_bf16_tiles


def check_features(chip: CpuChip) -> None:
    """Raises NotImplementedError for a CPU that the kernels are not for: without one instruction for a * b + c."""
    if chip.triple.startswith("x86_64") and not (chip.has("avx2") and chip.has("fma")):
        raise NotImplementedError(
            f"the cpu kernels need AVX2 and FMA, which {chip.name} lacks: use the backend reference"
        )
    if not chip.triple.startswith(("x86_64", "aarch64", "arm64")):
        raise NotImplementedError(
            f"the cpu kernels are for x86-64 and ARM64, not {chip.triple}: use the backend reference"
        )
