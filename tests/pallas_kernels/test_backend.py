"""Which kernels run on which device."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import REFERENCE, Backend, BackendName, multiplies_bf16
from pallas_kernels.chips import CHIPS, GpuChip, TpuChip, chip_named
from pallas_kernels.cpu.host import host_chip
from pallas_kernels.ragged_paged_attention import backend_for

BF16, F16, F32 = (np.dtype(dtype) for dtype in (jnp.bfloat16, np.float16, np.float32))


@dataclass(frozen=True)
class Device:
    """What `Backend` reads of a jax.Device."""

    platform: str
    device_kind: str
    compute_capability: str = ""
    core_count: int = 0


V5E, V4 = Device("tpu", "TPU v5 lite"), Device("tpu", "TPU v4")
H200 = Device("gpu", "NVIDIA H200", "9.0", 132)
H100_PCIE, T4 = Device("gpu", "NVIDIA H100 PCIe", "9.0", 114), Device("gpu", "Tesla T4", "7.5", 40)
RTX_3060, V100 = Device("gpu", "NVIDIA GeForce RTX 3060", "8.6", 28), Device("gpu", "Tesla V100-SXM2-16GB", "7.0", 80)
MI300 = Device("gpu", "AMD MI300X", "gfx942", 304)
CPU = Device("cpu", "cpu")
GPU = next(chip for chip in CHIPS.values() if isinstance(chip, GpuChip))


def test_auto_takes_the_kernels_of_the_device() -> None:
    for dtype in (F32, BF16):
        assert (
            Backend.of_device("auto", CPU, dtype) == Backend.of_device("cpu", CPU, dtype) == Backend("cpu", host_chip())
        )
    assert Backend.of_device("auto", V5E, BF16) == Backend("tpu", chip_named("v5e"))
    assert Backend.of_device("auto", H200, BF16) == Backend("gpu", chip_named("h200"))
    assert Backend.of_device("auto", T4, F16) == Backend("gpu", chip_named("t4"))
    for device, capability in ((H100_PCIE, (9, 0)), (RTX_3060, (8, 6))):
        relative = Backend.of_device("auto", device, BF16).chip
        assert isinstance(relative, GpuChip)
        assert (relative.num_sms, relative.compute_capability) == (device.core_count, capability)
        assert relative.device_kind == device.device_kind


@pytest.mark.parametrize(
    ("device", "dtype"),
    [(T4, BF16), (V100, F16), (MI300, BF16), (V4, BF16), (H200, F32), (V5E, F16), (CPU, F16)],
    ids=str,
)
def test_auto_takes_the_reference_where_there_are_no_kernels_and_says_so(
    device: Device, dtype: np.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    assert Backend.of_device("auto", device, dtype) == REFERENCE
    assert "attention runs on plain XLA" in caplog.text


@pytest.mark.parametrize(
    ("name", "device", "dtype"),
    [
        ("gpu", V100, F16),
        ("gpu", MI300, BF16),
        ("tpu", V4, BF16),
        ("gpu", T4, BF16),
        ("tpu", V5E, F16),
        ("cpu", CPU, F16),
    ],
)
def test_kernels_asked_for_by_name_are_refused_where_there_are_none(
    name: BackendName, device: Device, dtype: np.dtype
) -> None:
    with pytest.raises(NotImplementedError, match="use the (attention )?backend reference"):
        Backend.of_device(name, device, dtype)


@pytest.mark.parametrize(
    ("name", "device"), [("interpret", H200), ("interpret-gpu", V5E), ("tpu", H200), ("gpu", CPU), ("cpu", H200)]
)
def test_another_devices_kernels_are_refused(name: BackendName, device: Device) -> None:
    with pytest.raises(ValueError, match=f"attention backend {name} .*use auto"):
        Backend.of_device(name, device, BF16)


def test_interpreted_kernels_are_for_the_cpu() -> None:
    assert isinstance(Backend.of_device("interpret", CPU, F32).chip, TpuChip)
    assert Backend.of_device("interpret-gpu", CPU, F16).interpret


def test_a_chip_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="backend tpu cannot be for the chip"):
        Backend("tpu", chip_named("h200"))
    older = replace(GPU, name="v100", compute_capability=(7, 0))
    with pytest.raises(NotImplementedError, match="compute capability 7.5 .Turing., v100 has 7.0: use the backend ref"):
        Backend("gpu", older)
    assert Backend.of_chip(older) == REFERENCE


def test_what_multiplies_bfloat16() -> None:
    told = {device: multiplies_bf16(device) for device in (V5E, H200, T4, V100, RTX_3060, MI300, CPU)}
    assert [device for device, does in told.items() if not does] == [T4, V100]


def test_gpus_whose_attention_is_plain_xla() -> None:
    gpus = [chip for chip in CHIPS.values() if isinstance(chip, GpuChip)]
    assert all(backend_for(128, Backend("gpu", chip)).kind == "gpu" for chip in gpus)
    of_latents = {chip.name for chip in gpus if backend_for(576, Backend("gpu", chip), 512).kind == "gpu"}
    assert of_latents == {"h100", "h200", "b200"}
