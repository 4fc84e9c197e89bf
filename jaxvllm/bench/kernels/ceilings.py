"""Measures the best that the device does: the two ceilings of the roofline."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from jaxvllm.bench.kernels.counts import Work
from jaxvllm.bench.kernels.device import cache_bytes, memory_bytes
from jaxvllm.bench.kernels.timing import time_calls
from pallas_kernels.chips import GIB

MATMUL_SIZE = {"cpu": 2048, "gpu": 8192, "tpu": 8192}
# The most bytes to copy. Random numbers take four times the memory of their array, and a CPU may say that it has
# 480 MiB of cache.
COPY_SIZE = {"cpu": GIB // 4, "gpu": 4 * GIB, "tpu": 4 * GIB}


@dataclass(frozen=True)
class Ceilings:
    """The rates that the device reached with nothing else to do. They are the measure of kernels, not data sheets."""

    copy: float  # bytes/s, read and written
    matmul: float  # FLOP/s

    def seconds(self, work: Work) -> float:
        """Returns the least time that `work` can take."""
        return max(work.bytes / self.copy, work.flops / self.matmul)

    def binding(self, work: Work) -> Literal["copy", "matmul"]:
        """Returns which of the two ceilings decides that time."""
        return "copy" if work.bytes / self.copy >= work.flops / self.matmul else "matmul"


def measure_ceilings(device: jax.Device, dtype: jnp.dtype) -> Ceilings:
    """Copies gigabytes (on a CPU, a few times its last cache) and multiplies large matrices of `dtype`, all random."""
    return Ceilings(copy=_copy_bandwidth(device), matmul=_matmul_rate(device, dtype))


class Chain:
    """A jitted function that every call applies to what the call before returned."""

    def __init__(self, step: Callable[[jax.Array], jax.Array], start: jax.Array) -> None:
        self.step, self.array = step, start

    def __call__(self) -> jax.Array:
        self.array = self.step(self.array)
        return self.array


def _copy_bandwidth(device: jax.Device) -> float:
    wanted = 4 * cache_bytes(device) if device.platform == "cpu" else memory_bytes(device) // 8
    nbytes = min(COPY_SIZE[device.platform], wanted)
    x = jax.random.normal(jax.random.key(0), (nbytes // 4,), jnp.float32)
    # The runtime's own copy, and a kernel of XLA's that reads and writes in place: the faster one is the ceiling. On a
    # CPU that is the second, by ten times: the memory of a new array must be handed out first, page by page.
    steps = (jax.jit(jnp.copy), jax.jit(jnp.negative, donate_argnums=0))
    return max(2 * nbytes / time_calls(Chain(step, x), 1).median for step in steps)


def _matmul_rate(device: jax.Device, dtype: jnp.dtype) -> float:
    size = MATMUL_SIZE[device.platform]
    keys = jax.random.split(jax.random.key(1))
    x = jax.random.normal(keys[0], (size, size), dtype)
    # The variance is 1 / size, so that a chain of products neither grows nor fades.
    weight = (jax.random.normal(keys[1], (size, size), jnp.float32) * size**-0.5).astype(dtype)
    multiply = jax.jit(jnp.matmul)
    return 2 * size**3 / time_calls(Chain(lambda x: multiply(x, weight), x), 1).median
