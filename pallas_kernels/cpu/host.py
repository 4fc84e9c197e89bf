"""The CPU of this machine, as LLVM names it."""

from functools import cache
from importlib.util import find_spec

from pallas_kernels.chips import CpuChip
from pallas_kernels.extras import install_command


@cache
def host_chip() -> CpuChip:
    """Returns this machine's CPU. Raises NotImplementedError where there are no kernels for it, or no llvmlite."""
    if find_spec("llvmlite") is None:
        raise NotImplementedError(f"the cpu kernels need llvmlite: {install_command('cpu')}")
    # Imported here: it takes a tenth of a second, which only an engine on CPU needs.
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features().flatten()
    chip = CpuChip(name=llvm.get_host_cpu_name(), triple=llvm.get_process_triple(), features=features)
    check_features(chip)
    return chip


def kernels_multiply_bfloat16() -> bool:
    """Returns whether there are kernels for this machine's CPU and it multiplies bfloat16 without converting it."""
    try:
        return host_chip().has_bf16_dot
    except NotImplementedError:
        return False


def check_features(chip: CpuChip) -> None:
    """Raises NotImplementedError for a CPU that the kernels are not for: without one instruction for a * b + c."""
    known = chip.features.split(",")
    if chip.triple.startswith("x86_64") and not {"+avx2", "+fma"} <= set(known):
        raise NotImplementedError(
            f"the cpu kernels need AVX2 and FMA, which {chip.name} lacks: use the backend reference"
        )
    if not chip.triple.startswith(("x86_64", "aarch64", "arm64")):
        raise NotImplementedError(
            f"the cpu kernels are for x86-64 and ARM64, not {chip.triple}: use the backend reference"
        )
