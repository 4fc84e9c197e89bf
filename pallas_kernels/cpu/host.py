"""The CPU of this machine, as LLVM names it."""

from functools import cache
from importlib.util import find_spec

from pallas_kernels.chips import CpuChip


@cache
def host_chip() -> CpuChip:
    """Returns this machine's CPU. Raises NotImplementedError where llvmlite is missing, which compiles for it."""
    if find_spec("llvmlite") is None:
        raise NotImplementedError("the cpu kernels need llvmlite: pip install jaxvllm[cpu]")
    # Imported here: it takes a tenth of a second, which only an engine on CPU needs.
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features().flatten()
    return CpuChip(name=llvm.get_host_cpu_name(), triple=llvm.get_process_triple(), features=features)
