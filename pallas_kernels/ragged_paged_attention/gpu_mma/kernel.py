"""Ragged paged attention for NVIDIA GPUs with matrix units of warps: Turing, Ampere, Ada, and the Blackwell of desks.

The plans, the masks and the softmax are those of the kernels for Hopper (`gpu`). What differs is who does the work: one
warpgroup fetches its blocks of KV itself and multiplies from registers (mma.sync), and while it waits, another one on
the same multiprocessor computes. Rows with few queries split their KV (`gpu_mma.decode`), and rows with many are
computed in tiles of queries (`gpu_mma.prefill`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chips import KIB, GpuChip
from pallas_kernels.mosaic_gpu import LANES, RESERVED, TILE, WARP_ROWS, copy_unit_of
from pallas_kernels.ragged_paged_attention.gpu.combine import combine, empty_out
from pallas_kernels.ragged_paged_attention.gpu.tile import (
    AttentionBuild,
    Where,
    first_to_fit,
    problem_of_queries,
    refuse,
)
from pallas_kernels.ragged_paged_attention.gpu.work_plan import DRAFT_QUERIES, AttendPlan, check_plan, plan_attention
from pallas_kernels.ragged_paged_attention.gpu_mma.codes import converts_float8
from pallas_kernels.ragged_paged_attention.gpu_mma.decode import decode
from pallas_kernels.ragged_paged_attention.gpu_mma.fold import fold_memory
from pallas_kernels.ragged_paged_attention.gpu_mma.prefill import prefill
from pallas_kernels.ragged_paged_attention.layout import LARGEST_GPU_HEAD, takes_warps
from pallas_kernels.ragged_paged_attention.rows import RaggedRows
from pallas_kernels.turing import install

# The blocks of threads on a multiprocessor. By ptxas the registers of a thread allow two everywhere, and three or more
# for most sizes; their shared memory would allow no third with heads of 128 where a multiprocessor has 100 KiB.
RESIDENT = 2
# A share of fewer tokens than this is not worth a block of threads.
LEAST_TOKENS = 128


def make_plan(
    rows: RaggedRows,
    q: jax.Array | jax.ShapeDtypeStruct,
    kv_pages: jax.Array | jax.ShapeDtypeStruct,
    chip: GpuChip,
    latent_size: int | None = None,
    *,
    by_token: bool = False,
) -> AttendPlan:
    """Makes the plan of `attend` for these rows. Only shape and dtype of q and kv_pages matter.

    Call it once a step, before the loop over layers.
    """
    refuse(_problem(q, kv_pages, chip, latent_size))
    build = _build(q, kv_pages, by_token=by_token, scale=1.0, soft_cap=None, has_slopes=False, interpret=False)
    narrow, num_rows = _narrow(build, chip), len(rows.kv_lens)
    shares = num_rows * narrow.num_kv_heads * -(-rows.page_table.shape[1] * narrow.page_size // LEAST_TOKENS)
    return plan_attention(
        rows,
        most=min(narrow.tile_queries, DRAFT_QUERIES),
        queries=_wide(build, chip).tile_queries,
        block=narrow.block,
        heads=narrow.num_kv_heads,
        pipes=min(RESIDENT * chip.num_sms, shares),
        least=LEAST_TOKENS // narrow.block,
    )


def attend(
    q: jax.Array,
    kv_pages: jax.Array,
    layer: jax.Array | int,
    rows: RaggedRows,
    *,
    scale: float,
    soft_cap: float | None,
    window: jax.Array | int,
    sinks: jax.Array | None,
    slopes: jax.Array | None,
    chip: GpuChip,
    interpret: bool,
    scales: jax.Array | None = None,
    latent_size: int | None = None,
    plan: AttendPlan | None = None,
) -> jax.Array:
    """Attends with q f[T, H, D] to kv_pages [L, P, K, S, 2 * D], which hold this step's KV already: [T, H, D].

    q is bfloat16 or float16, and pages are the same, int8 or float8, with `scales` f32[L, P, K, 2, S] where tokens have
    some of their own. D is a multiple of 64, at most 256, and S is a power of two from 16 to 128.

    Padding tokens get finite values. A repeat gives the same bits. `plan` is `make_plan` of the same rows; with None it
    is made here.

    Raises NotImplementedError for arguments that only the reference supports.
    """
    by_token = scales is not None

    def make(rows: RaggedRows) -> AttendPlan:
        return make_plan(rows, q, kv_pages, chip, latent_size, by_token=by_token)

    if plan is None:
        plan = make(rows)
    else:
        check_plan(plan, make, rows)
    if not chip.computes_bf16 and not interpret:
        install()
    how: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap, "has_slopes": slopes is not None}
    build = _build(q, kv_pages, by_token=by_token, **how, interpret=interpret)
    narrow, wide, where = _narrow(build, chip), _wide(build, chip), Where.of(layer, window)
    on_chip: dict[str, Any] = {"unit": copy_unit_of(chip, interpret), "has_float8": converts_float8(chip)}
    num_tokens, num_heads, head_size = q.shape
    group, num_kv_heads = build.group, build.num_kv_heads
    # The rows of a tile follow each other, and the last tile ends after the last token.
    of_heads = q.reshape(num_tokens, num_kv_heads, group, head_size).swapaxes(0, 1)
    of_heads = of_heads.reshape(num_kv_heads, num_tokens * group, head_size)
    of_heads = jnp.pad(of_heads, ((0, 0), (0, TILE), (0, 0)))
    kv = kv_pages.reshape(-1, build.page_size, 2 * head_size)
    of_tokens = None if scales is None else scales.reshape(-1, build.page_size)
    out = empty_out(q, build)
    if plan.prefill is not None:
        arguments = of_heads, kv, rows.page_table, plan.prefill, where, sinks, slopes, of_tokens
        prefill(*arguments, out, wide, **on_chip)
    partials = decode(of_heads, kv, rows.page_table, plan.decode, where, slopes, of_tokens, narrow, **on_chip)
    combine(partials, plan.decode, where, sinks, out, narrow, query_rows=group)
    return jax.freeze(out)[:, :, :group].reshape(num_tokens, num_heads, head_size)


# The operation with the largest tiles, from which `_wide` and `_narrow` make those of each kernel.
_build = partial(AttentionBuild.of_heads, matrix_unit="mma", warpgroups=1)


def _narrow(build: AttentionBuild, chip: GpuChip) -> AttentionBuild:
    """Returns the operation of the decode kernel, whose tiles have as few rows as a group of heads fits."""
    rows = next(rows for rows in (WARP_ROWS, 2 * WARP_ROWS, TILE) if rows >= build.group)
    return _sized(replace(build, rows=rows), (TILE, TILE // 2), chip)


def _wide(build: AttentionBuild, chip: GpuChip) -> AttentionBuild:
    """Returns the operation of the prefill kernel."""
    # A thread keeps 64 sums of heads of 128 with 64 rows. With heads of 256 there is room for 32 rows.
    rows = TILE if build.head_size <= 2 * LANES or build.group > TILE // 2 else TILE // 2
    # Codes of 64 tokens, with scales of their own, do not fit the registers beside their logits (8 bytes of spills).
    blocks = (TILE // 2,) if build.converts else (TILE, TILE // 2)
    return _sized(replace(build, rows=rows), blocks, chip)


def _sized(build: AttentionBuild, blocks: Sequence[int], chip: GpuChip) -> AttentionBuild:
    """Returns the operation with the largest blocks of which `RESIDENT` kernels fit a multiprocessor, or else one."""
    # Threads that load a block through registers wait for it at once: only another block of threads computes meanwhile.
    stages_of = (3, 2) if chip.has_async_copies else (1,)
    candidates = [replace(build, block=block, stages=stages) for block in blocks for stages in stages_of]
    # The driver takes a KiB for each block of threads.
    rooms = (chip.shared_memory_per_sm // RESIDENT - KIB, chip.shared_memory_per_block)
    fitting = (first_to_fit(candidates, fold_memory, room - RESERVED) for room in rooms)
    if (fits := next(filter(None, fitting), None)) is None:
        raise NotImplementedError(
            f"heads of size {build.head_size} do not fit the shared memory of {chip.name}: use the backend reference"
        )
    return fits


def _problem(
    q: jax.Array | jax.ShapeDtypeStruct,
    kv_pages: jax.Array | jax.ShapeDtypeStruct,
    chip: GpuChip,
    latent_size: int | None,
) -> str | None:
    """Returns why the kernels do not take these queries and pages."""
    group = q.shape[1] // kv_pages.shape[2]
    if not takes_warps(chip):
        return f"{chip.name} has compute capability {chip.compute_capability}"
    if q.dtype == jnp.bfloat16 and not chip.computes_bf16:
        return f"{chip.name} does not multiply bfloat16 (the option dtype: take float16)"
    if latent_size is not None:
        return "latents"
    if group > TILE:
        return f"{group} query heads share a KV head, more than {TILE}"
    return problem_of_queries(q, LARGEST_GPU_HEAD)
