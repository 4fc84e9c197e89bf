"""Chooses which implementation of a kernel runs, and for which chip."""

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from pallas_kernels.chips import CHIPS, Chip, CpuChip, GpuChip, TpuChip, chip_named, chip_of
from pallas_kernels.cpu.host import host_chip

if TYPE_CHECKING:
    import jax  # processes without jax read the names of backends

logger = logging.getLogger(__name__)

# interpret runs the TPU's kernels on the CPU, and interpret-gpu the GPU's. reference is plain XLA, on any device.
BackendName = Literal["auto", "reference", "tpu", "gpu", "cpu", "interpret", "interpret-gpu"]
# The dtypes in which the kernels compute.
KERNEL_DTYPES = {"tpu": ("float32", "bfloat16"), "gpu": ("bfloat16", "float16"), "cpu": ("float32", "bfloat16")}

# The chips whose kernels are interpreted. An idle multiprocessor costs the interpreter as much as a busy one, so the
# GPU has few.
INTERPRETED_TPU, INTERPRETED_GPU, INTERPRETED_SMS = "v5e", "h200", 2
# The oldest GPUs with kernels, Turing: matrix units of older ones have no instruction that Mosaic GPU knows. Each
# kernel says which GPUs it takes, and plain XLA does its work on the others.
MOSAIC_GPU_CAPABILITY = (7, 5)


@dataclass(frozen=True)
class Backend:
    """`reference` is plain XLA and runs everywhere; `tpu` and `gpu` are Pallas kernels for one chip.

    `cpu` are kernels for one CPU (`pallas_kernels.cpu`). `interpret` runs a Pallas kernel on the CPU, with its copies
    and barriers. It serves proofs and is thousands of times slower.
    """

    kind: Literal["reference", "tpu", "gpu", "cpu"] = "reference"
    chip: Chip | CpuChip | None = None
    interpret: bool = False

    def __post_init__(self) -> None:
        wanted = {"reference": type(None), "tpu": TpuChip, "gpu": GpuChip, "cpu": CpuChip}[self.kind]
        if not isinstance(self.chip, wanted):
            raise ValueError(f"backend {self.kind} cannot be for the chip {self.chip}")
        if isinstance(self.chip, GpuChip) and self.chip.compute_capability < MOSAIC_GPU_CAPABILITY:
            raise NotImplementedError(
                f"the gpu kernels need compute capability 7.5 (Turing), {self.chip.name} has "
                f"{'.'.join(map(str, self.chip.compute_capability))}: use the backend reference"
            )

    @classmethod
    def of_chip(cls, chip: Chip) -> "Backend":
        """Returns the kernels for `chip`, or the reference where they cannot run."""
        if isinstance(chip, TpuChip):
            return cls("tpu", chip)
        return cls("gpu", chip) if chip.compute_capability >= MOSAIC_GPU_CAPABILITY else REFERENCE

    def computes(self, dtype: np.dtype) -> bool:
        """Returns whether there are kernels for a model that computes in `dtype`. Plain XLA computes in any."""
        if isinstance(self.chip, GpuChip) and dtype.name == "bfloat16" and not self.chip.computes_bf16:
            return False
        return self.kind == "reference" or dtype.name in KERNEL_DTYPES[self.kind]

    @classmethod
    def of_device(cls, name: BackendName, device: "jax.Device", dtype: np.dtype) -> "Backend":
        """Returns the backend that a user calls `name`, on `device`, for a model that computes in `dtype`.

        `auto` is the device's kernels if there are some for it and for `dtype`, else the reference; the log says why.
        Raises ValueError for an unknown name or another device's kernels, and NotImplementedError for kernels that were
        named explicitly and for which this device is too old or too new.
        """
        match name:
            case "reference":
                return REFERENCE
            case "interpret" | "interpret-gpu" if device.platform != "cpu":
                raise ValueError(
                    f"attention backend {name} runs on the CPU, this is a {device.platform.upper()}: use auto"
                )
            case "interpret":
                return cls("tpu", chip_named(INTERPRETED_TPU), interpret=True)
            case "interpret-gpu":
                chip = chip_named(INTERPRETED_GPU)
                assert isinstance(chip, GpuChip)
                return cls("gpu", replace(chip, num_sms=INTERPRETED_SMS), interpret=True)
            case "auto" if device.platform in KERNEL_DTYPES:
                try:
                    backend = cls("cpu", host_chip()) if device.platform == "cpu" else cls.of_chip(_chip(device))
                except NotImplementedError as error:
                    level = logging.INFO if device.platform == "cpu" else logging.WARNING
                    logger.log(level, "attention runs on plain XLA: %s", error)
                    return REFERENCE
                if not backend.computes(dtype):
                    logger.warning("attention runs on plain XLA: the %s kernels do not take %s", device.platform, dtype)
                    return REFERENCE
                return backend
            case "auto":
                return REFERENCE
            case "cpu" | "tpu" | "gpu" if device.platform == name:
                backend = cls(name, host_chip() if name == "cpu" else _chip(device))
                if not backend.computes(dtype):
                    raise NotImplementedError(
                        f"the {name} kernels do not take {dtype} on {device.device_kind}: use the attention backend "
                        "reference, or another dtype"
                    )
                return backend
            case "tpu" | "gpu":
                raise ValueError(
                    f"attention backend {name} needs a {name.upper()}, this is a {device.platform.upper()}: use auto, "
                    f"or {'interpret' if name == 'tpu' else 'interpret-gpu'} to run its kernels slowly on the CPU"
                )
            case "cpu":
                raise ValueError(f"attention backend cpu needs a CPU, this is a {device.platform.upper()}: use auto")
        raise ValueError(f"attention backend must be one of {', '.join(get_args(BackendName))}, not {name!r}")


REFERENCE = Backend()


def multiplies_bf16(device: "jax.Device") -> bool:
    """Returns whether `device` multiplies matrices of bfloat16, which GPUs before Ampere convert to float32 before."""
    capability = _compute_capability(device)
    return capability is None or capability >= (8, 0)


def _compute_capability(device: "jax.Device") -> tuple[int, int] | None:
    """Returns the compute capability of an NVIDIA GPU. AMD's is a name such as gfx942, and other devices have none."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def _chip(device: "jax.Device") -> Chip:
    """Returns the chip of `device`. A GPU outside the table is its generation's first, with its own number of SMs.

    Raises NotImplementedError for a GPU of a generation that has no kernels.
    """
    if device.device_kind in {chip.device_kind for chip in CHIPS.values()}:
        return chip_of(device.device_kind)
    capability = _compute_capability(device)
    for chip in CHIPS.values():
        if isinstance(chip, GpuChip) and chip.compute_capability == capability:
            return replace(chip, device_kind=device.device_kind, num_sms=device.core_count)
    raise NotImplementedError(f"there are no kernels for {device.device_kind}: use the attention backend reference")
