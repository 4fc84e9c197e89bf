"""What a plan is for: a chip that nobody has to own, or the CPU at hand."""

import os
from dataclasses import dataclass

import numpy as np

from jaxvllm.runtime.memory import GPU_SHARE
from pallas_kernels.backend import KERNEL_DTYPES, REFERENCE, Backend
from pallas_kernels.chips import CHIPS, Chip, GpuChip, chip_named

CPU = "cpu"


@dataclass(frozen=True)
class Target:
    """A kind of device. Of a CPU only the memory is known, which virtual devices share: no rates, so no roofline."""

    name: str
    chip: Chip | None
    memory_bytes: int  # of one device, that a program can have

    @classmethod
    def named(cls, name: str, count: int) -> "Target":
        """The device called `name`, of which there are `count`. ValueError: no such device."""
        if name == CPU:
            return cls(CPU, None, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // count)
        if name not in CHIPS:
            raise ValueError(f"no device is called {name!r}: known are {', '.join(CHIPS)} and {CPU}")
        chip = chip_named(name)
        # For a TPU, that is what libtpu grants already.
        share = GPU_SHARE if isinstance(chip, GpuChip) else 1
        return cls(name, chip, int(chip.hbm_bytes * share))

    def backend(self, dtype: np.dtype) -> Backend:
        """The kernels that the engine chooses on such a device, for a model that computes in `dtype`."""
        backend = Backend.of_chip(self.chip) if self.chip else REFERENCE
        return backend if dtype.name in KERNEL_DTYPES.get(backend.kind, ()) else REFERENCE
