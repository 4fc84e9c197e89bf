"""Describes the device under test: its name, the sizes of its caches and memory, and its software."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.chips import CHIPS, MIB, TpuChip


def cache_bytes(device: jax.Device) -> int:
    """Returns the bytes of the last cache before the device's memory: an L2, a TPU's VMEM, a CPU's L3."""
    if device.platform == "cpu":
        levels = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
        sizes = [int(level.read_text().strip().removesuffix("K")) * 1024 for level in levels]
        return max(sizes, default=32 * MIB)
    chips = [chip for chip in CHIPS.values() if chip.device_kind == device.device_kind]
    if not chips:
        return 128 * MIB  # no device that is not in the table has more
    chip = chips[0]
    return chip.vmem_bytes * chip.num_cores if isinstance(chip, TpuChip) else chip.l2_bytes


def memory_bytes(device: jax.Device) -> int:
    """Returns the bytes that arrays on the device can take together; on a CPU, those that are free now."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats:
        return int(stats["bytes_limit"])
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def describe(device: jax.Device) -> dict[str, Any]:
    """Returns a record's entries about the device and its software."""
    return {
        "device_kind": device.device_kind,
        "platform": device.platform,
        "platform_version": device.client.platform_version,
        "driver": _nvidia_driver() if device.platform == "gpu" else None,
        "cache_bytes": cache_bytes(device),
        "memory_bytes": memory_bytes(device),
    }


def package_versions() -> dict[str, str]:
    packages = {name: _version(name) for name in ("jax", "jaxlib", "numpy", "libtpu", "jax-cuda13-plugin")}
    return {"python": platform.python_version()} | {name: v for name, v in packages.items() if v is not None}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvidia_driver() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split("\n")[0].strip() or None
