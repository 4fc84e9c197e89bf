"""Ragged paged attention for TPU, in Pallas: one call writes the new keys and values in place and attends.

The kernel has no grid. It loops over rows, tiles and pages by row metadata in scalar memory. The pages stay in HBM (XLA
may put small arrays into VMEM), and every copy is started by hand, so that the next row's pages are on their way before
this row ends.

    decode    rows with one query: its heads are the rows of a matrix; the token is merged into the row's last page
    write     rows with more: all their keys and values, before any of it is attended to
    verify    rows with a few queries, one tile each
    prefill   rows with many, tile by tile
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import TpuChip
from pallas_kernels.ragged_paged_attention.layout import check_scaled_heads
from pallas_kernels.ragged_paged_attention.rows import RaggedRows
from pallas_kernels.ragged_paged_attention.tpu.attend import Attender
from pallas_kernels.ragged_paged_attention.tpu.blocks import LANES, Blocks, Problem, Stage, choose, write_tokens
from pallas_kernels.ragged_paged_attention.tpu.walk import CoreRows, Ref, Walk
from pallas_kernels.ragged_paged_attention.tpu.write import Merger, Writer

DTYPES = (jnp.float32, jnp.bfloat16)
VMEM_SHARE = 0.9  # of a core's VMEM, for buffers and the compiler's own use


def attend(
    q: jax.Array,
    new: jax.Array,
    kv_pages: jax.Array,
    layer: jax.Array | int,
    rows: RaggedRows,
    *,
    scale: float,
    soft_cap: float | None,
    window: jax.Array | int,
    sinks: jax.Array | None,
    slopes: jax.Array | None,
    latent_size: int | None,
    scales: jax.Array | None,
    chip: TpuChip,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Does `ragged_paged_attention` with q f[T, H, D], and rows `new` of the pages' dtype [T, K, W] to write.

    D is a multiple of 64, and `latent_size` and the D that has such values of 128. Values are f[T, H, D], the smaller
    ones of latents at the end. Where tokens have scales of their own, those of new ones are in `scales` already.

    Raises NotImplementedError for dtypes, page tables and heads that the kernel has no room or registers for.
    """
    num_tokens, num_heads, head_size = q.shape
    _, _, num_kv_heads, page_size, _ = kv_pages.shape
    if q.dtype not in DTYPES:
        raise NotImplementedError(
            f"the tpu kernel computes in float32 or bfloat16, not {q.dtype}: use the backend reference"
        )
    dtypes = str(q.dtype), str(kv_pages.dtype)
    problem = Problem(num_heads, num_kv_heads, head_size, page_size, *dtypes, latent_size, by_token=scales is not None)
    tables = _tables(rows.page_table, chip)
    # Heads are padded to whole registers of 8, because a tile's heads are read with a stride.
    q = jnp.pad(q, ((0, 0), (0, -num_heads % 8), (0, 0)))
    scalars = [rows.query_starts, rows.kv_lens, jnp.stack([jnp.int32(layer), jnp.int32(window)])]
    scalars += [of_heads.astype(jnp.float32) for of_heads in (sinks, slopes) if of_heads is not None]
    names: tuple[Stage, ...] = ("decode",) if rows.decode_only else ("decode", "verify", "prefill")
    stages = _Stages(problem, {name: choose(name, problem, chip) for name in names}, write_tokens(problem, chip))
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    arrays = [tables, new, q, kv_pages]
    if scales is not None:
        check_scaled_heads(num_kv_heads)
        scales = scales.reshape(*scales.shape[:2], -1, scales.shape[4])
        arrays.append(scales)
    call = pl.pallas_call(
        partial(
            _kernel,
            stages=stages,
            scale=scale,
            soft_cap=soft_cap,
            has_sinks=sinks is not None,
            has_slopes=slopes is not None,
            has_scales=scales is not None,
            num_cores=chip.num_cores,
        ),  # fmt: skip
        out_shape=(jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(chip.num_cores,),
            in_specs=[in_hbm] * len(arrays),
            out_specs=(in_hbm, in_hbm),
            scratch_shapes=(stages.scratch(tables, q, kv_pages, scales),),
        ),
        # Outputs replace the queries, so padding tokens get finite values, and nothing is allocated.
        input_output_aliases={len(scalars) + 2: 0, len(scalars) + 3: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel" if chip.num_cores > 1 else "arbitrary",),
            vmem_limit_bytes=int(chip.vmem_bytes * VMEM_SHARE),
            # Bounds checks are a third of the instructions that start a page. The interpreter does them in every test.
            disable_bounds_checks=True,
        ),
        interpret=pltpu.InterpretParams(detect_races=True, num_cores_or_threads=chip.num_cores) if interpret else False,
        name="ragged_paged_attention",
    )
    out, kv_pages = call(*scalars, *arrays)
    return out[:, :num_heads], kv_pages


def _tables(page_table: jax.Array, chip: TpuChip) -> jax.Array:
    """Returns the page table as i32[R, N, 128], of which one row can be copied to scalar memory."""
    num_rows, max_pages = page_table.shape
    padded = -(-max_pages // LANES) * LANES
    if 2 * 4 * padded > chip.smem_bytes // 2:
        raise NotImplementedError(
            f"the tpu kernel keeps the page tables of two rows in scalar memory, at most {chip.smem_bytes // 16} pages "
            f"a row, not {max_pages}: use larger pages, a smaller max_model_len, or the backend "
            "reference"
        )
    return jnp.pad(page_table, ((0, 0), (0, padded - max_pages))).reshape(num_rows, -1, LANES)


@dataclass(frozen=True)
class _Stages:
    """The static half of the kernel. If it has only decode, no row has more than one query."""

    problem: Problem
    blocks: dict[Stage, Blocks]
    write_tokens: int

    @property
    def decode_only(self) -> bool:
        return len(self.blocks) == 1

    def scratch(
        self, tables: jax.Array, tokens: jax.Array, pages: jax.Array, scales: jax.Array | None
    ) -> dict[str, Any]:
        """Returns the buffers of each stage, which are not shared: `run_scoped` asks which TPU this process has."""
        buffers: dict[str, Any] = {
            name: Attender.scratch(self.problem, blocks, pages, tokens, scales) for name, blocks in self.blocks.items()
        }
        buffers["walk"] = Walk.scratch(tables.shape)
        buffers["merger"] = Merger.scratch(pages, self.blocks["decode"].slots)
        if not self.decode_only:
            buffers["writer"] = Writer.scratch(pages, self.write_tokens)
        return buffers


def _kernel(
    query_starts: Ref,
    kv_lens: Ref,
    parameters: Ref,
    *refs: Any,
    stages: _Stages,
    scale: float,
    soft_cap: float | None,
    has_sinks: bool,
    has_slopes: bool,
    has_scales: bool,
    num_cores: int,
) -> None:
    """Runs the whole call on each core. Aliased arrays are read and written through the outputs."""
    *inputs, tokens, pages, scratch = refs
    scales = inputs.pop() if has_scales else None
    *of_heads, tables, new, _, _ = inputs
    sinks, slopes = of_heads[0] if has_sinks else None, of_heads[-1] if has_slopes else None
    layer, window = parameters[0], parameters[1]

    def walk(least: int, most: int) -> Walk:
        rows = CoreRows(query_starts, kv_lens, stages.decode_only, least, most, pl.program_id(0), num_cores)
        return Walk(rows, tables, **scratch["walk"])

    def attend_rows(stage: Stage, least: int, most: int, merger: Merger | None = None) -> None:
        blocks = stages.blocks[stage]
        Attender(
            stages.problem.part(blocks), blocks, scale, soft_cap, walk(least, most), merger, layer, window,
            sinks, slopes, tokens, pages, scales, **scratch[stage],
        ).run()  # fmt: skip

    attend_rows("decode", 1, 1, Merger(new, **scratch["merger"]))
    if not stages.decode_only:
        few, all_tokens = stages.blocks["verify"].tile_queries, tokens.shape[0]
        Writer(walk(2, all_tokens), layer, new, pages, **scratch["writer"]).run()
        attend_rows("verify", 2, few)
        attend_rows("prefill", few + 1, all_tokens)
