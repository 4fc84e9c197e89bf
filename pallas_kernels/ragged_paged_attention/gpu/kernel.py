"""Ragged paged attention for NVIDIA GPUs, in Pallas Mosaic GPU: Hopper first, later generations at reduced speed.

Rows with few queries (decode and the verification of drafts) are bound by memory. Every multiprocessor gets an equal
share of KV (`gpu.decode`), and the parts are joined afterwards (`gpu.combine`). Rows with many queries are bound by the
matrix units, and computed in tiles of queries (`gpu.prefill`). A batch may hold both; one of them writes each token's
output. Latents have a kernel of their own for all rows (`gpu.latent`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chips import GpuChip
from pallas_kernels.mosaic_gpu import (
    HOPPER,
    LANES,
    RESERVED,
    SWIZZLED_ROWS,
    TILE,
    matrix_unit_of,
)
from pallas_kernels.ragged_paged_attention.gpu.combine import combine, empty_out
from pallas_kernels.ragged_paged_attention.gpu.decode import decode, decode_memory
from pallas_kernels.ragged_paged_attention.gpu.latent import attend_latents, latent_memory
from pallas_kernels.ragged_paged_attention.gpu.prefill import HALVES, prefill, prefill_memory
from pallas_kernels.ragged_paged_attention.gpu.tile import (
    ALIGNMENT,
    AttentionBuild,
    Where,
    first_to_fit,
    problem_of_queries,
    refuse,
)
from pallas_kernels.ragged_paged_attention.gpu.work_plan import (
    DRAFT_QUERIES,
    LEAST_BLOCKS,
    AttendPlan,
    LatentPlan,
    check_plan,
    plan_attention,
    plan_latent,
)
from pallas_kernels.ragged_paged_attention.layout import LARGEST_GPU_HEAD, LARGEST_GPU_KEY
from pallas_kernels.ragged_paged_attention.rows import RaggedRows


def make_plan(
    rows: RaggedRows,
    q: jax.Array | jax.ShapeDtypeStruct,
    kv_pages: jax.Array | jax.ShapeDtypeStruct,
    chip: GpuChip,
    latent_size: int | None = None,
    *,
    by_token: bool = False,
) -> AttendPlan | LatentPlan:
    """Makes the plan of `attend` for these rows. Only shape and dtype of q and kv_pages matter.

    by_token: whether each token has scales of its own. They take shared memory, which decides the sizes of blocks.

    It takes half a dozen small kernels, which XLA does not move out of a loop over layers: call this before the loop.
    """
    if latent_size is not None:
        how: dict[str, Any] = {"by_token": by_token, "scale": 1.0, "soft_cap": None, "interpret": False}
        latent = _latent(q, kv_pages, chip, latent_size, **how)
        heads, group = _head_groups(q.shape[1])
        sizes = {"block": latent.block, "max_pipes": chip.num_sms, "page_size": latent.page_size}
        return plan_latent(rows, queries=latent.tile_queries, heads=heads, group=group, **sizes)
    attention = _attention(
        q, kv_pages, chip, by_token=by_token, scale=1.0, soft_cap=None, has_slopes=False, interpret=False
    )
    num_rows, max_pages = rows.page_table.shape
    narrow = _narrow(attention, chip)
    blocks = num_rows * narrow.num_kv_heads * -(-max_pages * narrow.page_size // narrow.block)
    ctas = min(chip.num_sms, -(-blocks // (LEAST_BLOCKS * narrow.warpgroups)))
    return plan_attention(
        rows,
        most=_decode_queries(attention, rows),
        queries=HALVES * attention.tile_queries,
        block=narrow.block,
        heads=narrow.num_kv_heads,
        pipes=ctas * narrow.warpgroups,
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
    plan: AttendPlan | LatentPlan | None = None,
) -> jax.Array:
    """Attends with q f[T, H, D] to kv_pages [L, P, K, S, 2 * D], which hold this step's KV already: [T, H, D].

    q is bfloat16 or float16, and pages are the same, int8 or float8, with `scales` f32[L, P, K, N, S] where tokens have
    some of their own. D is a multiple of 64, at most 256, and S is a
    power of two from 16 to 128. With `latent_size` V, a multiple of 128, kv_pages are [L, P, 1, S, D],
    values are the last V numbers of keys, D is at most 576, and the result is [T, H, V].

    Padding tokens get finite values. A repeat gives the same bits. `plan` is `make_plan` of the same rows; with None it
    is made here.

    Raises NotImplementedError for arguments that only the reference supports.
    """
    by_token = scales is not None
    if plan is None:
        plan = make_plan(rows, q, kv_pages, chip, latent_size, by_token=by_token)
    else:
        check_plan(plan, lambda rows: make_plan(rows, q, kv_pages, chip, latent_size, by_token=by_token), rows)
    num_tokens, num_heads, head_size = q.shape
    where = Where.of(layer, window)
    of_tokens = None if scales is None else scales.reshape(-1, scales.shape[4])
    how: dict[str, Any] = {"by_token": by_token, "scale": scale, "soft_cap": soft_cap, "interpret": interpret}
    if isinstance(plan, LatentPlan):
        assert latent_size is not None
        refuse("latents with sinks or slopes" if sinks is not None or slopes is not None else None)
        latent = _latent(q, kv_pages, chip, latent_size, **how)
        groups, group = _head_groups(num_heads)
        grouped = jnp.pad(q, ((0, 0), (0, groups * group - num_heads), (0, 0)))
        grouped = grouped.reshape(num_tokens, groups, group, head_size)
        kv = kv_pages.reshape(-1, latent.page_size, head_size)
        values = attend_latents(grouped, kv, of_tokens, rows.page_table, plan, where, latent)
        return values.reshape(num_tokens, -1, latent_size)[:, :num_heads]
    attention = _attention(q, kv_pages, chip, has_slopes=slopes is not None, **how)
    group = attention.group
    grouped = q.reshape(num_tokens, attention.num_kv_heads, group, head_size)
    kv = kv_pages.reshape(-1, attention.page_size, 2 * head_size)
    out = empty_out(q, attention)
    if plan.prefill is not None:
        wide = _wide(attention, chip)
        prefill(grouped, kv, rows.page_table, plan.prefill, where, sinks, slopes, of_tokens, out, wide, chip=chip)
    narrow, queries = _narrow(attention, chip), _decode_queries(attention, rows)
    sizes = {"queries": queries, "out_heads": out.shape[2]}
    partials = decode(grouped, kv, rows.page_table, plan.decode, where, slopes, of_tokens, narrow, **sizes)
    combine(partials, plan.decode, where, sinks, out, narrow, query_rows=out.shape[2])
    return jax.freeze(out)[:, :, :group].reshape(num_tokens, num_heads, head_size)


def _attention(
    q: jax.Array | jax.ShapeDtypeStruct,
    kv_pages: jax.Array | jax.ShapeDtypeStruct,
    chip: GpuChip,
    *,
    by_token: bool,
    scale: float,
    soft_cap: float | None,
    has_slopes: bool,
    interpret: bool,
) -> AttentionBuild:
    """Returns the operation with the smallest tiles, from which `_wide` and `_narrow` make those of each kernel."""
    group = q.shape[1] // kv_pages.shape[2]
    too_many = f"{group} query heads share a KV head, more than {TILE}" if group > TILE else None
    refuse(too_many or _problem(q, chip, LARGEST_GPU_HEAD))
    return AttentionBuild.of_heads(
        q,
        kv_pages,
        by_token=by_token,
        scale=scale,
        soft_cap=soft_cap,
        has_slopes=has_slopes,
        matrix_unit=matrix_unit_of(chip),
        warpgroups=HALVES,
        interpret=interpret,
    )


def _head_groups(num_heads: int) -> tuple[int, int]:
    """Returns the groups into which heads over latents are divided, and the heads of each, with what pads them.

    A group fits a tile, and the rows of one query begin where the swizzle does.
    """
    groups = -(-num_heads // TILE)
    return groups, -(-num_heads // (groups * SWIZZLED_ROWS)) * SWIZZLED_ROWS


def _latent(
    q: jax.Array | jax.ShapeDtypeStruct,
    kv_pages: jax.Array | jax.ShapeDtypeStruct,
    chip: GpuChip,
    latent_size: int,
    *,
    by_token: bool,
    scale: float,
    soft_cap: float | None,
    interpret: bool,
) -> AttentionBuild:
    """Returns the operation of the kernel for latents, with as many blocks in flight as there is room for."""
    problem = None
    if kv_pages.shape[2] != 1:
        problem = f"latents have {kv_pages.shape[2]} KV heads, more than one"
    elif latent_size % (HALVES * LANES):
        problem = f"latents have size {latent_size}, not a multiple of {HALVES * LANES}"
    refuse(problem or _problem(q, chip, LARGEST_GPU_KEY))
    attention = AttentionBuild(
        scale=scale,
        soft_cap=soft_cap,
        has_slopes=False,
        group=_head_groups(q.shape[1])[1],
        head_size=q.shape[-1],
        row_size=q.shape[-1],
        value_size=latent_size // HALVES,
        page_size=kv_pages.shape[3],
        num_pages=kv_pages.shape[1],
        num_kv_heads=1,
        dtype=q.dtype,
        kv_dtype=kv_pages.dtype,
        num_scales=1 if by_token else 0,
        matrix_unit=matrix_unit_of(chip),
        rows=TILE,
        block=TILE,
        stages=2,
        warpgroups=HALVES,
        interpret=interpret,
    )
    return _first_to_fit([replace(attention, stages=stages) for stages in (4, 3, 2)], latent_memory, chip)


def _decode_queries(attention: AttentionBuild, rows: RaggedRows) -> int:
    """Returns the most queries of a row that counts as decoding."""
    return 1 if rows.decode_only else min(attention.tile_queries, DRAFT_QUERIES)


def _wide(attention: AttentionBuild, chip: GpuChip) -> AttentionBuild:
    """Returns the operation of the prefill kernel: with large blocks, so that the matrix units pause rarely."""
    # Neither codes nor scales of 128 tokens fit the registers beside their logits (328 and 540 bytes of spills on an
    # H200).
    blocks = (64,) if attention.converts else (128, 64)
    sizes = [(block, stages) for block in blocks for stages in (3, 2)]
    candidates = [replace(attention, block=block, stages=stages) for block, stages in sizes]
    return _first_to_fit(candidates, prefill_memory, chip)


def _narrow(attention: AttentionBuild, chip: GpuChip) -> AttentionBuild:
    """Returns the operation of the decode kernel, with as much in flight as there is room for.

    Blocks of 64 tokens x 128 are 32 KiB. Larger ones leave too few in flight, and smaller ones cost the softmax more.
    """
    block = 128 if attention.head_size == LANES else 64
    sizes = [(pipes, stages) for pipes in (2, 1) for stages in (4, 3, 2)]
    candidates = [replace(attention, warpgroups=pipes, block=block, stages=stages) for pipes, stages in sizes]
    return _first_to_fit(candidates, decode_memory, chip)


def _first_to_fit(
    candidates: Sequence[AttentionBuild], memory: Callable[[AttentionBuild], dict[str, Any]], chip: GpuChip
) -> AttentionBuild:
    """Returns the first candidate whose shared memory fits the chip."""
    # What is reserved counts the alignment of one small array, which `first_to_fit` counts.
    room = chip.shared_memory_per_block - RESERVED + ALIGNMENT // 2
    if (attention := first_to_fit(candidates, memory, room)) is None:
        size = candidates[0].head_size
        raise NotImplementedError(
            f"heads of size {size} do not fit the shared memory of {chip.name}: use the backend reference"
        )
    return attention


def _problem(q: jax.Array | jax.ShapeDtypeStruct, chip: GpuChip, largest: int) -> str | None:
    """Returns why no kernel takes these queries, whose heads may have sizes up to `largest`."""
    if not chip.has_copy_engine:
        return f"{chip.name} has compute capability {chip.compute_capability}, below {HOPPER}"
    return problem_of_queries(q, largest)
