"""The device that a plan is for: a chip, which need not be here, or the CPU of this machine."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxvllm.runtime.memory import _host_bytes_available
from pallas_kernels.backend import KERNEL_DTYPES, REFERENCE, Backend
from pallas_kernels.chips import CHIPS, Chip, GpuChip, TpuChip, chip_named
from pallas_kernels.cpu.host import host_chip

CPU: Literal["cpu"] = "cpu"


@dataclass(frozen=True)
class Target:
    """A kind of device. Virtual devices of a CPU share its memory, and have no known rates and so no roofline."""

    name: str
    chip: Chip | None
    memory_bytes: int  # of one device; of a CPU, its part of what programs may still take

    @classmethod
    def named(cls, name: str, count: int) -> "Target":
        """Returns the device called `name`, of which there are `count`. Raises ValueError for an unknown name."""
        if name == CPU:
            return cls(CPU, None, _host_bytes_available() // count)
        if name not in CHIPS:
            raise ValueError(f"no device is called {name!r}: known are {', '.join(CHIPS)} and {CPU}")
        chip = chip_named(name)
        return cls(name, chip, chip.hbm_bytes)

    @property
    def platform(self) -> Literal["cpu", "gpu", "tpu"]:
        """JAX's name for the platform of such devices."""
        if self.chip is None:
            return CPU
        return "tpu" if isinstance(self.chip, TpuChip) else "gpu"

    @property
    def multiplies_bf16(self) -> bool:
        """Whether the matrix units of such devices multiply bfloat16. Of a CPU the engine finds that out itself."""
        return not isinstance(self.chip, GpuChip) or self.chip.computes_bf16

    def backend(self, dtype: np.dtype) -> Backend:
        """Returns the kernels that the engine chooses on such a device, for a model that computes in `dtype`."""
        backend = Backend.of_chip(self.chip) if self.chip else REFERENCE
        return backend if backend.computes(dtype) else REFERENCE

    def matrix_kernels(self, dtype: np.dtype) -> Backend:
        """Returns the kernels that the engine has multiply by matrices in few bits.

        They are those of `backend`, but for a CPU, where the forms of such matrices are those of our own kernels.
        """
        if self.chip or dtype.name not in KERNEL_DTYPES[CPU]:
            return self.backend(dtype)
        try:
            return Backend(CPU, host_chip())
        except NotImplementedError:  # there are none for this CPU
            return REFERENCE
