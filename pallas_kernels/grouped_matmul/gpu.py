"""The product of groups of rows with a matrix each, for NVIDIA GPUs (Mosaic GPU): the matrices are streamed from HBM.

A visit is up to 128 rows of one group, and a unit of work is a visit and some columns of the result. CTAs take units in
turn. A warp fetches rows and matrices by TMA, stage by stage, and goes on with the next unit while warpgroups compute
this one, each with 64 of the rows. Few rows are bound by memory: each matrix that has rows is read once, and no other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backend import KERNEL_DTYPES
from pallas_kernels.chips import GpuChip
from pallas_kernels.mosaic_gpu import (
    LANES,
    RESERVED,
    SWIZZLED_ROWS,
    TILE,
    MatrixUnit,
    Ref,
    barriers,
    fetch_in,
    interpretation,
    matrix_unit_of,
    swizzled,
)
from pallas_kernels.small_matmul.api import Gate

# The columns of a matrix product, those of both halves of a gated one together. 256 is the most that wgmma takes, and
# 64 rows x 256 columns of float32 are half of a thread's registers. `mma` has its operands in registers, too.
MOST_COLUMNS: dict[MatrixUnit, int] = {"wgmma": 256, "mma": 128}
# An H200's bandwidth times a latency of a microsecond is 36 KiB for each of its SMs, and a stage has 16 KiB at least.
MOST_STAGES = 8
HALVES = 2  # warpgroups that compute, at most
# A warpgroup fetches even where only one computes: see `THREADS` of attention's `gpu.decode`.
THREADS = HALVES + 1
# TMA copies rows into swizzled memory in tiles of eight, which must begin at a multiple of eight.
ALIGNMENT = 8
# A matrix unit sums up 16 columns at once, which are the narrowest swizzle of two-byte elements, too.
SWIZZLES = (LANES, 32, 16)
# A copy has one of these sizes. Rows beyond those that are needed only cost bandwidth of the L2.
COPIED_ROWS = (8, 16, 32, TILE)


@dataclass(frozen=True)
class GroupTiles:
    """A unit of work is `rows` x `columns` of the result, and `stages` parts of its operands fit shared memory.

    The last unit of a row may have columns that the matrix lacks.
    """

    rows: int
    columns: int
    stages: int


def choose_tiles(
    x: jax.Array | jax.ShapeDtypeStruct,
    w: jax.Array | jax.ShapeDtypeStruct,
    num_groups: int,
    gate: Gate | None,
    chip: GpuChip,
) -> GroupTiles | None:
    """Returns the tiles of `grouped_matmul`, or None where it does not take the dtype, the sizes or a chip that has no
    copy engine.

    A matrix must have a multiple of 8 rows, each half of a gated one too, and of 16 columns, at least 64 of each.
    """
    *_, size = w.shape
    together = 1 if gate is None else 2
    num_columns = prod(w.shape[1:-1]) // together
    if x.dtype.name not in KERNEL_DTYPES["gpu"] or w.dtype != x.dtype or min(size, num_columns) < LANES:
        return None
    if not chip.has_copy_engine:
        return None
    if size % SWIZZLES[-1] or num_columns % SWIZZLED_ROWS:
        return None
    most = MOST_COLUMNS[matrix_unit_of(chip)] // together
    # Columns beyond those of the matrix are computed for nothing, so there are as few as with the narrowest units.
    spare = -num_columns % LANES
    widths = [width for width in range(most, 0, -LANES) if -num_columns % width == spare]
    # Wide units read rows less often. But with few groups, narrow ones are needed to keep all multiprocessors busy.
    visits = min(len(x), num_groups)
    columns = next((width for width in widths if visits * pl.cdiv(num_columns, width) >= chip.num_sms), widths[-1])
    rows = TILE * (1 if len(x) <= num_groups * TILE // 2 else HALVES)
    item = x.dtype.itemsize
    room = chip.shared_memory_per_block - RESERVED - rows * LANES * item  # of which staging takes the last part
    stages = min(room // ((rows + together * columns) * LANES * item), MOST_STAGES)
    return GroupTiles(rows, columns, stages) if stages >= 2 else None


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    starts: jax.Array,
    first: jax.Array | int = 0,
    *,
    gate: Gate | None = None,
    tiles: GroupTiles,
    chip: GpuChip,
    interpret: bool = False,
) -> jax.Array:
    """Multiplies each row of x [N, in] by matrix `first` + g of w [.., out, in], where g is its group: [N, out].

    starts  # i32[G + 1]: rows starts[g] to starts[g + 1] are those of group g; the rest of the result is arbitrary

    For w [.., H, F, in] the result is [N, H, F]. With a `gate`, H is 2 and it is gate(x a) * (x b) of the halves a and
    b, rounded once: [N, F]. Sums are in float32. `tiles` are those of `choose_tiles`. Starts that do not rise, and
    matrices that are not there, are not detected.
    """
    num_rows, size = x.shape
    together = 1 if gate is None else 2
    num_columns = prod(w.shape[1:-1]) // together
    assert w.shape[-1] == size and (gate is None or w.shape[1] == 2), (x.shape, w.shape, gate)
    # A copy may not be larger than what it copies from, and begins and ends at a multiple of eight.
    x = jnp.pad(x, ((0, max(-num_rows % ALIGNMENT, TILE - num_rows)), (0, 0)))
    visits, num_visits = plan_visits(starts, num_rows, tiles.rows, first)
    product = GroupedProduct(tiles, gate, x.dtype, size, num_columns, matrix_unit_of(chip), interpret)
    blocks = pl.cdiv(num_columns, tiles.columns)
    ctas = min(chip.num_sms, len(visits) * blocks)

    def kernel(x: Ref, w: Ref, visits: Ref, num_visits: Ref, out: Ref, **memory: Ref) -> None:
        thread = lax.axis_index("warpgroup")

        def walk(work: Callable[[_GroupUnit, jax.Array], None]) -> jax.Array:
            """Does the CTA's units. Each is told how many stages came before. Returns how many there were in all."""

            def one(number: jax.Array, done: jax.Array) -> None:
                # Neighbouring CTAs have the same rows and, where a group has many, the same matrix in the L2.
                visit, column = lax.div(number, jnp.int32(blocks)), lax.rem(number, jnp.int32(blocks)) * tiles.columns
                matrix, eighth, low, high = (visits[visit, i] for i in range(4))
                # Only from this product the compiler knows that tiles begin where a copy may begin.
                work(_GroupUnit(matrix, eighth * ALIGNMENT, low, high, column), done)

            return in_turn(num_visits[0] * blocks, ctas, product.steps, one)

        @pl.when(thread < product.halves)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            walk(lambda unit, done: product.compute(thread, unit, done, out, memory))
            plgpu.wait_smem_to_gmem(0)

        def fetch(_: jax.Array) -> None:
            filled = walk(lambda unit, done: product.fetch(unit, done, x, w, memory))
            drain(memory["free"], tiles.stages, filled)

        fetch_in(thread == HALVES, fetch)

    out: jax.Array = plgpu.kernel(
        kernel,
        # Panels of 64 columns are stored whole, also those in which the matrix ends.
        out_type=jax.ShapeDtypeStruct((num_rows, blocks * tiles.columns), x.dtype),
        scratch_types=product.memory,
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=THREADS,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpretation(interpret),
        kernel_name="grouped_matmul",
    )(x, w.reshape(len(w), -1, size), visits, num_visits)
    out = out[:, :num_columns]
    return out if gate is not None else out.reshape(num_rows, *w.shape[1:-1])


def plan_visits(
    starts: jax.Array, num_rows: int, tile_rows: int, first: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Returns visits i32[V, 4] and their number i32[1]: matrix, begin of the tile / 8, begin and end of its rows.

    A tile begins up to seven rows before those of its group.
    """
    begins, ends = starts[:-1], starts[1:]
    origins = begins - begins % ALIGNMENT
    counts = jnp.where(ends > begins, (ends - origins + (tile_rows - 1)) // tile_rows, 0)
    until = jnp.cumsum(counts, dtype=jnp.int32)
    groups = min(len(counts), num_rows)  # that can have rows
    most = (num_rows + groups * (ALIGNMENT - 1)) // tile_rows + groups
    number = jnp.arange(most, dtype=jnp.int32)
    group = jnp.searchsorted(until, number, side="right", method="compare_all").astype(jnp.int32)
    group = jnp.minimum(group, len(counts) - 1)
    tile = origins[group] + (number - (until - counts)[group]) * tile_rows
    low, high = jnp.maximum(begins[group], tile), jnp.minimum(ends[group], tile + tile_rows)
    return jnp.stack([first + group, tile // ALIGNMENT, low, high], axis=1), until[-1:]


def visits_of_one(num_rows: int, tile_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the visits of `plan_visits` where all rows are of one group, whose matrix is 0."""
    tiles = np.arange(0, num_rows, tile_rows, dtype=np.int32)
    ends = np.minimum(tiles + np.int32(tile_rows), np.int32(num_rows))
    visits = np.stack([np.zeros_like(tiles), tiles // ALIGNMENT, tiles, ends], axis=1)
    return visits, np.array([len(visits)], np.int32)


def in_turn(num_units: jax.Array, ctas: int, steps: int, work: Callable[[jax.Array, jax.Array], None]) -> jax.Array:
    """Lets each of `ctas` CTAs do every `ctas`-th unit, each of which fills `steps` stages.

    `work` is given the unit's number and how many stages the CTA has filled before. Returns how many it has filled.
    """
    cta = lax.axis_index("cta")
    count = lax.div(num_units - cta + (ctas - 1), jnp.int32(ctas))

    @pl.loop(0, count)
    def _(index: jax.Array) -> None:
        work(cta + index * ctas, index * steps)

    return count * steps


def drain(free: Ref, stages: int, filled: jax.Array) -> None:
    """Waits until all stages are free: no barrier may be left with a phase that no warp has waited for.

    free: the barriers of the stages
    filled: how many were filled, each as often as it was
    """
    for stage in range(stages):

        @pl.when(stage < filled)
        def _(stage: int = stage) -> None:
            plgpu.barrier_wait(free.at[stage])


class _GroupUnit(NamedTuple):
    """Rows low .. high - 1 of the tile that begins at row `tile`, and the columns from `column` on."""

    matrix: jax.Array
    tile: jax.Array
    low: jax.Array
    high: jax.Array
    column: jax.Array


@dataclass(frozen=True)
class GroupedProduct:
    """The work of a CTA's warps on one unit, with everything that is known when compiling."""

    tiles: GroupTiles
    gate: Gate | None
    dtype: jnp.dtype
    size: int  # of the rows of x and of the matrices
    num_columns: int  # of the result
    matrix_unit: MatrixUnit
    interpret: bool

    @property
    def halves(self) -> int:
        """The number of warpgroups that compute."""
        return self.tiles.rows // TILE

    @property
    def together(self) -> int:
        """The number of matrices whose products make one column of the result."""
        return 1 if self.gate is None else 2

    @property
    def width(self) -> int:
        """The number of rows of a matrix, or of both halves of one, that a unit multiplies by."""
        return self.together * self.tiles.columns

    @property
    def steps(self) -> int:
        """The number of stages of a unit. The copy engine fills the last one up with zeros."""
        return pl.cdiv(self.size, LANES)

    @property
    def memory(self) -> dict[str, Any]:
        """The kernel's shared memory."""
        stages, lanes = self.tiles.stages, next(lanes for lanes in SWIZZLES if self.size % lanes == 0)
        return {
            "rows": swizzled((stages, self.halves, TILE, LANES), self.dtype, lanes),
            "matrices": swizzled((stages, self.width, LANES), self.dtype, lanes),
            "staging": plgpu.SMEM((self.halves, TILE, LANES), self.dtype),
            "here": barriers(self.halves + self.together, stages),
            "free": barriers(self.halves, stages),
        }

    def fetch(self, unit: _GroupUnit, done: jax.Array, x: Ref, w: Ref, memory: dict[str, Ref]) -> None:
        """Copies the rows and the matrix of a unit into the stages, each as soon as it is free."""

        @pl.loop(0, self.steps)
        def _(step: jax.Array) -> None:
            slot = lax.rem(done + step, jnp.int32(self.tiles.stages))
            here, part = memory["here"].at[slot], pl.ds(step * LANES, LANES)

            @pl.when(done + step >= self.tiles.stages)
            def _() -> None:
                plgpu.barrier_wait(memory["free"].at[slot])

            for index in range(self.together):
                rows = pl.ds(index * self.num_columns + unit.column, self.tiles.columns)
                into = memory["matrices"].at[slot, pl.ds(index * self.tiles.columns, self.tiles.columns)]
                plgpu.copy_gmem_to_smem(w.at[unit.matrix, rows, part], into, here)
            for half in range(self.halves):
                tile = unit.tile + half * TILE
                # A warpgroup without rows gets some as well, so that a stage always has as many copies.
                needed = jnp.clip(unit.high - tile, 1, TILE)
                for smaller, count in pairwise((0, *COPIED_ROWS)):

                    @pl.when((needed > smaller) & (needed <= count))
                    def _(half: int = half, tile: jax.Array = tile, count: int = count) -> None:
                        into = memory["rows"].at[slot, half, pl.ds(0, count)]
                        plgpu.copy_gmem_to_smem(x.at[pl.ds(tile, count), part], into, here)

    def compute(self, half: jax.Array, unit: _GroupUnit, done: jax.Array, out: Ref, memory: dict[str, Ref]) -> None:
        """Computes a warpgroup's rows of a unit, and stores them into out f[N, columns of all units]."""
        tile = unit.tile + half * TILE
        low, high = jnp.clip(unit.low - tile, 0, TILE), jnp.clip(unit.high - tile, 0, TILE)

        @pl.when(low < high)
        def _() -> None:
            multiply = self._wgmma if self.matrix_unit == "wgmma" else self._mma
            products = multiply(half, done, memory)
            if self.gate is not None:
                gates, ups = products[: len(products) // 2], products[len(products) // 2 :]
                products = [_gated(g, up, self.gate) for g, up in zip(gates, ups, strict=True)]
            staging = memory["staging"].at[half]
            for index, part in enumerate(products):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                staging[...] = part.astype(self.dtype)
                plgpu.commit_smem()
                store_rows(staging, out.at[:, pl.ds(unit.column + index * LANES, LANES)], tile, low, high)

        @pl.when(low >= high)
        def _() -> None:
            @pl.loop(0, self.steps)
            def _(step: jax.Array) -> None:
                plgpu.barrier_arrive(memory["free"].at[self._wait(done + step, memory)])

    def _wait(self, number: jax.Array, memory: dict[str, Ref]) -> jax.Array:
        """Waits for a stage, and returns where it is."""
        slot = lax.rem(number, jnp.int32(self.tiles.stages))
        plgpu.barrier_wait(memory["here"].at[slot])
        return slot

    def _wgmma(self, half: jax.Array, done: jax.Array, memory: dict[str, Ref]) -> list[jax.Array]:
        """Multiplies a warpgroup's rows, from shared memory: f32[64, 64] for each 64 rows of the matrix."""
        free, stages = memory["free"], jnp.int32(self.tiles.stages)

        def multiply(sums: Ref) -> jax.Array:
            @pl.loop(0, self.steps)
            def _(step: jax.Array) -> None:
                slot = self._wait(done + step, memory)
                plgpu.wgmma(sums, memory["rows"].at[slot, half], memory["matrices"].at[slot].transpose((1, 0)))
                plgpu.wgmma_wait(1)

                @pl.when(step > 0)  # the product before is over, and this one is under way
                def _() -> None:
                    plgpu.barrier_arrive(free.at[lax.rem(done + step - 1, stages)])

            products: jax.Array = sums[...]
            plgpu.barrier_arrive(free.at[lax.rem(done + self.steps - 1, stages)])
            return products

        products = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((TILE, self.width), jnp.float32))
        return [products[:, start : start + LANES] for start in range(0, self.width, LANES)]

    def _mma(self, half: jax.Array, done: jax.Array, memory: dict[str, Ref]) -> list[jax.Array]:
        """Multiplies as `_wgmma` does, from registers."""

        def multiply(step: jax.Array, products: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            slot = self._wait(done + step, memory)
            rows = plgpu.load(memory["rows"].at[slot, half], layout=plgpu.Layout.MMA_LHS(self.dtype))
            matrices = [memory["matrices"].at[slot, pl.ds(start, LANES)] for start in range(0, self.width, LANES)]
            products = tuple(self._plus(y, rows, w) for y, w in zip(products, matrices, strict=True))
            plgpu.commit_smem()  # ordinary reads must be over before the next copy writes
            plgpu.barrier_arrive(memory["free"].at[slot])
            return products

        zeros = plgpu.layout_cast(jnp.zeros((TILE, LANES), jnp.float32), plgpu.Layout.WGMMA)
        return list(lax.fori_loop(0, self.steps, multiply, (zeros,) * (self.width // LANES)))

    def _plus(self, y: jax.Array, rows: jax.Array, matrix: Ref) -> jax.Array:
        columns = matrix.transpose((1, 0))
        if self.interpret:
            return y + jnp.dot(rows, columns[...], preferred_element_type=jnp.float32)
        return plgpu.mma(y, rows, plgpu.load(columns, layout=plgpu.Layout.MMA_RHS(self.dtype)))


def _gated(gate: jax.Array, up: jax.Array, kind: Gate) -> jax.Array:
    """Returns `up` times silu or GELU of `gate`.

    GELU has 1 + tanh(z), which is 2 / (1 + e^-2z) here, because the hardware's own tanh is off by 2^-11.
    """
    bent = gate if kind == "silu" else gate * (1.5957691216 + 0.0713548162726 * gate * gate)
    return gate / (1.0 + jnp.exp(-bent)) * up


def store_rows(staging: Ref, out: Ref, tile: jax.Array, low: jax.Array, high: jax.Array) -> None:
    """Copies rows low .. high - 1 of staging into out f[N, 64], whose row `tile` is the first of staging.

    The rows around them belong to other groups. A copy has a size that is known when compiling, so there is one for
    each bit of the number of rows.
    """
    count, at = high - low, low
    for size in (128, 64, 32, 16, 8, 4, 2, 1):
        if size <= min(staging.shape[0], out.shape[0]):

            @pl.when(count & size != 0)
            def _(at: jax.Array = at, size: int = size) -> None:
                plgpu.copy_smem_to_gmem(staging.at[pl.ds(at, size)], out.at[pl.ds(tile + at, size)])

            at = at + (count & size)
