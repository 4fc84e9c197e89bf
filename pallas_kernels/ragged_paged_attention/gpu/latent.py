"""The GPU kernel for latents: a page keeps one row of a token, its key, whose end is its value, for all query heads.

A row of DeepSeek V3 has 576 numbers of which the last 512 are the value, and a tile of 64 queries x heads sums up
64 x 512 values, which fill the registers of two warpgroups. Each has half of the columns. The first one also computes
the weights, and hands them over in shared memory (as FlashMLA does):

    fetching warp   | block 0 | block 1 | block 2 | ...         2 stages of 72 KiB, beside 72 KiB of queries
    warpgroup 0               | q k' | softmax | p v, left half  | q k' | softmax | ...
    warpgroup 1                                | p v, right half |

Where pages have 8 bits, each warpgroup converts half of a block, into memory that the smaller blocks leave.

There is one kernel for rows that decode and for prompts, because 64 heads fill a tile with one query already. All
tiles of all rows lie on the line of `work_plan.LatentPlan`, of which each multiprocessor gets an equal share. A tile
that one multiprocessor computes whole goes to the output at once, and the pieces of the others to `gpu.combine`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import (
    LANES,
    SWIZZLED_ROWS,
    TILE,
    Ref,
    barriers,
    fetch_in,
    interpretation,
    swizzled,
)
from pallas_kernels.ragged_paged_attention.gpu.combine import join_pieces
from pallas_kernels.ragged_paged_attention.gpu.fetch import Span, drain, fetch_blocks, scales_in, stage_memory
from pallas_kernels.ragged_paged_attention.gpu.matrix import load_converted, mma, unknown_zero, zero_unseen
from pallas_kernels.ragged_paged_attention.gpu.tile import (
    AttentionBuild,
    Softmax,
    Where,
    scaled_rows,
)
from pallas_kernels.ragged_paged_attention.gpu.work_plan import LatentPlan

HALVES = 2  # warpgroups that compute


class _TilePart(NamedTuple):
    """A multiprocessor's part of a tile: blocks begin .. end - 1 of its KV, for one group of heads."""

    table_row: jax.Array
    first_row: jax.Array  # of the queries and of the output
    queries: jax.Array
    kv_len: jax.Array
    begin: jax.Array
    end: jax.Array
    is_whole: jax.Array
    slot: jax.Array  # where the piece is left, unless it is whole


type _Walk = Callable[..., jax.Array]


def latent_memory(attention: AttentionBuild) -> dict[str, Any]:
    """Returns the kernel's shared memory."""
    panels = attention.head_size // LANES
    stages = stage_memory(attention)
    stages.pop("block_scales", None)
    memory = {
        **stages,
        # Each panel is contiguous for some rows, as a copy needs it. The output leaves by way of the first ones.
        "q_panels": swizzled((panels, TILE, LANES), attention.dtype),
        "weights": swizzled((1, TILE, attention.block), attention.dtype),
        # What warpgroup 1 multiplies its sums with, the logarithms of a piece's denominators, and the scales of tokens
        # in each stage. Arrays of their own would take a KiB of alignment each.
        "factors": plgpu.SMEM((2 + attention.stage_scales, TILE), jnp.float32),
        "q_here": barriers(panels),
        "q_free": barriers(HALVES),
        "weights_here": barriers(1),
        "weights_free": barriers(1),
    }
    if attention.converts:
        memory["converted"] = swizzled((1, attention.block, attention.head_size), attention.dtype)
        memory |= {"converted_here": barriers(HALVES), "converted_free": barriers(HALVES)}
    return memory


def attend_latents(
    q: jax.Array,
    kv: jax.Array,
    scales: jax.Array | None,
    table: jax.Array,
    plan: LatentPlan,
    where: Where,
    attention: AttentionBuild,
) -> jax.Array:
    """Attends with q f[T, groups of heads, G, D] to kv f[L * P, S, D], whose last numbers are values: [T, .., G, V].

    scales f32[L * P, S] of tokens or None. G is a multiple of 8, the rows of a swizzle. Padding gets zeros.
    """
    num_tokens, num_groups, group, head_size = q.shape
    value_size, shares, pipes = HALVES * attention.value_size, plan.shares, len(plan.shares.pipes)
    assert attention.warpgroups == HALVES and group % SWIZZLED_ROWS == 0
    num_rows = num_tokens * num_groups * group
    # The last tile reads a whole one, too.
    q_rows = jnp.pad(q.reshape(num_rows, head_size), ((0, TILE), (0, 0)))
    out = jax.empty_ref(jax.ShapeDtypeStruct((num_rows, value_size), q.dtype))
    # A pipe leaves two pieces at most: one of a tile that it finds begun, and one of a tile that it does not end.
    pieces = jax.empty_ref(jax.ShapeDtypeStruct((2 * pipes * TILE, value_size), q.dtype))
    peaks = jax.empty_ref(jax.ShapeDtypeStruct((2 * pipes, TILE), jnp.float32))

    def kernel(
        q: Ref,
        kv: Ref,
        scales: Ref,
        table: Ref,
        tiles: Ref,
        table_rows: Ref,
        starts: Ref,
        line: Ref,
        layer: Ref,
        window: Ref,
        out: Ref,
        pieces: Ref,
        peaks: Ref,
        **memory: Ref,
    ) -> None:
        cta, thread = lax.axis_index("cta"), lax.axis_index("warpgroup")
        if attention.num_scales:
            memory["block_scales"] = memory["factors"].at[pl.ds(2, attention.stage_scales)]

        def walk[C](visit: Callable[[_TilePart, C], C], carry: C) -> C:
            """Visits the CTA's pieces."""
            share, total = line[0], line[1]
            stop = jnp.minimum((cta + 1) * share, total)

            def step(_: jax.Array, state: tuple[jax.Array, jax.Array, C]) -> tuple[jax.Array, jax.Array, C]:
                at, tile, carry = state
                before, kv_len, queries, token = (tiles[tile, i] for i in range(4))
                blocks = jnp.maximum(lax.div(kv_len + (attention.block - 1), attention.block), 1)
                local = at - before * num_groups
                number = lax.div(local, blocks)
                begin = local - number * blocks
                end = jnp.minimum(blocks, begin + stop - at)
                first_row = (token * num_groups + number) * group
                is_whole, slot = (begin == 0) & (end == blocks), 2 * cta + (begin == 0).astype(jnp.int32)
                piece = _TilePart(table_rows[tile], first_row, queries, kv_len, begin, end, is_whole, slot)
                next_tile = tile + (local + end - begin >= blocks * num_groups).astype(jnp.int32)
                return at + end - begin, next_tile, visit(piece, carry)

            return lax.fori_loop(0, starts[cta, 1], step, (cta * share, starts[cta, 0], carry))[2]

        for half, consume in enumerate((_weigh_and_sum, _sum)):

            @pl.when(thread == half)
            def _compute(consume: Callable[..., None] = consume) -> None:
                plgpu.set_max_registers(232, action="increase")
                plgpu.barrier_arrive(memory["q_free"])
                if attention.converts:
                    plgpu.barrier_arrive(memory["converted_free"])
                consume(walk, attention, window[0], out, pieces, peaks, memory)
                if attention.converts:
                    plgpu.barrier_wait(memory["converted_free"])
                plgpu.wait_smem_to_gmem(0)

        fetch_in(thread == HALVES, lambda _: _produce(walk, attention, layer[0], q, kv, scales, table, memory))

    plgpu.kernel(
        kernel,
        scratch_types=latent_memory(attention),
        grid=(pipes,),
        grid_names=("cta",),
        num_threads=HALVES + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
        interpret=interpretation(attention.interpret),
    )(
        q_rows,
        kv,
        where.layer if scales is None else scales,
        table,
        shares.rows,
        plan.table_rows,
        shares.pipes,
        shares.line,
        *where,
        out,
        pieces,
        peaks,
    )
    join_pieces(pieces, peaks, plan, out, attention)
    return jax.freeze(out).reshape(num_tokens, num_groups, group, value_size)


def _produce(
    walk: _Walk,
    attention: AttentionBuild,
    layer: jax.Array,
    q: Ref,
    kv: Ref,
    scales: Ref,
    table: Ref,
    memory: dict[str, Ref],
) -> None:
    """Runs the fetching warp. A piece's first blocks are on their way before the piece before it is over."""

    def visit(piece: _TilePart, done: jax.Array) -> jax.Array:
        head = jnp.int32(0)
        ahead = jnp.minimum(piece.end, piece.begin + attention.stages)
        span = Span(piece.table_row, head, piece.begin, ahead, piece.kv_len)
        done = fetch_blocks(attention, kv, scales, table, layer, span, memory, (), done)
        plgpu.barrier_wait(memory["q_free"])

        # The compiler must not know the length of this loop: unrolled, the copies need too many registers.
        @pl.loop(0, attention.head_size // LANES)
        def _(panel: jax.Array) -> None:
            source = q.at[pl.ds(piece.first_row, TILE), pl.ds(panel * LANES, LANES)]
            plgpu.copy_gmem_to_smem(source, memory["q_panels"].at[panel], memory["q_here"])

        span = Span(piece.table_row, head, ahead, piece.end, piece.kv_len)
        return fetch_blocks(attention, kv, scales, table, layer, span, memory, (), done)

    done = walk(visit, jnp.int32(0))
    plgpu.barrier_wait(memory["q_free"])
    drain(attention, memory, (), done)


def _weigh_and_sum(
    walk: _Walk, attention: AttentionBuild, window: jax.Array, out: Ref, pieces: Ref, peaks: Ref, memory: dict[str, Ref]
) -> None:
    """Runs warpgroup 0, which computes weights, and has the left half of the values."""
    factors, stages = memory["factors"], attention.stages

    def hand_over() -> None:
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory["weights_here"])

    def visit(piece: _TilePart, done: jax.Array) -> jax.Array:
        plgpu.barrier_wait(memory["q_here"])

        def fold_block(block: jax.Array, state: tuple[jax.Array, Softmax]) -> tuple[jax.Array, Softmax]:
            done, (values, peak, total) = state
            slot, first = lax.rem(done, stages), block * attention.block
            zero = unknown_zero(block)
            kv = _take_block(attention, slot, 0, zero, memory)
            products = _multiply_keys(attention, memory["q_panels"], zero, kv)
            logits = attention.mask(attention.logits(products), first, piece.kv_len - piece.queries, window)
            weights, decay, peak, total = attention.weigh(logits, peak, total)
            plgpu.barrier_wait(memory["weights_free"])
            rounded = memory["weights"].at[zero]
            rounded[...] = weights.astype(attention.dtype)
            factors[0] = decay
            hand_over()
            values = _add_values(attention, scaled_rows(values, decay), rounded, kv, 0, piece, first, window)
            _leave_block(attention, slot, memory)
            return done + 1, (values, peak, total)

        done, (values, peak, total) = lax.fori_loop(piece.begin, piece.end, fold_block, (done, attention.start()))
        inverse = 1.0 / total
        plgpu.barrier_wait(memory["weights_free"])
        factors[0] = inverse
        factors[1] = peak + jnp.log2(total)
        hand_over()

        @pl.when(jnp.logical_not(piece.is_whole))
        def _() -> None:
            plgpu.copy_smem_to_gmem(factors.at[1], peaks.at[piece.slot])

        _write(attention, scaled_rows(values, inverse), 0, piece, out, pieces, memory)
        return done

    walk(visit, jnp.int32(0))
    plgpu.barrier_wait(memory["weights_free"])


def _sum(
    walk: _Walk, attention: AttentionBuild, window: jax.Array, out: Ref, pieces: Ref, peaks: Ref, memory: dict[str, Ref]
) -> None:
    """Runs warpgroup 1, which takes weights, and has the right half of the values."""
    del peaks
    stages = attention.stages

    def take_factors() -> jax.Array:
        plgpu.barrier_wait(memory["weights_here"])
        return plgpu.load(memory["factors"].at[0], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

    plgpu.barrier_arrive(memory["weights_free"])

    def visit(piece: _TilePart, done: jax.Array) -> jax.Array:
        def fold_block(block: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            done, values = state
            slot, first = lax.rem(done, stages), block * attention.block
            zero = unknown_zero(block)
            kv = _take_block(attention, slot, 1, zero, memory)
            values = scaled_rows(values, take_factors())
            values = _add_values(attention, values, memory["weights"].at[zero], kv, 1, piece, first, window)
            plgpu.barrier_arrive(memory["weights_free"])
            _leave_block(attention, slot, memory)
            return done + 1, values

        done, values = lax.fori_loop(piece.begin, piece.end, fold_block, (done, attention.start()[0]))
        values = scaled_rows(values, take_factors())
        plgpu.barrier_arrive(memory["weights_free"])
        _write(attention, values, 1, piece, out, pieces, memory)
        return done

    walk(visit, jnp.int32(0))


def _take_block(attention: AttentionBuild, slot: jax.Array, half: int, zero: jax.Array, memory: dict[str, Ref]) -> Ref:
    """Waits for a block, and returns it, kv f[B, D] in the queries' dtype, times its scales.

    Each warpgroup converts some of it.
    """
    stored = memory["blocks"].at[slot]
    plgpu.barrier_wait(memory["block_here"].at[slot])
    if not attention.converts:
        return stored
    plgpu.barrier_wait(memory["converted_free"])
    of_tokens, converted = scales_in(attention, memory, (slot,), 0), memory["converted"].at[zero]
    for start in range(half * LANES, attention.head_size, HALVES * LANES):
        columns = pl.ds(start, LANES)
        converted[:, columns] = load_converted(attention, stored.at[:, columns], of_tokens)
    plgpu.commit_smem()
    plgpu.barrier_arrive(memory["block_free"].at[slot])
    plgpu.barrier_arrive(memory["converted_here"])
    plgpu.barrier_wait(memory["converted_here"])
    return converted


def _leave_block(attention: AttentionBuild, slot: jax.Array, memory: dict[str, Ref]) -> None:
    """Lets the next block be written where this warpgroup has read one."""
    plgpu.barrier_arrive(memory["converted_free"] if attention.converts else memory["block_free"].at[slot])


def _multiply_keys(attention: AttentionBuild, q_panels: Ref, zero: jax.Array, kv: Ref) -> jax.Array:
    """Multiplies a tile's queries by the keys of a block kv[B, D]: f32[64, B]."""
    keys = [kv.at[:, pl.ds(start, LANES)].transpose((1, 0)) for start in range(0, attention.head_size, LANES)]
    shape = (TILE, attention.block)
    if attention.matrix_unit == "wgmma":

        def multiply(acc: Ref) -> jax.Array:
            for panel, part in enumerate(keys):
                plgpu.wgmma(acc, q_panels.at[zero + panel], part)
            return acc[...]

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
    products = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    for panel, part in enumerate(keys):
        queries = plgpu.load(q_panels.at[zero + panel], layout=plgpu.Layout.MMA_LHS(attention.dtype))
        products = mma(attention, products, queries, part)
    return products


def _add_values(
    attention: AttentionBuild,
    summed: jax.Array,
    weights: Ref,
    kv: Ref,
    half: int,
    piece: _TilePart,
    first: jax.Array,
    window: jax.Array,
) -> jax.Array:
    """Adds one half of the columns of a block's weighted values to summed f32[64, columns].

    The block begins at position `first`.
    """
    size = attention.value_size
    column = attention.head_size - (HALVES - half) * size
    values = kv.at[:, pl.ds(column, size)]
    seen = jnp.maximum(piece.kv_len - piece.queries - window + 1, 0)

    @pl.when((first < seen) | (first + attention.block > piece.kv_len))
    def _() -> None:
        # All columns at once would need half as many registers as the sums.
        for start in range(column, column + size, LANES):
            zero_unseen(kv.at[:, pl.ds(start, LANES)], first, seen, piece.kv_len)

    if attention.matrix_unit == "wgmma" and not attention.interpret:

        def multiply(acc: Ref) -> None:
            plgpu.wgmma(acc, weights, values)

        return pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(summed))
    if attention.matrix_unit == "wgmma":
        # The interpreter of jax 0.11.2 does not start from sums.
        summed = summed + jnp.dot(weights[...], values[...], preferred_element_type=jnp.float32)
    else:
        part = plgpu.load(weights, layout=plgpu.Layout.MMA_LHS(attention.dtype))
        for row in range(0, attention.block, 16):
            summed = mma(attention, summed, part[:, row : row + 16], values.at[pl.ds(row, 16)])
    plgpu.commit_smem()  # ordinary reads must be over before the next copy writes
    return summed


def _write(
    attention: AttentionBuild,
    values: jax.Array,
    half: int,
    piece: _TilePart,
    out: Ref,
    pieces: Ref,
    memory: dict[str, Ref],
) -> None:
    """Writes one half of the columns of a piece's result, by way of the memory of its queries, which are used up."""
    group, size = attention.group, attention.value_size
    panels = size // LANES
    for panel in range(panels):
        part = values[:, panel * LANES : (panel + 1) * LANES]
        memory["q_panels"].at[half * panels + panel][...] = part.astype(attention.dtype)
    plgpu.commit_smem()

    def copy(into: Ref, first_row: jax.Array) -> None:
        # The rows after the last query belong to another tile.
        for query in range(attention.tile_queries):

            @pl.when(query < piece.queries)
            def _(query: int = query) -> None:
                for panel in range(panels):
                    source = memory["q_panels"].at[half * panels + panel, pl.ds(query * group, group)]
                    rows, column = first_row + query * group, half * size + panel * LANES
                    plgpu.copy_smem_to_gmem(source, into.at[pl.ds(rows, group), pl.ds(column, LANES)])

    pl.when(piece.is_whole)(lambda: copy(out, piece.first_row))
    pl.when(jnp.logical_not(piece.is_whole))(lambda: copy(pieces, piece.slot * TILE))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(memory["q_free"])
