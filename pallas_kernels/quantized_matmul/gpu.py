"""The product with matrices of few bits for NVIDIA GPUs (Mosaic GPU): codes stay codes up to a warp's registers.

A unit of work is some rows of x, 64 or 128 rows of a matrix, and a part of the inputs. CTAs take units in turn. A warp
fetches rows and codes by TMA, stage by stage, and goes on with the next unit while warpgroups compute this one, each
with 64 rows of the matrix. A matrix unit takes these from registers, and the rows of x from shared memory. It adds up
the inputs of a group alone, so that the sums are multiplied by scales, in float32, and no element is rounded.

GPUs without TMA have another kernel, that of `gpu_before_hopper`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chips import GpuChip
from pallas_kernels.grouped_matmul.gpu import ALIGNMENT, drain, in_turn, plan_visits, visits_of_one
from pallas_kernels.mosaic_gpu import Ref, fetch_in, interpretation
from pallas_kernels.quantized_matmul import gpu_before_hopper
from pallas_kernels.quantized_matmul.code import Code
from pallas_kernels.quantized_matmul.gpu_product import CodeFactors, QuantizedProduct, QuantizedUnit
from pallas_kernels.quantized_matmul.gpu_tiles import HALVES, QuantizedTiles
from pallas_kernels.quantized_matmul.registers import twice

# A warpgroup fetches even where only one computes: see `THREADS` of attention's `gpu.decode`.
THREADS = HALVES + 1


def quantized_matmul(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    starts: jax.Array | None,
    first: jax.Array | int = 0,
    row_scales: jax.Array | None = None,
    sizes: jax.Array | None = None,
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

    codes  # [matrices, out, in], or [matrices, out, in / 2] where a byte has two, in any dtype of eight bits
    scales  # [matrices, out, groups] in `scale_dtype`, or its bits: each is that of in / groups inputs that follow each
    other
    zeros  # like scales, integers of eight bits; None: the number that stands for 0 where a matrix says none
    starts  # i32[G + 1]: rows starts[g] to starts[g + 1] are those of group g; the rest of the result is arbitrary.
    None: all rows are of one group
    row_scales  # f32[matrices, out, 1]: each row of a matrix is multiplied by its own, too, if they are given
    sizes  # f32[groups, N], of rows x in the dtype of `code`, whose inputs are multiplied by those of their groups. A
    matrix unit multiplies codes then. With `row_scales` a row has one size, f32[1, N], and `scales` are not read.

    A matrix has `panels` of as many rows each. Codes may have more rows at the end of each panel, which scales and the
    result lack.

    An element of a matrix is (code - zero) * scale, and none is rounded. E2M1 may have scales in E4M3 for groups of 16.
    Sums are in float32. A code that is no finite number counts as a number beyond the largest one. But E5M2 has the
    exponents of float16, where infinity and NaN stay what they are. `tiles` are those of `choose_tiles`. Starts that do
    not rise, and matrices that are not there, are not detected.
    """
    num_rows, size = x.shape
    if not chip.has_copy_engine:
        assert sizes is None, "choose_tiles has no tiles for rows of codes"
        return gpu_before_hopper.quantized_matmul(
            x,
            codes,
            scales,
            zeros,
            starts,
            first,
            row_scales,
            code=code,
            scale_dtype=scale_dtype,
            dtype=dtype,
            tiles=tiles,
            chip=chip,
            panels=panels,
            interpret=interpret,
        )
    if scales.dtype.itemsize == 1:
        scales = lax.bitcast_convert_type(scales, jnp.uint8)
    num_matrices, num_columns, _ = codes.shape
    build = QuantizedProduct.of(
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
    # A copy may not be larger than what it copies from, and begins and ends at a multiple of eight.
    x = jnp.pad(build.reordered(x), ((0, max(-num_rows % ALIGNMENT, tiles.tokens - num_rows)), (0, 0)))
    if sizes is not None:
        # A tile begins at a multiple of eight rows, and the last ones of all parts may end beyond the last of them.
        beyond = -num_rows % ALIGNMENT + tiles.tokens
        stages = build.steps * tiles.splits if build.rounds_groups else 1
        sizes = jnp.pad(sizes, ((0, stages - len(sizes)), (0, beyond)))
    # The first matrix is an operand of its own, so that the visits of one group are constants: XLA would write them in
    # each layer otherwise, by a kernel before each product.
    visits, num_visits = (
        visits_of_one(num_rows, tiles.tokens)
        if starts is None
        else plan_visits(starts, num_rows, tiles.tokens, first=0)
    )
    blocks = pl.cdiv(num_columns, build.columns)
    ctas = min(chip.num_sms, len(visits) * blocks * tiles.splits)

    def kernel(
        x: Ref,
        codes: Ref,
        scales: Ref,
        zeros: Ref,
        row_scales: Ref,
        sizes: Ref,
        visits: Ref,
        num_visits: Ref,
        first: Ref,
        masks: Ref,
        out: Ref,
        **memory: Ref,
    ) -> None:
        thread = lax.axis_index("warpgroup")

        def walk(work: Callable[[QuantizedUnit, jax.Array], None]) -> jax.Array:
            """Does the CTA's units. Each is told how many stages came before. Returns how many there were in all."""
            together = num_visits[0]

            def one(number: jax.Array, done: jax.Array) -> None:
                # Neighbouring CTAs have the same part of the matrix, which so comes from the L2.
                part, visit = lax.div(number, together), lax.rem(number, together)
                split, block = lax.rem(part, jnp.int32(tiles.splits)), lax.div(part, jnp.int32(tiles.splits))
                matrix, eighth, low, high = (visits[visit, i] for i in range(4))
                # Only from this product the compiler knows that tiles begin where a copy may begin.
                unit = QuantizedUnit(first[0] + matrix, eighth * ALIGNMENT, low, high, block * build.columns, split)
                work(unit, done)

            return in_turn(together * (blocks * tiles.splits), ctas, build.steps, one)

        @pl.when(thread < tiles.halves)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            factors = CodeFactors(scales, zeros, row_scales, sizes, tuple(masks[i] for i in range(masks.shape[0])))
            walk(lambda unit, done: build.compute(thread, unit, done, factors, out, memory))
            plgpu.wait_smem_to_gmem(0)

        def fetch(_: jax.Array) -> None:
            filled = walk(lambda unit, done: build.fetch(unit, done, x, codes, sizes, memory))
            drain(memory["free"], tiles.stages, filled)

        fetch_in(thread == HALVES, fetch)

    out_dtype = dtype if tiles.splits == 1 else jnp.dtype(jnp.float32)
    out: jax.Array = plgpu.kernel(
        kernel,
        # RowPanels of 64 columns are stored whole, also those in which the matrix ends.
        out_type=jax.ShapeDtypeStruct((tiles.splits, num_rows, blocks * build.columns), out_dtype),
        scratch_types=build.memory(out_dtype),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=THREADS,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(),
        interpret=interpretation(interpret),
        kernel_name="quantized_matmul",
    )(
        x,
        lax.bitcast_convert_type(codes, code.dtype if build.is_of_codes else jnp.uint8),
        scales,
        scales if zeros is None else zeros,
        scales if row_scales is None else row_scales,
        scales if sizes is None else sizes,
        visits,
        num_visits,
        jnp.asarray(first, jnp.int32).reshape(1),
        jnp.array([twice(mask) for mask in build.registers.masks]),
    )
    result = out.sum(0).astype(dtype)[:, :num_columns].reshape(num_rows, panels, -1)
    return result[:, :, : scales.shape[1] // panels].reshape(num_rows, -1)
