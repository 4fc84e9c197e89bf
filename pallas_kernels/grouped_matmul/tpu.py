"""The product of groups of rows with a matrix each, for TPUs: the matrices stay in HBM and are streamed block by block.

The grid goes over visits: a visit is one tile of rows and one group that has rows in it. Visits are in the order of
rows, so Pallas fetches a block of a matrix once for all tiles of its group, while it multiplies the block before, and
keeps a tile of the result in VMEM while group after group writes its rows into it. Groups without rows have no visit.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backend import KERNEL_DTYPES
from pallas_kernels.chips import MIB, TpuChip
from pallas_kernels.small_matmul.api import Gate

LANES, SUBLANES = 128, 8
# A matrix is read in less time than 128 rows are multiplied by it only where a chip does fewer than 128 operations for
# each byte: v5p does 166, v5e 240 and v6e 560. So a tile in which a group has one row costs what reading costs.
TILE_ROWS = 128
BLOCK_BYTES = 4 * MIB  # of a matrix: larger ones would only make the first fetch, which nothing hides, take longer
VMEM_SHARE = 0.5  # of a core's VMEM: the rest is for what XLA keeps there


@dataclass(frozen=True)
class GroupBlocks:
    """One step of the grid takes `rows` rows, and `columns` rows of a matrix, which are columns of the result."""

    rows: int
    columns: int


def choose_blocks(x: jax.Array, w: jax.Array, gate: Gate | None, chip: TpuChip) -> GroupBlocks | None:
    """Returns the blocks of `grouped_matmul`, or None where it has no room or does not take the dtype.

    A block has all columns of a matrix. So there is no room for those of several hundred thousand.
    """
    *_, num_columns, size = w.shape
    if x.dtype.name not in KERNEL_DTYPES["tpu"] or w.dtype != x.dtype:
        return None
    halves, item = 1 if gate is None else 2, x.dtype.itemsize
    width = padded(size, LANES)
    most = max(BLOCK_BYTES // (halves * width * item) // LANES, 1) * LANES
    # Both cores of a chip work where there are columns for them.
    parts = 1 if num_columns <= LANES else padded(pl.cdiv(num_columns, most), chip.num_cores)
    columns = num_columns if parts == 1 else padded(pl.cdiv(num_columns, parts), LANES)
    across = padded(columns, LANES)
    buffers = 2 * item * (halves * across * width + TILE_ROWS * (width + across))
    sums = 4 * TILE_ROWS * across * (halves + 2)
    if buffers + sums > chip.vmem_bytes * VMEM_SHARE:
        return None
    return GroupBlocks(min(len(x), TILE_ROWS), columns)


def padded(size: int, unit: int) -> int:
    return pl.cdiv(size, unit) * unit


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    starts: jax.Array,
    first: jax.Array | int = 0,
    *,
    gate: Gate | None = None,
    blocks: GroupBlocks,
    chip: TpuChip,
    interpret: bool = False,
) -> jax.Array:
    """Multiplies each row of x [N, in] by matrix `first` + g of w [.., out, in], where g is its group: [N, out].

    starts  # i32[G + 1]: rows starts[g] to starts[g + 1] are those of group g; the rest of the result is finite

    For w [.., H, F, in] the result is [N, H, F]. With a `gate`, H is 2 and it is gate(x a) * (x b) of the halves a and
    b, rounded once: [N, F]. Sums are in float32. `blocks` are those of `choose_blocks`. Starts that do not rise, and
    matrices that are not there, are not detected.
    """
    parts = w if w.ndim == 4 else w[:, None]
    _, halves, num_columns, size = parts.shape
    assert x.shape[1] == size and (gate is None or halves == 2), (x.shape, w.shape, gate)
    is_turned = _lies_turned(num_columns, size)
    if is_turned:
        parts = parts.swapaxes(2, 3)
    if not interpret:  # XLA would copy a stack that fits into VMEM there, with the experts that nobody has chosen
        parts = pltpu.with_memory_space_constraint(parts, pltpu.HBM)
    visits = visits_of(starts, len(x), blocks.rows, first)
    together = 1 if gate is None else halves  # halves that one step multiplies by
    grid = pl.cdiv(num_columns, blocks.columns), halves // together, len(visits[0])
    call = pl.pallas_call(
        partial(_kernel, gate=gate, is_turned=is_turned),
        out_shape=jax.ShapeDtypeStruct((grid[1], len(x), num_columns), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=grid,
            in_specs=[
                pl.BlockSpec((blocks.rows, size), lambda part, half, visit, tiles, *_: (tiles[visit], 0)),
                pl.BlockSpec(
                    (None, together, *((size, blocks.columns) if is_turned else (blocks.columns, size))),
                    lambda part, half, visit, tiles, matrices, *_: (
                        matrices[visit],
                        half,
                        *((0, part) if is_turned else (part, 0)),
                    ),
                ),
            ],
            out_specs=pl.BlockSpec(
                (None, blocks.rows, blocks.columns),
                lambda part, half, visit, tiles, *_: (half, tiles[visit], part),
            ),
        ),
        compiler_params=pltpu.CompilerParams(
            # Cores share the columns. Visits of one tile write it one after the other.
            dimension_semantics=("parallel" if chip.num_cores > 1 else "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=int(chip.vmem_bytes * VMEM_SHARE),
        ),
        interpret=pltpu.InterpretParams(detect_races=True, num_cores_or_threads=chip.num_cores) if interpret else False,
        name="grouped_matmul",
    )
    out: jax.Array = call(*visits, x, parts)
    return out[0] if w.ndim == 3 or gate is not None else out.swapaxes(0, 1)


def visits_of(starts: jax.Array, num_rows: int, tile_rows: int, first: jax.Array | int) -> tuple[jax.Array, ...]:
    """Returns the tile of each visit, its matrix, and the first row and the end of the rows that it computes, i32[V].

    Tiles without rows are visited too, after all others and with no rows to compute, so that something is written.
    """
    num_groups, num_tiles = len(starts) - 1, pl.cdiv(num_rows, tile_rows)
    begins, ends = starts[:-1], starts[1:]
    # Each tile is visited once, and once more for each group that begins within it.
    number = jnp.arange(num_tiles + min(num_groups, num_rows) - 1, dtype=jnp.int32)
    first_tiles = begins // tile_rows
    counts = jnp.where(ends > begins, (ends - 1) // tile_rows - first_tiles + 1, 0)
    until = jnp.cumsum(counts, dtype=jnp.int32)
    total = until[-1]
    # A visit without rows has the matrix of the visit before, which is there already.
    real = jnp.minimum(number, jnp.maximum(total - 1, 0))
    group = jnp.minimum(jnp.sum(until[None, :] <= real[:, None], axis=1, dtype=jnp.int32), num_groups - 1)
    is_real = number < total
    used_tiles = pl.cdiv(starts[-1], tile_rows)
    tile = jnp.where(is_real, first_tiles[group] + number - (until - counts)[group], used_tiles + number - total)
    zero = jnp.zeros_like(number)
    low, high = jnp.where(is_real, begins[group], zero), jnp.where(is_real, ends[group], zero)
    return jnp.clip(tile, 0, num_tiles - 1), first + group, low, high


def _lies_turned(num_columns: int, size: int) -> bool:
    """Tells whether XLA keeps matrices [.., out, in] in HBM as [.., in, out], which takes less where it pads less.

    The kernel must read them so, or XLA would copy the whole stack in each step: 4.5 GiB of Qwen3-30B-A3B on 1x4 v6e,
    where `in` is 192. All of 30 pairs of sizes have the layout that this says (libtpu 0.0.48.1, v6e and v7x).
    """

    def taken(rows: int, columns: int) -> int:
        return padded(rows, SUBLANES) * padded(columns, LANES)

    return taken(size, num_columns) < taken(num_columns, size)


def _kernel(
    tiles: Any, matrices: Any, lows: Any, highs: Any, x: Any, w: Any, out: Any, *, gate: Gate | None, is_turned: bool
) -> None:
    product = partial(_product, contracted=0 if is_turned else 1)
    visit = pl.program_id(2)
    tile, low, high = tiles[visit], lows[visit], highs[visit]

    zero_new_tile(tiles, visit, out)

    @pl.when(high > low)
    def _() -> None:
        y = product(x[...], w[0])
        if gate is not None:
            y = (jax.nn.silu(y) if gate == "silu" else jax.nn.gelu(y, approximate=True)) * product(x[...], w[1])
        out[...] = with_rows(out[...], y, low - tile * out.shape[0], high - tile * out.shape[0])


def zero_new_tile(tiles: Any, visit: jax.Array, out: Any) -> None:
    """Fills a tile of the result with zeros in the first visit of it."""

    @pl.when((visit == 0) | (tiles[jnp.maximum(visit - 1, 0)] != tiles[visit]))
    def _() -> None:
        out[...] = jnp.zeros(out.shape, out.dtype)


def with_rows(tile: jax.Array, rows: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """Returns a tile in which rows `low` to `high` are those of `rows`, in its dtype."""
    row = jax.lax.broadcasted_iota(jnp.int32, tile.shape, 0)
    # In float32, because not every chip selects among numbers of 16 bits.
    mixed = jnp.where((row >= low) & (row < high), rows, tile.astype(jnp.float32))
    return mixed.astype(tile.dtype)


def _product(x: jax.Array, w: jax.Array, contracted: int) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # else its factors would be rounded
    return jax.lax.dot_general(
        x, w, (((1,), (contracted,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
