"""Memory: how many KV pages fit beside the weights and the largest step."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

# The host's memory is shared with everything else on it. vLLM's CPU backend stops at 4 GiB by default too.
CPU_KV_LIMIT = 4 * 2**30
# JAX takes its share of a GPU at once, three quarters unless told, and shares it out as needed. What it gets beyond
# `memory_utilization` keeps pieces that are free, but too small, from failing a step.
GPU_SPARE = 0.05
GPU_SHARE_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
MEMINFO = Path("/proc/meminfo")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that an engine takes of each device."""

    weights: int
    pages: int
    num_tokens: int  # whose keys and values the pages hold
    state: int  # of the slots
    step: int  # what the largest step needs beside the others while it runs
    grows: bool  # whether pages take memory only once they are used, as on CPU

    def table(self) -> str:
        """Returns the parts and their sum, a line each, in MiB."""
        pages = f"{self.num_tokens:,} tokens" + (", taken as pages fill" if self.grows else "")
        rows = [("weights", self.weights, ""), ("KV pages", self.pages, pages), ("slots", self.state, "")]
        rows.append(("largest step", self.step, "while it runs"))
        rows.append(("in all", sum(size for _, size, _ in rows), ""))
        return "\n".join(f"  {name:<13}{size / 2**20:11,.1f}   {remark}".rstrip() for name, size, remark in rows)


def claim_gpu_memory(utilization: float) -> None:
    """Lets JAX have as much of every GPU that it sees, unless the user's environment says how much it may have.

    No effect once JAX has looked for devices.
    """
    os.environ.setdefault(GPU_SHARE_VARIABLE, f"{min(utilization + GPU_SPARE, 1):.3f}")


def free_bytes(device: jax.Device, utilization: float) -> int:
    """Bytes of `device` that may still be taken when `utilization` of it may be in use."""
    stats = device.memory_stats()
    if stats is not None and "bytes_limit" in stats:
        limit = stats["bytes_limit"]
        if device.platform == "gpu":  # the limit is JAX's share, `utilization` is of the whole
            limit /= float(os.environ.get(GPU_SHARE_VARIABLE, 1))
            return int(min(limit * utilization, stats["bytes_limit"] * (1 - GPU_SPARE))) - stats["bytes_in_use"]
        return int(limit * utilization) - stats["bytes_in_use"]
    return min(int(_host_bytes_available() * utilization), CPU_KV_LIMIT)


def step_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes that one call of `compiled` needs beyond its arguments, as XLA reports them."""
    analysis = compiled.memory_analysis()
    assert analysis is not None, "every backend that we compile for reports its memory"
    return analysis.temp_size_in_bytes + max(analysis.output_size_in_bytes - analysis.alias_size_in_bytes, 0)


def pages_that_fit(num_bytes: int, page_bytes: int, useful: int) -> int:
    """Pages to allocate: what `num_bytes` holds, and no more than all slots could ever use.

    Raises ValueError when not even one page and the trash page fit.
    """
    count = min(num_bytes // page_bytes, useful)
    if count < 2:
        raise ValueError(
            f"{num_bytes / 2**20:.1f} MiB are left for KV pages, two of {page_bytes / 2**20:.2f} MiB are needed: "
            "raise memory_utilization, lower max_num_batched_tokens, or use a smaller model"
        )
    return count


def check_chosen_pages(num_pages: int, page_bytes: int, devices: Sequence[jax.Device]) -> None:
    """Raises ValueError when the pages that a user chose need more memory than one of `devices` has left.

    Allocating them would be an error of XLA's on an accelerator, and could be the end of the process on a host.
    """
    if devices[0].platform == "cpu":
        room = _host_bytes_available() // len(devices)  # they are all this host
    else:
        room = min(free_bytes(device, utilization=1.0) for device in devices)
    if num_pages * page_bytes > room:
        raise ValueError(
            f"num_pages {num_pages} needs {num_pages * page_bytes / 2**30:,.1f} GiB on each device, and "
            f"{room / 2**30:,.1f} GiB are free: give fewer, or leave num_pages out to have as many as fit"
        )


def _host_bytes_available() -> int:
    """What programs may still take: on Linux the page cache counts as free, and a container's limit holds."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    bounds = [total]
    if MEMINFO.is_file():
        fields = dict(line.split(":", 1) for line in MEMINFO.read_text(encoding="ascii").splitlines())
        bounds.append(int(fields["MemAvailable"].split()[0]) * 1024)
    if CGROUP_LIMIT.is_file() and (limit := CGROUP_LIMIT.read_text(encoding="ascii").strip()) != "max":
        bounds.append(int(limit))
    return min(bounds)
