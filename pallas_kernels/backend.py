"""Which implementation of a kernel runs, and for which chip."""

from dataclasses import dataclass, replace
from typing import Literal

import jax

from pallas_kernels.chips import CHIPS, Chip, GpuChip, TpuChip, chip_named, chip_of

BACKEND_NAMES = ("auto", "reference", "tpu", "gpu", "interpret", "interpret-gpu")

# The chips whose kernels are interpreted. Multiprocessors without work take the interpreter as long as others: few.
INTERPRETED_TPU, INTERPRETED_GPU, INTERPRETED_SMS = "v5e", "h200", 4
# Mosaic GPU of jax 0.11.2 takes the process along when it compiles for less: a fatal error in LLVM.
MOSAIC_GPU_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class Backend:
    """`reference` is plain XLA and runs everywhere; `tpu` and `gpu` are Pallas kernels for one chip.

    `interpret` runs such a kernel on the CPU, copies and barriers included: for proofs, thousands of times slower.
    """

    kind: Literal["reference", "tpu", "gpu"] = "reference"
    chip: Chip | None = None
    interpret: bool = False

    def __post_init__(self) -> None:
        wanted = {"reference": type(None), "tpu": TpuChip, "gpu": GpuChip}[self.kind]
        if not isinstance(self.chip, wanted):
            raise ValueError(f"backend {self.kind} cannot be for the chip {self.chip}")
        if isinstance(self.chip, GpuChip) and self.chip.compute_capability < MOSAIC_GPU_CAPABILITY:
            raise NotImplementedError(
                f"the gpu kernels need compute capability 9.0 (Hopper), {self.chip.name} has "
                f"{'.'.join(map(str, self.chip.compute_capability))}: use the backend reference"
            )

    @classmethod
    def of_chip(cls, chip: Chip) -> "Backend":
        """The kernels for `chip`; the reference where they cannot run."""
        if isinstance(chip, TpuChip):
            return cls("tpu", chip)
        return cls("gpu", chip) if chip.compute_capability >= MOSAIC_GPU_CAPABILITY else REFERENCE

    @classmethod
    def of_device(cls, name: str, device: jax.Device) -> "Backend":
        """The backend that a user calls `name`, on `device`. auto: the fastest that runs there.

        Raises ValueError for a name that means nothing or another device's kernels, NotImplementedError for a device
        that is too old or that no chip is known for.
        """
        match name:
            case "reference":
                return REFERENCE
            case "interpret":
                return cls("tpu", chip_named(INTERPRETED_TPU), interpret=True)
            case "interpret-gpu":
                chip = chip_named(INTERPRETED_GPU)
                assert isinstance(chip, GpuChip)
                return cls("gpu", replace(chip, num_sms=INTERPRETED_SMS), interpret=True)
            case "auto":
                return REFERENCE if device.platform == "cpu" else cls.of_chip(_chip(device))
            case "tpu" | "gpu" if device.platform == name:
                return cls(name, _chip(device))
            case "tpu" | "gpu":
                raise ValueError(
                    f"attention backend {name} needs a {name.upper()}, this is a {device.platform.upper()}: use auto, "
                    f"or {'interpret' if name == 'tpu' else 'interpret-gpu'} to run its kernels slowly on the CPU"
                )
        raise ValueError(f"attention backend must be one of {', '.join(BACKEND_NAMES)}, not {name!r}")


REFERENCE = Backend()


def _chip(device: jax.Device) -> Chip:
    """The chip of `device`. A GPU that is not in the table is its generation's first, with its own number of SMs."""
    if device.platform != "gpu" or device.device_kind in {chip.device_kind for chip in CHIPS.values()}:
        return chip_of(device.device_kind)
    capability = tuple(int(part) for part in device.compute_capability.split("."))
    relatives = [c for c in CHIPS.values() if isinstance(c, GpuChip) and c.compute_capability == capability]
    if not relatives:
        raise NotImplementedError(
            f"no chip of compute capability {device.compute_capability} is known ({device.device_kind}): use the "
            "attention backend reference"
        )
    return replace(relatives[0], device_kind=device.device_kind, num_sms=device.core_count)
