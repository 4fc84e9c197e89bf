"""What a plan is for: a chip that nobody has to own, or the CPU at hand."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxvllm.runtime.memory import _host_bytes_available
from pallas_kernels.backend import KERNEL_DTYPES, REFERENCE, Backend
from pallas_kernels.chips import CHIPS, Chip, TpuChip, chip_named

CPU: Literal["cpu"] = "cpu"


@dataclass(frozen=True)
class Target:
    """A kind of device. Of a CPU only the memory is known, which virtual devices share: no rates, so no roofline."""

    name: str
    chip: Chip | None
    memory_bytes: int  # of one device; of a CPU, its part of what programs may still take

    @classmethod
    def named(cls, name: str, count: int) -> "Target":
        """The device called `name`, of which there are `count`. ValueError: no such device."""
        if name == CPU:
            return cls(CPU, None, _host_bytes_available() // count)
        if name not in CHIPS:
            raise ValueError(f"no device is called {name!r}: known are {', '.join(CHIPS)} and {CPU}")
        chip = chip_named(name)
        return cls(name, chip, chip.hbm_bytes)

    @property
    def platform(self) -> Literal["cpu", "gpu", "tpu"]:
        """What JAX calls the platform of such devices."""
        if self.chip is None:
            return CPU
        return "tpu" if isinstance(self.chip, TpuChip) else "gpu"

    def backend(self, dtype: np.dtype) -> Backend:
        """The kernels that the engine chooses on such a device, for a model that computes in `dtype`."""
        backend = Backend.of_chip(self.chip) if self.chip else REFERENCE
        return backend if dtype.name in KERNEL_DTYPES.get(backend.kind, ()) else REFERENCE
