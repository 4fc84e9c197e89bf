"""The recurrence of the first Mamba for TPUs, where each number of a state forgets at a pace of its own.

No product of matrices takes in several tokens, so they go one after the other through registers: a block of 1,024
channels has a register for each number of the state of a channel.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chips import TpuChip
from pallas_kernels.linear_attention.channel_tokens import ChannelTokens
from pallas_kernels.linear_attention.tpu.blocks import StateBlocks
from pallas_kernels.linear_attention.tpu.calls import call_chunks, call_singles
from pallas_kernels.linear_attention.tpu.tokens import LANES
from pallas_kernels.linear_attention.visits import ChunkVisits, SingleVisits


def channel_singles(
    pages: jax.Array,
    place: jax.Array | int,
    visits: SingleVisits,
    tokens: ChannelTokens,
    *,
    blocks: StateBlocks,
    chip: TpuChip,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Takes in the tokens of `visits`, and returns what is read after each, f32[T, K, C], and the pages.

    What is read for other tokens is arbitrary.
    """
    x, dt = (_in_rows(of) for of in (tokens.x, tokens.dt))
    read, pages = call_singles(
        _channel_single,
        _weights(tokens),
        [x, dt],
        x.shape[2:],
        pages,
        place,
        visits,
        numbers=[tokens.b, tokens.c],
        heads=blocks.single,
        chip=chip,
        interpret=interpret,
        name="channel_single",
    )
    return read.reshape(tokens.x.shape), pages


def channel_chunks(
    pages: jax.Array,
    place: jax.Array | int,
    visits: ChunkVisits,
    tokens: ChannelTokens,
    *,
    blocks: StateBlocks,
    chip: TpuChip,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Takes in the tokens of rows with several, and returns the same as `channel_singles`."""
    x, dt = (_in_rows(of) for of in (tokens.x, tokens.dt))
    read, pages = call_chunks(
        _channel_chunk,
        _weights(tokens),
        [x, dt],
        x.shape[2:],
        pages,
        place,
        visits,
        numbers=[tokens.b[:, 0], tokens.c[:, 0]],
        heads=blocks.chunk,
        chip=chip,
        interpret=interpret,
        name="channel_chunk",
    )
    return read.reshape(tokens.x.shape), pages


def _in_rows(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-1], -1, LANES)


def _weights(tokens: ChannelTokens) -> jax.Array:
    """Returns A and D of each channel, f32[K, S + 1, C / 128, 128]."""
    return _in_rows(jnp.concatenate([tokens.pace, tokens.skip[:, None]], axis=1))


def _channel_single(
    goes_on: jax.Array,
    weights: Any,  # [blocks, S + 1, C / 128, 128]
    x: Any,  # [blocks, C / 128, 128]
    dt: Any,  # [blocks, C / 128, 128]
    b: Any,  # [blocks, 1, S], in SMEM
    c: Any,  # [blocks, 1, S], in SMEM
    before: Any,  # [blocks, R, 128]
    out: Any,  # [blocks, C / 128, 128]
    after: Any,  # [blocks, R, 128]
) -> None:
    num_blocks, rows = x.shape[:2]
    size = weights.shape[1] - 1
    for block in range(num_blocks):
        step, values = dt[block], x[block].astype(jnp.float32)
        incoming, read = step * values, weights[block, size] * values
        for number in range(size):
            at = slice(number * rows, (number + 1) * rows)
            kept = jnp.where(goes_on, before[block, at, :], 0.0)  # a page that was free may have NaN
            state = kept * jnp.exp(step * weights[block, number]) + incoming * b[block, 0, number]
            after[block, at, :] = state
            read += state * c[block, 0, number]
        out[block] = read
        if size * rows < after.shape[1]:
            after[block, size * rows :, :] = jnp.zeros((after.shape[1] - size * rows, LANES), jnp.float32)


def _channel_chunk(
    low: jax.Array,
    high: jax.Array,
    weights: Any,  # [blocks, S + 1, C / 128, 128]
    x: Any,  # [N, blocks, C / 128, 128]
    dt: Any,  # [N, blocks, C / 128, 128]
    b: Any,  # [N, S], in SMEM
    c: Any,  # [N, S], in SMEM
    out: Any,  # [N, blocks, C / 128, 128]
    state: Any,  # [blocks, R, 128]
) -> None:
    num_blocks, rows = x.shape[1:3]
    size = weights.shape[1] - 1
    places = [slice(number * rows, (number + 1) * rows) for number in range(size)]
    for block in range(num_blocks):

        def take(token: jax.Array, states: list[jax.Array], block: int = block) -> list[jax.Array]:
            step, values = dt[token, block], x[token, block].astype(jnp.float32)
            incoming, read, after = step * values, weights[block, size] * values, []
            for number, state in enumerate(states):
                left = jnp.exp(step * weights[block, number])
                after.append(state * left + incoming * b[token, number])
                read += after[-1] * c[token, number]
            out[token, block] = read
            return after

        # Two blocks in one loop took 113 bundles of instructions for a token, and one takes 63 (16 numbers, v6e).
        ends = jax.lax.fori_loop(low, high, take, [state[block, at, :] for at in places])
        for at, end in zip(places, ends, strict=True):
            state[block, at, :] = end
