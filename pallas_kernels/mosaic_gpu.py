"""Pallas kernels for NVIDIA GPUs (Mosaic GPU) share this: memory, barriers, and the warps that fetch."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chips import KIB, GpuChip

HOPPER = (9, 0)  # the compute capability of the only GPUs that have wgmma
TILE = 64  # rows of one matrix instruction of a warpgroup
WARP_ROWS = 16  # and of one of a warp
LANES = 64  # columns that are moved together: at two bytes each, the 128 bytes of the widest swizzle
SWIZZLED_ROWS = 8  # after so many rows the swizzle begins again
# The shared memory for barriers, for alignment, and for the compiler's own use.
RESERVED = 5 * KIB // 2

type MatrixUnit = Literal["wgmma", "mma"]
# An engine copies, and arrives at a barrier; each thread copies 16 bytes at a time, and waits for its own copies; or
# threads load into registers, wait, and store.
type CopyUnit = Literal["tma", "cp.async", "loads"]
type Ref = Any  # a reference of Pallas, for which jax has no public type


def matrix_unit_of(chip: GpuChip) -> MatrixUnit:
    """Returns the instruction that multiplies.

    wgmma multiplies from shared memory, and only Hopper has it. mma multiplies from registers.
    """
    return "wgmma" if chip.compute_capability == HOPPER else "mma"


def copy_unit_of(chip: GpuChip, interpret: bool) -> CopyUnit:
    """Returns what copies into shared memory.

    The interpreter knows barriers, and detects races with them, but no groups of `cp.async`: it takes TMA's copies.
    """
    if not chip.has_async_copies:
        return "loads"
    return "tma" if chip.has_copy_engine or interpret else "cp.async"


def swizzled(shape: tuple[int, ...], dtype: jnp.dtype, lanes: int = LANES) -> Any:
    """Returns shared memory for matrices, swizzled as matrix units read them and the copy engine writes them.

    The last dimension, and that of what is copied into it, must be a multiple of `lanes`, 16, 32 or 64 for two-byte
    elements. Its halves can be sliced if they are, too.
    """
    row = dtype.itemsize * lanes  # 128 bytes at most are swizzled together; 64 for one-byte elements in heads of 64
    # jax leaves a method of both without a body, which makes them abstract to a type checker.
    tiling = plgpu.TilingTransform((SWIZZLED_ROWS, lanes))  # type: ignore[abstract]
    swizzle = plgpu.SwizzleTransform(row)  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def barriers(arrivals: int, *shape: int) -> plgpu.Barrier:
    """Returns an array of barriers, each of which opens after `arrivals` arrivals."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=shape)


def interpretation(interpret: bool) -> Any:
    """Returns a kernel's `interpret` argument: on the CPU with detection of races, or no interpretation."""
    return plgpu.InterpretGPUParams(detect_races=True) if interpret else None


def fetch_in(
    is_fetching: jax.Array, fetch: Callable[[jax.Array], None], *, warps: int = 1, registers: int = 40
) -> None:
    """Runs `fetch` with the number of the warp, on the first `warps` of the warpgroup that `is_fetching`.

    Its threads keep so many `registers`, and leave the others to the warpgroups that compute.
    """

    @pl.when(is_fetching)
    def _fetch() -> None:
        plgpu.set_max_registers(registers, action="decrease")

        @plgpu.warp_map
        def _per_warp(warp: jax.Array) -> None:
            @pl.when(warp < warps)
            def _() -> None:
                fetch(warp)
