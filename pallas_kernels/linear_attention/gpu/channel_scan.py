"""The recurrence of the first Mamba for NVIDIA GPUs, where each number of a state forgets at a pace of its own.

No product of matrices takes in several tokens, so they go one after the other. A CTA has the states of 64 channels of
one row in the registers of a warpgroup. Each warp has 16 of these channels, and the lanes of a warp share their
numbers, so that what is read is added up by shuffles within a warp.
"""

from math import e, log2
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear_attention.channel_tokens import ChannelTokens
from pallas_kernels.linear_attention.gpu.single import StatePlan, StateTile
from pallas_kernels.mosaic_gpu import Ref, interpretation

# The channels of a CTA. The 8,192 of Jamba make 128 CTAs of a prompt, for 132 multiprocessors.
CHANNELS_OF_CTA = 64
# The lanes of a warp that share a channel.
SHARING = 8
# The numbers of a channel's state. A thread has as many for each 16: 8 of states, and 8 paces.
MOST_NUMBERS = 64
# The tokens whose operands are fetched together, while those before are taken in.
GROUP = 4


def choose_channels(size: int, num_channels: int) -> StateTile | None:
    """Returns the tile of `scan_channels` for channels with `size` numbers each, or None where it does not take them.

    It takes sizes up to 64, a multiple of 8, and a multiple of 64 channels.
    """
    if size % SHARING or size > MOST_NUMBERS or num_channels % CHANNELS_OF_CTA:
        return None
    return StateTile(size, CHANNELS_OF_CTA, keys_last=False)


def scan_channels(
    pages: jax.Array,
    place: jax.Array | int,
    plan: StatePlan,
    tokens: ChannelTokens,
    *,
    tile: StateTile,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Takes the tokens of all rows into the states of layer `place`, and returns what is read and the pages.

    pages  # f32[L, P, K, R, W]: of a block of channels, a state [S, C]. R W is a multiple of C

    What is read is f32[T, K, C], and anything for padding. Rows are taken in any order, so none may write a page from
    which another one begins. The pages are updated in place when donated. `tile` is that of `choose_channels`.
    """
    num_tokens, num_blocks, num_channels = tokens.x.shape
    size, decode_only = tokens.pace.shape[1], num_tokens == len(plan.rows)
    in_numbers = pages.reshape(*pages.shape[:3], -1, num_channels)

    def kernel(
        where: Ref,
        rows: Ref,
        columns: Ref,
        pace: Ref,
        skip: Ref,
        x: Ref,
        dt: Ref,
        b: Ref,
        c: Ref,
        pages: Ref,
        read: Ref,
    ) -> None:
        row, block, part = (lax.axis_index(name) for name in ("row", "block", "part"))
        first, first_column, num_columns, before = (rows[row, i] for i in range(4))
        own = pl.ds(part * tile.lines, tile.lines)

        def state_of(page: jax.Array) -> Ref:
            return pages.at[where[0], page, block, pl.ds(0, size), own]

        def fetch(token: jax.Array) -> tuple[jax.Array, ...]:
            values, steps = (tile.load_lines(of.at[token, block, own]) for of in (x, dt))
            return values.astype(jnp.float32), steps, tile.load_keys(b.at[token]), tile.load_keys(c.at[token])

        @pl.when(num_columns > 0)
        def _() -> None:
            last = columns[first_column + num_columns - 1, 0] - 1
            paces = plgpu.load(pace.at[block, :, own], layout=tile.layout, optimized=False)
            skips = tile.load_lines(skip.at[block, own])
            state = plgpu.load(state_of(jnp.maximum(before, 0)), layout=tile.layout, optimized=False)
            state = jnp.where(
                jnp.broadcast_to(before >= 0, tile.shape), state, 0.0
            )  # a page that was free may have NaN

            def take(token: jax.Array, state: jax.Array, fetched: tuple[jax.Array, ...]) -> jax.Array:
                values, steps, b, c = fetched
                left = jnp.exp2(tile.of_lines(steps) * paces)
                state = state * left + tile.of_lines(steps * values) * tile.of_keys(b)
                read[token, block, own] = jnp.sum(state * tile.of_keys(c), axis=tile.key_axis) + skips * values
                return state

            def take_one(token: jax.Array, state: jax.Array) -> jax.Array:
                return take(token, state, fetch(token))

            def fetch_group(token: jax.Array) -> list[tuple[jax.Array, ...]]:
                return [fetch(jnp.minimum(token + i, last)) for i in range(GROUP)]

            def take_groups(begin: jax.Array, num_groups: jax.Array, state: jax.Array) -> jax.Array:
                def turn(number: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
                    state, group = carry
                    token = begin + number * GROUP
                    following = fetch_group(token + GROUP)
                    for i, fetched in enumerate(group):
                        state = take(token + i, state, fetched)
                    return state, following

                return lax.fori_loop(0, num_groups, turn, (state, fetch_group(begin)))[0]

            def take_column(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                begin, state = carry
                column = first_column + index
                end, page = columns[column, 0], columns[column, 1]
                if decode_only:  # there is one token, which waits for no end to be loaded
                    state = take_one(begin, state)
                else:
                    num_groups = (end - begin) // GROUP
                    state = take_groups(begin, num_groups, state)
                    state = lax.fori_loop(begin + num_groups * GROUP, end, take_one, state)

                @pl.when(page > 0)
                def _() -> None:
                    state_of(page)[...] = state

                return end, state

            lax.fori_loop(0, 1 if decode_only else num_columns, take_column, (first, state))

    kept_pages = jax.new_ref(in_numbers)
    out: jax.Array = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(tokens.x.shape, jnp.float32),
        grid=(len(plan.rows), num_blocks, num_channels // tile.lines),
        grid_names=("row", "block", "part"),
        # Between a read and a write of the same numbers by the same thread, which is all that there is, no warp waits.
        # Powers of 2 are an instruction of their own. Rounding d log2(e) changes e^-d by 2^-24 d e^-d, which is less
        # than half of the last bit of 1.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True),
        interpret=interpretation(interpret),
        kernel_name="scan_channels",
    )(
        jnp.asarray(place, jnp.int32)[None],
        *plan,
        tokens.pace * log2(e),
        tokens.skip,
        tokens.x,
        tokens.dt,
        tokens.b[:, 0],
        tokens.c[:, 0],
        kept_pages,
    )
    return out, jax.freeze(kept_pages).reshape(pages.shape)
