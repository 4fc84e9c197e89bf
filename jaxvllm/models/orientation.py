"""The orientation of matrices on CPU: our own kernel multiplies them as checkpoints store them, or XLA does.

For XLA they may be turned round in memory: checkpoints store `[out, in]`, and some CPUs multiply by `[in, out]` faster.
"""

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.ops import InOut, KernelMatrix
from jaxvllm.models.params import Params, declare, declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.tiling import aligned_zeros
from pallas_kernels.chips import CpuChip
from sharding.placement import mesh_of, place

CACHE_LINE_BYTES = 64


def with_kernel(params: Params, spec: ModelSpec, chip: CpuChip) -> Params:
    """Lets our own kernel multiply by every matrix of `params`, which are in the `separate` layout. Nothing is copied.

    It changes `params` itself.
    """
    for arrays, decls in _by_place(params, spec):
        for name, decl in decls.items():
            if decl.is_multiplied:
                arrays[name] = KernelMatrix(arrays[name], chip)
    return params


def prefers_in_out() -> bool:
    """Tells whether this host's CPU multiplies faster by `[in, out]`.

    All matmuls of a decode step of 25M parameters took, for `[out, in]` against `[in, out]`: with AVX-512 8.8 / 6.0 ms
    at 4 rows, 12.7 / 9.6 at 16, 125 / 122 at 512. With AVX2 alone `[in, out]` is a third slower between 4 and 32 rows.
    """
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and " avx512f " in cpuinfo.read_text(encoding="utf-8")


def to_in_out(params: Params, spec: ModelSpec) -> Params:
    """Turns every matrix of `params` round. They are those of one device, in the `separate` layout.

    It changes `params` itself, one matrix at a time, so that each old array is freed before the next one is turned.
    """
    for arrays, decls in _by_place(params, spec):
        for name, decl in decls.items():
            if decl.storage == "matrix":
                arrays[name] = _turned(arrays[name])
    return params


def _by_place(params: Params, spec: ModelSpec) -> Iterator[tuple[Params, dict[str, ParamDecl]]]:
    """Yields the arrays outside the layers, then those of each layer, with their declarations."""
    yield params, declare(spec)
    for layer, held in enumerate(params["layers"]):
        yield held, declare_layer(spec, layer)


def _turned(array: jax.Array) -> InOut:
    *out_shape, size = array.shape
    matrix = np.asarray(array).reshape(-1, size)
    turned = aligned_zeros(matrix.shape[::-1], matrix.dtype)  # XLA uses it without a copy
    # As many columns at a time as fill a cache line: 3072 x 1024 floats take 4 ms instead of 21, 30000 x 1024 take 72
    # instead of 755.
    width = CACHE_LINE_BYTES // matrix.dtype.itemsize
    for start in range(0, len(matrix), width):
        turned[:, start : start + width] = matrix[start : start + width].T
    [device] = array.devices()
    return InOut(jax.device_put(turned, place(mesh_of(device))((None, None))), tuple(out_shape))
