"""The largest numbers of rows, by which tokens choose experts: `jax.lax.top_k`, and the same for few in machine code.

On CPUs XLA calls a sort of its own for each row, on one thread: for 512 rows of 32 numbers that took 66 us, of which
four were wanted, and for 128 numbers and eight of them 430 us (Zen 4). Rounds of argmax in plain XLA take as long.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Backend
from pallas_kernels.chips import CpuChip
from pallas_kernels.cpu.handlers import Handler


def top_k(x: jax.Array, k: int, backend: Backend) -> tuple[jax.Array, jax.Array]:
    """Returns the k largest numbers of each row of x f32[T, X], and their places i32[T, k], as `jax.lax.top_k`.

    Its order is total: a NaN is larger than any number, or smaller if its sign says so, and 0 is larger than -0. The
    first of equal numbers comes first.
    """
    if backend.kind != "cpu" or x.dtype != jnp.float32:
        return jax.lax.top_k(x, k)
    from pallas_kernels.grouped_matmul.cpu import largest_of_rows  # only where it runs must llvmlite be installed

    assert isinstance(backend.chip, CpuChip)
    shape = (x.shape[0], k)
    out = [jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)]
    values, places = Handler(largest_of_rows, (), backend.chip)(out, x)
    return values, places
