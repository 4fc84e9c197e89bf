"""`QuantizedProduct`: what the warps of a CTA do with one unit of `gpu.quantized_matmul`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import batched
from math import gcd
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chips import GpuChip
from pallas_kernels.grouped_matmul.gpu import SWIZZLES, store_rows
from pallas_kernels.mosaic_gpu import TILE, MatrixUnit, Ref, barriers, matrix_unit_of, swizzled
from pallas_kernels.quantized_matmul.code import Code
from pallas_kernels.quantized_matmul.gpu_tiles import QuantizedTiles, folds
from pallas_kernels.quantized_matmul.registers import FOLDED_EXPONENT, WORD_BYTES, Registers, RowPanels

# The sums of a thread in the parts of a stage that are multiplied before any is scaled.
MOST_SUMS = 64


class QuantizedUnit(NamedTuple):
    """Rows low .. high - 1 of the tile that begins at row `tile`, times the matrix's rows from `column` on, in part."""

    matrix: jax.Array
    tile: jax.Array
    low: jax.Array
    high: jax.Array
    column: jax.Array
    split: jax.Array


# The scales and the zeros of a stage, [64] for each of its groups, or words of scales.
type StageFactors = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]


class CodeFactors(NamedTuple):
    """The scales and zeros of codes in global memory, and the masks that decode them in registers."""

    scales: Ref
    zeros: Ref
    of_rows: Ref
    of_tokens: Ref
    masks: tuple[jax.Array, ...]


@dataclass(frozen=True, kw_only=True)
class QuantizedProduct:
    """The work of a CTA's warps on one unit, with everything that is known when compiling."""

    tiles: QuantizedTiles
    code: Code
    scale_dtype: str
    has_zeros: bool
    has_row_scales: bool
    dtype: jnp.dtype  # of x
    size: int  # of the rows of x and of the matrices
    group: int  # inputs that share a scale
    num_columns: int  # of the result
    panels: RowPanels
    matrix_unit: MatrixUnit
    interpret: bool

    @classmethod
    def of(
        cls,
        x: jax.Array,
        codes: jax.Array,
        scales: jax.Array,
        zeros: jax.Array | None,
        row_scales: jax.Array | None,
        *,
        code: Code,
        scale_dtype: str,
        tiles: QuantizedTiles,
        chip: GpuChip,
        panels: int,
        interpret: bool,
    ) -> Self:
        """Returns the work for these arguments of `gpu.quantized_matmul`."""
        size, num_columns = x.shape[1], codes.shape[1]
        return cls(
            tiles=tiles,
            code=code,
            scale_dtype=scale_dtype,
            has_zeros=zeros is not None,
            has_row_scales=row_scales is not None,
            dtype=x.dtype,
            size=size,
            group=size // scales.shape[-1],
            num_columns=num_columns,
            panels=RowPanels(num_columns // panels, scales.shape[1] // panels),
            matrix_unit=matrix_unit_of(chip),
            interpret=interpret,
        )

    @property
    def columns(self) -> int:
        """The number of rows of a matrix that a unit multiplies by."""
        return self.tiles.halves * TILE

    @property
    def inputs(self) -> int:
        """The number of inputs of a stage."""
        return self.tiles.line * self.code.per_byte

    @property
    def unit(self) -> int:
        """The number of inputs that are added up before they are scaled, all of one group, or all scaled before."""
        return self.inputs if self.folds or self.is_of_codes else gcd(self.group, self.inputs)

    @property
    def is_of_codes(self) -> bool:
        """Whether rows of x consist of codes as well, so that a matrix unit multiplies codes in shared memory."""
        return self.dtype.name == self.code.name

    @property
    def rounds_groups(self) -> bool:
        """Whether rows of x have a size for each group of inputs, as those of the matrix have. It is a stage then."""
        return self.is_of_codes and not self.has_row_scales

    @property
    def folds(self) -> bool:
        """Whether numbers are multiplied by their scales in registers, before they are added up."""
        return folds(self.code, self.scale_dtype)

    @property
    def registers(self) -> Registers:
        """The operands that a warpgroup makes of codes in its registers."""
        return Registers(self.code, self.dtype, self.matrix_unit, self.interpret, self.panels)

    @property
    def steps(self) -> int:
        """The number of stages of a unit of work. The copy engine fills what comes after the last input with zeros."""
        return pl.cdiv(pl.cdiv(self.size, self.inputs), self.tiles.splits)

    def memory(self, out_dtype: jnp.dtype) -> dict[str, Any]:
        """Returns the kernel's shared memory."""
        stages, row_bytes = self.tiles.stages, self.size // self.code.per_byte
        lanes = next(lanes for lanes in SWIZZLES if self.size % lanes == 0 and self.unit % lanes == 0)
        of_codes = next(lanes for lanes in (self.tiles.line, *SWIZZLES) if row_bytes % lanes == 0)
        lanes, dtype = (of_codes, self.dtype) if self.is_of_codes else (lanes, jnp.dtype(jnp.uint8))
        memory = {
            "rows": swizzled((stages, self.tiles.tokens, self.inputs), self.dtype, lanes),
            "matrices": swizzled((stages, self.columns, self.tiles.line), dtype, of_codes),
            "staging": plgpu.SMEM((self.tiles.halves, self.tiles.tokens, TILE), out_dtype),
            "here": barriers(3 if self.rounds_groups else 2, stages),
            "free": barriers(self.tiles.halves, stages),
        }
        if self.rounds_groups:
            memory["token_sizes"] = plgpu.SMEM((stages, self.tiles.tokens), jnp.float32)
        return memory

    def reordered(self, x: jax.Array) -> jax.Array:
        """Returns x [N, in] with its columns in the order in which registers give those of the matrix to a matrix unit.

        Four threads have a row of the matrix, each a word of consecutive codes. The matrix unit wants two numbers of
        each thread, then the next two. `Registers.decoded` gives those that are half a word apart.
        """
        if self.is_of_codes:
            return x
        pairs = WORD_BYTES * self.code.per_byte // 2
        # XLA:GPU makes one kernel of this and a norm, and two of a gate's product. Of slices that are stacked it is the
        # other way round (HLO of a step, H200), and a layer has more norms.
        order = x.reshape(len(x), -1, 4, 2, pairs).transpose(0, 1, 4, 2, 3)
        return order.reshape(x.shape)

    def fetch(
        self, unit: QuantizedUnit, done: jax.Array, x: Ref, codes: Ref, sizes: Ref, memory: dict[str, Ref]
    ) -> None:
        """Copies the rows and the codes of a unit into the stages, each as soon as it is free.

        The sizes f32[groups, N] of rows come with them, where each group of inputs has some.
        """
        # As in attention's `gpu.fetch`: those of eight rows are 32 bytes, which only a plain copy may write anywhere.
        plain = plgpu.OOBFillMode.PROMISE_IN_BOUNDS

        @pl.loop(0, self.steps)
        def _(step: jax.Array) -> None:
            slot = lax.rem(done + step, jnp.int32(self.tiles.stages))
            here, number = memory["here"].at[slot], unit.split * self.steps + step

            @pl.when(done + step >= self.tiles.stages)
            def _() -> None:
                plgpu.barrier_wait(memory["free"].at[slot])

            source = codes.at[
                unit.matrix, pl.ds(unit.column, self.columns), pl.ds(number * self.tiles.line, self.tiles.line)
            ]
            plgpu.copy_gmem_to_smem(source, memory["matrices"].at[slot], here)
            source = x.at[pl.ds(unit.tile, self.tiles.tokens), pl.ds(number * self.inputs, self.inputs)]
            plgpu.copy_gmem_to_smem(source, memory["rows"].at[slot], here)
            if self.rounds_groups:
                source = sizes.at[number, pl.ds(unit.tile, self.tiles.tokens)]
                plgpu.copy_gmem_to_smem(source, memory["token_sizes"].at[slot], here, oob_mode=plain)

    def compute(
        self,
        half: jax.Array,
        unit: QuantizedUnit,
        done: jax.Array,
        factors: CodeFactors,
        out: Ref,
        memory: dict[str, Ref],
    ) -> None:
        """Multiplies the rows of a unit by a warpgroup's 64 rows of the matrix, and stores the results into out."""
        column, first = unit.column + half * TILE, unit.split * self.steps

        def of_stage(step: jax.Array) -> StageFactors:
            return self.of_stage(factors, unit.matrix, column, step)

        def multiply(step: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            (scales, zeros), total = carry
            later = of_stage(first + jnp.minimum(step + 1, self.steps - 1))  # under way while this stage is computed
            slot = lax.rem(done + step, jnp.int32(self.tiles.stages))
            plgpu.barrier_wait(memory["here"].at[slot])
            codes, rows = memory["matrices"].at[slot, pl.ds(half * TILE, TILE)], memory["rows"].at[slot]
            if self.is_of_codes:
                # Hopper adds up products of FP8 with fewer bits than float32 has, so each stage is added up alone.
                [sums] = self._products([(codes, rows.transpose((1, 0)))])
                if self.rounds_groups:
                    sums *= lax.broadcast_in_dim(_as_float(scales[0], self.scale_dtype), sums.shape, (0,))
                    sums *= lax.broadcast_in_dim(self._of_tokens(memory["token_sizes"].at[slot]), sums.shape, (1,))
                total += sums
            else:
                total = self.plus(total, codes, rows, (scales, zeros), factors.masks)
            plgpu.commit_smem()  # ordinary reads must be over before the next copy writes
            plgpu.barrier_arrive(memory["free"].at[slot])
            return later, total

        _, total = lax.fori_loop(0, self.steps, multiply, (of_stage(first), self.nothing()))
        total = self.of_rows(total, factors, unit.matrix, column)
        if self.is_of_codes and not self.rounds_groups:
            sizes = self._of_tokens(factors.of_tokens.at[0, pl.ds(unit.tile, self.tiles.tokens)])
            total = total * lax.broadcast_in_dim(sizes, total.shape, (1,))
        staging = memory["staging"].at[half]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staging.transpose((1, 0))[...] = plgpu.layout_cast(total.astype(staging.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        low, high = unit.low - unit.tile, unit.high - unit.tile
        store_rows(staging, out.at[unit.split, :, pl.ds(column, TILE)], unit.tile, low, high)

    def nothing(self) -> jax.Array:
        """Returns sums f32[64, tokens] before the first product."""
        return plgpu.layout_cast(jnp.zeros((TILE, self.tiles.tokens), jnp.float32), plgpu.Layout.WGMMA)

    def of_stage(self, factors: CodeFactors, matrix: jax.Array, row: jax.Array, step: jax.Array) -> StageFactors:
        """Loads the scales and the zeros of 64 rows of a matrix for the inputs of stage number `step`."""

        def of_groups(ref: Ref) -> tuple[jax.Array, ...]:
            """Loads what the groups of a stage have, [64] for each part of the stage that is added up alone."""
            begins = range(0, self.inputs, self.unit)
            if self.group == self.unit:
                return self.registers.row_values(ref, matrix, row, step * len(begins), len(begins))
            groups = [lax.div(step * self.inputs + begin, jnp.int32(self.group)) for begin in begins]
            return tuple(self.registers.row_values(ref, matrix, row, at, 1)[0] for at in groups)

        if self.is_of_codes and not self.rounds_groups:
            return (), ()
        if self.folds:
            count = self.inputs // self.group
            return self.registers.row_words(factors.scales, matrix, row, step * count, count), ()
        return of_groups(factors.scales), of_groups(factors.zeros) if self.has_zeros else ()

    def of_rows(self, total: jax.Array, factors: CodeFactors, matrix: jax.Array, row: jax.Array) -> jax.Array:
        """Multiplies sums f32[64, tokens] of 64 rows of a matrix by what they all lack, and by the scales of rows."""
        lost = 2.0**-FOLDED_EXPONENT if self.folds else 1.0
        if self.has_row_scales:
            [of_row] = self.registers.row_values(factors.of_rows, matrix, row, jnp.int32(0), 1)
            return total * lax.broadcast_in_dim(of_row.astype(jnp.float32) * lost, total.shape, (0,))
        return total * lost if self.folds else total

    def plus(
        self, total: jax.Array, codes: Ref, rows: Ref, factors: StageFactors, masks: tuple[jax.Array, ...]
    ) -> jax.Array:
        """Adds the products of rows x and 64 rows of codes in shared memory, of a stage, to total f32[64, tokens]."""
        words, (scales, zeros) = self.registers.words(codes), factors
        if self.folds:
            operand, columns = self.registers.decoded(words, None, masks, scales), rows.transpose((1, 0))
            if self.matrix_unit != "wgmma" and not self.interpret:
                # Sums of their own would be 64 registers more of 128 rows, of which ptxas spills two.
                columns = plgpu.load(columns, layout=plgpu.Layout.MMA_RHS(self.dtype))
                return plgpu.mma(total, operand, columns)
            return total + self._products([(operand, columns)])[0]
        width = self.unit // (self.code.per_byte * WORD_BYTES)
        for parts in batched(range(len(scales)), max(1, 2 * MOST_SUMS // self.tiles.tokens)):

            def matrix(part: int) -> jax.Array:
                of_part = words[:, part * width : (part + 1) * width]
                return self.registers.decoded(of_part, zeros[part] if zeros else None, masks)

            operands = [
                (matrix(part), rows.at[:, pl.ds(part * self.unit, self.unit)].transpose((1, 0))) for part in parts
            ]
            for part, sums in zip(parts, self._products(operands), strict=True):
                scale = _as_float(scales[part], self.scale_dtype)
                total = total + sums * lax.broadcast_in_dim(scale, total.shape, (0,))
        return total

    def _of_tokens(self, sizes: Ref) -> jax.Array:
        """Loads f32[tokens] as the columns of sums are held."""
        if self.interpret:
            return sizes[...]
        return plgpu.load(sizes, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)

    def _products(self, operands: Sequence[tuple[Any, Ref]]) -> list[jax.Array]:
        """Multiplies matrices [64, K] by rows [K, tokens] in shared memory: f32[64, tokens] for each.

        The matrices are in registers, or those of codes in shared memory.
        """
        if self.interpret:  # the interpreter's matrix unit takes no registers
            wide = jnp.float32 if self.is_of_codes else self.dtype  # XLA:CPU would round products of FP8 to float16
            return [
                jnp.dot(matrix[...].astype(wide), rows[...].astype(wide), preferred_element_type=jnp.float32)
                for matrix, rows in operands
            ]
        shape = TILE, self.tiles.tokens
        if self.matrix_unit != "wgmma":
            layout, of_matrix = plgpu.Layout.MMA_RHS(self.dtype), plgpu.Layout.MMA_LHS(self.dtype)
            return [
                plgpu.mma(
                    self.nothing(),
                    plgpu.load(matrix, layout=of_matrix) if self.is_of_codes else matrix,
                    plgpu.load(rows, layout=layout),
                )
                for matrix, rows in operands
            ]

        def multiply(*sums: Ref) -> list[jax.Array]:
            for one, (matrix, rows) in zip(sums, operands, strict=True):
                plgpu.wgmma(one, matrix, rows)
            plgpu.wgmma_wait(0)
            return [one[...] for one in sums]

        accumulators = [plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * len(operands)
        products: list[jax.Array] = pl.run_scoped(multiply, *accumulators)
        return products


def _as_float(scale: jax.Array, dtype: str) -> jax.Array:
    """Returns scales, or the bits of scales, in float32. The power 2^-127, which no number of it needs, becomes 0."""
    if dtype != "float8_e8m0fnu":
        return scale.astype(jnp.float32)
    return lax.bitcast_convert_type(scale.astype(jnp.uint32) << np.uint32(23), jnp.float32)
