"""Memory planning: computes how many KV pages fit beside the weights and the largest step."""

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

# The host's memory is shared with everything else on it. vLLM's CPU backend stops at 4 GiB by default too.
CPU_KV_LIMIT = 4 * 2**30
# JAX takes its share of a GPU at once, by default three quarters, and allocates from it. The share is larger than
# `memory_utilization` by this much, so that fragmentation (free pieces that are too small) does not fail a step.
GPU_SPARE = 0.05
GPU_SHARE_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
MEMINFO = Path("/proc/meminfo")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class MemoryUse:
    """The bytes that an engine takes on each device."""

    weights: int
    pages: int
    num_tokens: int  # tokens whose keys and values fit in the pages; windowed layers keep a request's last ones
    state: int  # of the slots
    step: int | None  # bytes that the largest step needs in addition while it runs; None: it is not compiled yet
    grows: bool  # whether pages take memory only once they are used, as on CPU

    def table(self) -> str:
        """Returns the parts and their sum in MiB, each on a line of its own."""
        pages = f"{self.num_tokens:,} tokens" + (", taken as pages fill" if self.grows else "")
        rows = [("weights", self.weights, ""), ("KV pages", self.pages, pages), ("slots", self.state, "")]
        if self.step is not None:
            rows.append(("largest step", self.step, "while it runs"))
        remark = "and what the largest step needs, which still compiles" if self.step is None else ""
        rows.append(("in all", sum(size for _, size, _ in rows), remark))
        return "\n".join(f"  {name:<13}{size / 2**20:11,.1f}   {remark}".rstrip() for name, size, remark in rows)


def claim_gpu_memory(utilization: float) -> None:
    """Lets JAX take `utilization` of every GPU, and some spare, unless the user's environment sets JAX's share.

    It has no effect once JAX has looked for devices.
    """
    os.environ.setdefault(GPU_SHARE_VARIABLE, f"{min(utilization + GPU_SPARE, 1):.3f}")


def free_bytes(device: jax.Device, utilization: float) -> int:
    """Returns the bytes of `device` that may still be taken when at most `utilization` of it may be in use."""
    stats = device.memory_stats()
    if stats is not None and "bytes_limit" in stats:
        limit = stats["bytes_limit"]
        if device.platform == "gpu":  # the limit is JAX's share, but `utilization` refers to the whole GPU
            limit /= float(os.environ.get(GPU_SHARE_VARIABLE, 1))
            return int(min(limit * utilization, stats["bytes_limit"] * (1 - GPU_SPARE))) - stats["bytes_in_use"]
        return int(limit * utilization) - stats["bytes_in_use"]
    return min(int(_host_bytes_available() * utilization), CPU_KV_LIMIT)


def step_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes that one call of `compiled` needs beyond its arguments, as XLA reports them."""
    analysis = compiled.memory_analysis()
    assert analysis is not None, "every backend that we compile for reports its memory"
    return analysis.temp_size_in_bytes + max(analysis.output_size_in_bytes - analysis.alias_size_in_bytes, 0)


def count_pages(num_bytes: int, pool_bytes: Callable[[int], int], useful: int) -> int:
    """Returns the most pages, up to `useful`, that take no more than `num_bytes`; 0 when not even one fits.

    `pool_bytes(n)` is what n pages take, with the pages of other groups of layers that come with them.
    """
    return bisect_right(range(1, useful + 1), num_bytes, key=pool_bytes)


def pages_that_fit(num_bytes: int, pool_bytes: Callable[[int], int], useful: int) -> int:
    """Returns the number of pages to allocate: as many as fit in `num_bytes`, and no more than `useful`.

    `pool_bytes` is that of `count_pages`. Raises ValueError when not even one page and the trash page fit.
    """
    count = count_pages(num_bytes, pool_bytes, useful)
    if count < 2:
        raise ValueError(
            f"{num_bytes / 2**20:.1f} MiB are left for KV pages, but two of {pool_bytes(2) / 2**21:.2f} MiB are "
            "needed: raise memory_utilization, lower max_num_batched_tokens, or use a smaller model"
        )
    return count


def check_chosen_pages(num_pages: int, num_bytes: int, devices: Sequence[jax.Device]) -> None:
    """Raises ValueError when the number of pages that a user chose needs more memory than one of `devices` has left.

    They take `num_bytes`, with the pages of other groups of layers that come with them. Otherwise allocating them would
    raise an XLA error on an accelerator, and could kill the process on a host.
    """
    if devices[0].platform == "cpu":
        room = _host_bytes_available() // len(devices)  # CPU devices share this host's memory
    else:
        room = min(free_bytes(device, utilization=1.0) for device in devices)
    if num_bytes > room:
        raise ValueError(
            f"num_pages {num_pages} needs {num_bytes / 2**30:,.1f} GiB on each device, and "
            f"{room / 2**30:,.1f} GiB are free: give fewer, or leave num_pages out to have as many as fit"
        )


def _host_bytes_available() -> int:
    """Returns the bytes that programs may still take. On Linux it counts the page cache, and obeys container limits."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    bounds = [total]
    if MEMINFO.is_file():
        fields = dict(line.split(":", 1) for line in MEMINFO.read_text(encoding="ascii").splitlines())
        bounds.append(int(fields["MemAvailable"].split()[0]) * 1024)
    if CGROUP_LIMIT.is_file() and (limit := CGROUP_LIMIT.read_text(encoding="ascii").strip()) != "max":
        bounds.append(int(limit))
    return min(bounds)
