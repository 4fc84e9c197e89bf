"""The product with matrices of few bits for NVIDIA GPUs that have no copy engine: Turing, Ampere and Ada.

A CTA is one warpgroup, and has one unit of work: some rows of x, 64 rows of a matrix, and a part of the inputs. Its
threads copy both into shared memory, some stages ahead (`cp.async`, which Turing has not: there they load and store).
Several CTAs share a multiprocessor, so that one computes while another waits. What is computed is that of
`gpu_product`, by `mma`: no element of the matrix is rounded.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chips import GpuChip
from pallas_kernels.grouped_matmul.gpu import ALIGNMENT, plan_visits, visits_of_one
from pallas_kernels.mosaic_gpu import (
    TILE,
    CopyUnit,
    Ref,
    barriers,
    copy_unit_of,
    interpretation,
    swizzled,
)
from pallas_kernels.quantized_matmul.code import Code
from pallas_kernels.quantized_matmul.gpu_product import CodeFactors, QuantizedProduct, QuantizedUnit
from pallas_kernels.quantized_matmul.gpu_tiles import QuantizedTiles, row_lanes
from pallas_kernels.quantized_matmul.registers import twice
from pallas_kernels.turing import install

COPIES_OF_STAGE = 2  # codes and rows, each a group of `cp.async`


def quantized_matmul(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    starts: jax.Array | None,
    first: jax.Array | int = 0,
    row_scales: jax.Array | None = None,
    *,
    code: Code,
    scale_dtype: str,
    dtype: jnp.dtype,
    tiles: QuantizedTiles,
    chip: GpuChip,
    panels: int = 1,
    interpret: bool = False,
) -> jax.Array:
    """Multiplies each row of x [N, in] by matrix `first` + g, where g is its group: [N, out] in `dtype`.

    The arguments are those of `gpu.quantized_matmul`, but rows of x have no codes. `tiles` are those of `choose_tiles`
    for such a chip, which divide the inputs: a copy may not go beyond the array that it copies from.
    """
    if not chip.computes_bf16 and not interpret:
        install()
    num_rows, size = x.shape
    if scales.dtype.itemsize == 1:
        scales = lax.bitcast_convert_type(scales, jnp.uint8)
    num_columns, tokens = codes.shape[1], tiles.tokens
    product = QuantizedProduct.of(
        x,
        codes,
        scales,
        zeros,
        row_scales,
        code=code,
        scale_dtype=scale_dtype,
        tiles=tiles,
        chip=chip,
        panels=panels,
        interpret=interpret,
    )
    unit_of_work = WarpgroupUnit(product, copy_unit_of(chip, interpret))
    x = jnp.pad(product.reordered(x), ((0, tokens + -num_rows % ALIGNMENT), (0, 0)))
    visits, num_visits = (
        visits_of_one(num_rows, tokens) if starts is None else plan_visits(starts, num_rows, tokens, first=0)
    )
    most, blocks = len(visits), pl.cdiv(num_columns, TILE)
    out_dtype = dtype if tiles.splits == 1 else jnp.dtype(jnp.float32)

    def kernel(
        x: Ref,
        codes: Ref,
        scales: Ref,
        zeros: Ref,
        row_scales: Ref,
        visits: Ref,
        num_visits: Ref,
        first: Ref,
        masks: Ref,
        out: Ref,
        **memory: Ref,
    ) -> None:
        # Neighbouring CTAs have the same part of the matrix, which so comes from the L2.
        cta = lax.axis_index("cta")
        part, visit = lax.div(cta, jnp.int32(most)), lax.rem(cta, jnp.int32(most))

        @pl.when(visit < num_visits[0])
        def _() -> None:
            split, block = lax.rem(part, jnp.int32(tiles.splits)), lax.div(part, jnp.int32(tiles.splits))
            matrix, eighth, low, high = (visits[visit, i] for i in range(4))
            # The last block begins earlier, rather than with rows at its end that are not there.
            column = jnp.minimum(block * TILE, num_columns - TILE)
            unit = QuantizedUnit(first[0] + matrix, eighth * ALIGNMENT, low, high, column, split)
            factors = CodeFactors(scales, zeros, row_scales, scales, tuple(masks[i] for i in range(masks.shape[0])))
            total = unit_of_work.compute(unit, x, codes, factors, memory)
            out[split, visit, pl.ds(block * TILE, TILE), :] = total.astype(out_dtype)

    out: jax.Array = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((tiles.splits, most, blocks * TILE, tokens), out_dtype),
        scratch_types=unit_of_work.memory(),
        grid=(tiles.splits * blocks * most,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(),
        interpret=interpretation(interpret),
        kernel_name="quantized_matmul",
    )(
        x,
        lax.bitcast_convert_type(codes, jnp.uint8),
        scales,
        scales if zeros is None else zeros,
        scales if row_scales is None else row_scales,
        visits,
        num_visits,
        jnp.asarray(first, jnp.int32).reshape(1),
        jnp.array([twice(mask) for mask in product.registers.masks]),
    )
    if twice_computed := blocks * TILE - num_columns:
        whole = (blocks - 1) * TILE
        out = jnp.concatenate([out[:, :, :whole], out[:, :, whole + twice_computed :]], axis=2)
    by_visit = out.sum(0).astype(dtype).transpose(0, 2, 1)
    if starts is None:
        result = by_visit.reshape(most * tokens, num_columns)[:num_rows]
    else:
        row = jnp.arange(num_rows, dtype=jnp.int32)
        # Visits follow each other as their rows do, and those that are not made come after all.
        begins = jnp.where(jnp.arange(most) < num_visits[0], visits[:, 2], num_rows)
        visit = jnp.searchsorted(begins, row, side="right", method="compare_all").astype(jnp.int32) - 1
        result = by_visit[visit, row - visits[visit, 1] * ALIGNMENT]
    result = result.reshape(num_rows, panels, -1)
    return result[:, :, : scales.shape[1] // panels].reshape(num_rows, -1)


@dataclass(frozen=True)
class WarpgroupUnit:
    """A unit of work that one warpgroup does alone."""

    product: QuantizedProduct
    copy_unit: CopyUnit

    @property
    def lanes(self) -> int:
        """The inputs of rows of x that are swizzled together."""
        lanes = row_lanes(self.product.tiles.tokens, self.product.inputs, self.product.unit)
        assert lanes is not None, self.product
        return lanes

    def memory(self) -> dict[str, Any]:
        """Returns the shared memory of a CTA."""
        tiles, stages = self.product.tiles, self.product.tiles.stages
        memory = {
            "rows": swizzled((stages, tiles.tokens, self.product.inputs), self.product.dtype, self.lanes),
            "matrices": swizzled((stages, TILE, tiles.line), jnp.dtype(jnp.uint8), tiles.line),
        }
        return memory | ({"here": barriers(COPIES_OF_STAGE, stages)} if self.copy_unit == "tma" else {})

    def compute(
        self, unit: QuantizedUnit, x: Ref, codes: Ref, factors: CodeFactors, memory: dict[str, Ref]
    ) -> jax.Array:
        """Multiplies rows of x by 64 rows of a matrix, or by a part of their inputs: sums f32[64, tokens]."""
        product, stages = self.product, self.product.tiles.stages
        first, last = unit.split * product.steps, product.steps - 1
        for stage in range(stages):
            self._fetch(unit, jnp.int32(stage), x, codes, memory)

        def of_stage(step: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
            return product.of_stage(factors, unit.matrix, unit.column, first + step)

        def multiply(step: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            own, total = carry
            later = of_stage(jnp.minimum(step + 1, last))  # under way while this stage is computed
            slot = lax.rem(step, jnp.int32(stages))
            if self.copy_unit == "tma":
                plgpu.barrier_wait(memory["here"].at[slot])
            elif self.copy_unit == "cp.async":
                # An instruction waits until a number of copies, known when compiling, are left: those of later stages.
                left = jnp.minimum(stages - 1, last - step)
                for count in range(min(stages, product.steps)):
                    pl.when(left == count)(partial(plgpu.wait_gmem_to_smem, COPIES_OF_STAGE * count))
            total = product.plus(total, memory["matrices"].at[slot], memory["rows"].at[slot], own, factors.masks)
            self._fetch(unit, step + stages, x, codes, memory)
            return later, total

        _, total = lax.fori_loop(0, product.steps, multiply, (of_stage(jnp.int32(0)), product.nothing()))
        return product.of_rows(total, factors, unit.matrix, unit.column)

    def _fetch(self, unit: QuantizedUnit, step: jax.Array, x: Ref, codes: Ref, memory: dict[str, Ref]) -> None:
        """Copies the rows and the codes of a stage, if there is such a step."""
        tiles = self.product.tiles
        slot = lax.rem(step, jnp.int32(tiles.stages))
        number = unit.split * self.product.steps + step
        sources = {
            "matrices": codes.at[unit.matrix, pl.ds(unit.column, TILE), pl.ds(number * tiles.line, tiles.line)],
            "rows": x.at[pl.ds(unit.tile, tiles.tokens), pl.ds(number * self.product.inputs, self.product.inputs)],
        }

        @pl.when(step < self.product.steps)  # nobody would wait for the copies of other stages
        def _() -> None:
            for name, source in sources.items():
                into = memory[name].at[slot]
                if self.copy_unit == "loads":
                    into[...] = self._loaded(source)
                elif self.copy_unit == "cp.async":
                    plgpu.copy_gmem_to_smem(source, into, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
                else:
                    plgpu.commit_smem()
                    plgpu.copy_gmem_to_smem(source, into, memory["here"].at[slot])

    def _loaded(self, source: Ref) -> jax.Array:
        """Loads a part of an array in the layout in which it is stored to shared memory."""
        dtype = jnp.dtype(source.dtype)
        lanes = self.product.tiles.line if dtype.itemsize == 1 else self.lanes
        layout = plgpu.Layout.SMEM_GMEM_COPY(source.shape, dtype, lanes * dtype.itemsize)
        return plgpu.load(source, layout=layout, optimized=False)
