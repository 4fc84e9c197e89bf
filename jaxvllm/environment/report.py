"""Collects what a bug report needs: versions, the machine, its devices, and the variables that change anything."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jaxvllm import __version__
from jaxvllm.config import EngineConfig

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "jax",
    "jaxlib",
    "libtpu",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "llvmlite",
    "numpy",
    "ml_dtypes",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "llguidance",
    "fastapi",
    "uvicorn",
    "httptools",
    "pyzmq",
    "msgspec",
    "orbax-checkpoint",
    "ray",
)
# The instructions that decide which kernels a CPU gets and how fast bfloat16 and integers are, as /proc/cpuinfo names
# them.
CPU_FEATURES = (
    *("avx2", "fma", "avx_vnni", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni"),
    *("amx_tile", "amx_bf16", "amx_int8", "asimd", "asimddp", "i8mm", "bf16", "sve"),
)
_VARIABLES = re.compile(
    r"(JAX|JAXVLLM|XLA|TPU|LIBTPU|NVIDIA|NCCL|HF|RAY|SLURM)_\w+"
    r"|CUDA_VISIBLE_DEVICES|LD_LIBRARY_PATH|LD_PRELOAD|MALLOC_\w+|NPROC|OMP_NUM_THREADS|PYTHONPATH|TF_CPP_MIN_LOG_LEVEL"
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_PASSWORD_OF_URL = re.compile(r"(?<=://)[^/\s]+(?=@)")
# A start of jax with devices takes seconds, and that on a TPU pod may take a minute. A TPU that another process holds
# may never answer.
DEVICE_SECONDS = 120


def collect(variables: Mapping[str, str] = os.environ, device_seconds: float = DEVICE_SECONDS) -> dict[str, Any]:
    """Returns all of the report, ready for JSON. What cannot be found is None. Values of secrets are never in it."""
    return {
        "jaxvllm": {"version": __version__, "commit": _commit(), "location": _without_home(str(ROOT))},
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": _without_home(sys.executable),
        },
        "packages": {name: _version(name) for name in PACKAGES},
        "system": {"platform": platform.platform(), "distribution": _distribution()},
        "cpu": _cpu(),
        "memory": _memory(),
        "nvidia": _nvidia(),
        "devices": _devices(device_seconds),
        "variables": shown(variables),
        "caches": [_cache(directory) for directory in _cache_directories(variables)],
    }


def shown(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that matter. Values that may be secret are replaced by "(set)"."""
    return {
        name: "(set)" if _SECRET.search(name) else _without_home(_PASSWORD_OF_URL.sub("(hidden)", value))
        for name, value in sorted(variables.items())
        if _VARIABLES.fullmatch(name)
    }


def _without_home(text: str) -> str:
    """Replaces the user's home, whose name is nobody's business, by ~."""
    home = str(Path.home())
    return text if home == "/" else re.sub(re.escape(home) + r"(?=$|[/:\s])", "~", text)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """Returns what a program printed, or None if it is not there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (done.stdout.strip() or None) if done.returncode == 0 else None


def _commit() -> str | None:
    if not (ROOT / ".git").exists():
        return None  # installed, perhaps inside the clone of another project
    return _output("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*")


def _distribution() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return None


def _cpu() -> dict[str, Any]:
    facts: dict[str, str] = {}
    if (path := Path("/proc/cpuinfo")).exists():
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": facts.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "features": [feature for feature in CPU_FEATURES if feature in flags],
    }


def _memory() -> dict[str, int | None]:
    """Returns bytes. The limit is that of the container."""
    facts: dict[str, int] = {}
    if (path := Path("/proc/meminfo")).exists():
        for name, value in (line.split(":", 1) for line in path.read_text().splitlines()):
            facts[name] = int(value.split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return {
        "total_bytes": facts.get("MemTotal"),
        "available_bytes": facts.get("MemAvailable"),
        "limit_bytes": int(text) if text.isdecimal() else None,
    }


def _nvidia() -> list[dict[str, str]]:
    """Returns the GPUs that the driver knows, which jax may not find."""
    text = _output("nvidia-smi", "--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader")
    names = ("name", "driver", "memory", "compute_capability")
    rows = [[cell.strip() for cell in line.split(",")] for line in (text or "").splitlines()]
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]


def _devices(seconds: float) -> dict[str, Any]:
    """Returns what `devices.py` found, or {"error": ...} where jax finds no device, dies or takes too long."""
    command = [sys.executable, "-m", "jaxvllm.environment.devices"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"jax found no device within {seconds:g} s: another process may hold the device"}
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    last = next(reversed(done.stderr.strip().splitlines()), "no message")
    ending = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return {"error": f"looking for devices ended with {ending}: {last}"}


def _cache_directories(variables: Mapping[str, str]) -> list[Path]:
    ours = EngineConfig().cache_directory
    of_jax = variables.get("JAX_COMPILATION_CACHE_DIR", "")
    directories = [] if ours is None else [ours]
    return directories + ([Path(of_jax)] if of_jax and "://" not in of_jax else [])


def _cache(directory: Path) -> dict[str, Any]:
    sizes = []
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                sizes.append((Path(folder) / name).stat().st_size)
            except OSError:
                continue  # another process has just deleted it
    return {"directory": _without_home(str(directory)), "files": len(sizes), "bytes": sum(sizes)}
