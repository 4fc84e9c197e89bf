"""The order of rows by their groups, in which `grouped_matmul` takes them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Backend
from pallas_kernels.chips import CpuChip
from pallas_kernels.cpu.handlers import Handler


class RowOrder(NamedTuple):
    """N rows, sorted by group; those of one group in the order in which they were. Rows of no group come last."""

    rows: jax.Array  # i32[N]: which row is at each place
    places: jax.Array  # i32[N]: the place of each row
    starts: jax.Array  # i32[G + 1]: the places of group g are starts[g] to starts[g + 1]


def order_rows(groups: jax.Array, num_groups: int, backend: Backend) -> RowOrder:
    """Orders rows by `groups` i32[N], the group of each, or `num_groups` where it is in none."""
    if backend.kind == "cpu":
        from pallas_kernels.grouped_matmul.cpu import counting_sort  # only where it runs must llvmlite be installed

        assert isinstance(backend.chip, CpuChip)
        shapes = (len(groups), len(groups), num_groups + 1)
        out = [jax.ShapeDtypeStruct((size,), jnp.int32) for size in shapes]
        return RowOrder(*Handler(counting_sort, (), backend.chip)(out, groups))
    rows = jnp.argsort(groups, stable=True)
    # The rows before each group. A search among sorted rows is a loop, and took 15 us a layer (CPU, 16 tokens).
    starts = (groups < jnp.arange(num_groups + 1)[:, None]).sum(1, dtype=jnp.int32)
    places = jnp.zeros_like(groups).at[rows].set(jnp.arange(len(rows), dtype=groups.dtype))
    return RowOrder(rows, places, starts)
