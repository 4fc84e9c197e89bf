"""The work of a fetching warp: it copies queries, and KV blocks through the page table."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import (
    Ref,
    barriers,
    swizzled,
)
from pallas_kernels.ragged_paged_attention.gpu.tile import (
    AttentionBuild,
)

type Pages = tuple[jax.Array, ...]  # the pages of a block


class Span(NamedTuple):
    """Blocks begin .. end - 1 of a row's KV, of one head."""

    row: jax.Array
    head: jax.Array
    begin: jax.Array
    end: jax.Array
    kv_len: jax.Array  # of the row, in tokens


def stage_memory(attention: AttentionBuild, *pipes: int) -> dict[str, Any]:
    """Returns the shared memory of `fetch_blocks`, whose indices begin with one for each of `pipes`."""
    copies = attention.block // attention.copy_tokens
    readers = 1 if pipes else attention.warpgroups
    shape = (*pipes, attention.stages)
    memory = {
        "blocks": swizzled((*shape, attention.block, attention.row_size), attention.kv_dtype),
        "block_here": barriers(copies * (1 + attention.num_scales), *shape),
        "block_free": barriers(readers, *shape),
    }
    if attention.num_scales:
        memory["block_scales"] = plgpu.SMEM((*pipes, attention.stage_scales, attention.block), jnp.float32)
    return memory


def scales_in(
    attention: AttentionBuild, memory: dict[str, Ref], slot: tuple[jax.Array, ...], number: int
) -> Ref | None:
    """Returns the scales f32[B] of the keys (number 0) or the values (1) of the block in a stage, if it has some."""
    if not attention.num_scales:
        return None
    *pipe, stage = slot
    return memory["block_scales"].at[(*pipe, stage * attention.num_scales + number)]


def fetch_queries(
    attention: AttentionBuild,
    q: Ref,
    columns: slice,
    token: jax.Array,
    head: jax.Array,
    count: jax.Array,
    into: Ref,
    here: Ref,
    most: int,
) -> None:
    """Starts the copies of some columns of `count` tokens' queries, of q f[T, K, G, D], into a tile's f[64, columns].

    `here` sees `most` arrivals, whatever the count.
    """
    group, width = attention.group, columns.stop - columns.start

    # The compiler must not know the length of these loops: unrolled 64 times, the copies need too many registers.
    @pl.loop(0, count)
    def _(index: jax.Array) -> None:
        source = q.at[token + index, head, :, pl.ds(columns.start, width)]
        plgpu.copy_gmem_to_smem(source, into.at[pl.ds(index * group, group)], here)

    @pl.loop(count, most)
    def _(_: jax.Array) -> None:
        plgpu.barrier_arrive(here)


def query_columns(attention: AttentionBuild) -> list[slice]:
    """Returns the parts in which a tile's queries are fetched."""
    width = attention.q_columns
    return [slice(start, start + width) for start in range(0, attention.head_size, width)]


def fetch_blocks(
    attention: AttentionBuild,
    kv: Ref,
    scales: Ref,
    table: Ref,
    layer: jax.Array,
    span: Span,
    memory: dict[str, Ref],
    pipe: tuple[jax.Array, ...],
    done: jax.Array,
) -> jax.Array:
    """Copies the blocks of a span into the stages, each as soon as it is free.

    kv f[L * P * K, S, row size], scales f32[L * P * K * N, S] of tokens if they have some. `done` blocks went through
    the stages before. Returns their number afterwards.
    """
    # The scales of 16 tokens are 64 bytes. Without this promise jax 0.11.2 copies them by a tensor map, which writes to
    # multiples of 128 bytes only. A plain copy writes to multiples of 16.
    plain = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
    block_tokens, page_size, tokens = attention.block, attention.page_size, attention.copy_tokens

    def pages_of(block: jax.Array) -> Pages:
        # Past the row's end its last page stands in, so that every block has the same number of copies.
        last = lax.div(span.kv_len - 1, page_size)
        starts = (block * block_tokens + at for at in range(0, block_tokens, tokens))
        return tuple(table[span.row, jnp.minimum(lax.div(start, page_size), last)] for start in starts)

    def fetch_block(block: jax.Array, state: tuple[jax.Array, Pages]) -> tuple[jax.Array, Pages]:
        done, pages = state
        slot = (*pipe, lax.rem(done, attention.stages))
        # The next block's page numbers are on their way while this one waits for room.
        ahead = pages_of(block + 1)

        @pl.when(done >= attention.stages)
        def _() -> None:
            plgpu.barrier_wait(memory["block_free"].at[slot])

        for index, page in enumerate(pages):
            slab = (layer * attention.num_pages + page) * attention.num_kv_heads + span.head
            offset = lax.rem(block * block_tokens, page_size) if page_size > block_tokens else 0
            source = kv.at[slab, pl.ds(offset, tokens)]
            into = memory["blocks"].at[(*slot, pl.ds(index * tokens, tokens))]
            plgpu.copy_gmem_to_smem(source, into, memory["block_here"].at[slot])
            for number in range(attention.num_scales):
                own = scales.at[slab * attention.num_scales + number, pl.ds(offset, tokens)]
                into = scales_in(attention, memory, slot, number)
                assert into is not None
                into = into.at[pl.ds(index * tokens, tokens)]
                plgpu.copy_gmem_to_smem(own, into, memory["block_here"].at[slot], oob_mode=plain)
        return done + 1, ahead

    return lax.fori_loop(span.begin, span.end, fetch_block, (done, pages_of(span.begin)))[0]


def drain(attention: AttentionBuild, memory: dict[str, Ref], pipe: tuple[jax.Array, ...], done: jax.Array) -> None:
    """Waits until all stages are free: no barrier may be left with a phase that no warp has waited for."""

    # The compiler must not know the stages: it kept their addresses from the start of the kernel, and spilled them.
    @pl.loop(0, jnp.minimum(done, attention.stages))
    def _(stage: jax.Array) -> None:
        plgpu.barrier_wait(memory["block_free"].at[(*pipe, stage)])
