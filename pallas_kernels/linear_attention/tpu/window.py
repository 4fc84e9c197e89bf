"""A short convolution for TPUs, whose window alone is the state (LFM2, and the first Mamba before its recurrence).

Channels know nothing of each other, so a page has each age of the window in whole rows of 128 channels.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chips import TpuChip
from pallas_kernels.linear_attention.channel_tokens import WindowTokens
from pallas_kernels.linear_attention.tpu.blocks import StateBlocks
from pallas_kernels.linear_attention.tpu.calls import call_chunks, call_singles
from pallas_kernels.linear_attention.tpu.tile import convolved
from pallas_kernels.linear_attention.tpu.tokens import LANES
from pallas_kernels.linear_attention.visits import ChunkVisits, SingleVisits


def window_singles(
    pages: jax.Array,
    place: jax.Array | int,
    visits: SingleVisits,
    tokens: WindowTokens,
    *,
    has_activation: bool,
    blocks: StateBlocks,
    chip: TpuChip,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Takes in the tokens of `visits`, and returns what becomes of each, f32[T, K, C], and the pages.

    What is returned for other tokens is arbitrary.
    """
    weights, channels = (x.reshape(*x.shape[:-1], -1, LANES) for x in (_weights(tokens), tokens.channels))
    out, pages = call_singles(
        partial(_window_single, has_activation=has_activation),
        weights,
        [channels],
        channels.shape[2:],
        pages,
        place,
        visits,
        heads=blocks.single,
        chip=chip,
        interpret=interpret,
        name="window_single",
    )
    return out.reshape(tokens.channels.shape), pages


def window_chunks(
    pages: jax.Array,
    place: jax.Array | int,
    visits: ChunkVisits,
    tokens: WindowTokens,
    *,
    has_activation: bool,
    blocks: StateBlocks,
    chip: TpuChip,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Takes in the tokens of rows with several, and returns the same as `window_singles`."""
    return call_chunks(
        partial(_window_chunk, has_activation=has_activation),
        _weights(tokens),
        [tokens.channels],
        tokens.channels.shape[2:],
        pages,
        place,
        visits,
        heads=blocks.chunk,
        chip=chip,
        interpret=interpret,
        name="window_chunk",
    )


def _weights(tokens: WindowTokens) -> jax.Array:
    """Returns the taps and the bias of each channel, f32[K, W + 1, C]."""
    return jnp.concatenate([tokens.taps, tokens.bias[:, None]], axis=1)


def _window_single(
    goes_on: jax.Array,
    weights: Any,  # [heads, W + 1, C / 128, 128]
    x: Any,  # [heads, C / 128, 128]
    before: Any,  # [heads, S, 128]
    out: Any,  # [heads, C / 128, 128]
    after: Any,  # [heads, S, 128]
    *,
    has_activation: bool,
) -> None:
    size, (num_heads, parts, _) = weights.shape[1] - 1, x.shape
    ages = [slice(row, row + parts) for row in range(0, (size - 1) * parts, parts)]
    # A page that was free may have NaN.
    seen = [jnp.where(goes_on, before[:, rows, :], 0.0) for rows in ages] + [x[...].astype(jnp.float32)]
    for rows, value in zip(ages, seen[1:], strict=True):
        after[:, rows, :] = value
    end = ages[-1].stop
    if end < after.shape[1]:
        after[:, end:, :] = jnp.zeros((num_heads, after.shape[1] - end, LANES), jnp.float32)
    mixed = sum((weights[:, age] * value for age, value in enumerate(seen)), weights[:, size])
    out[...] = jax.nn.silu(mixed) if has_activation else mixed


def _window_chunk(
    low: jax.Array,
    high: jax.Array,
    weights: Any,  # [heads, W + 1, C]
    x: Any,  # [N, heads * C]
    out: Any,  # [N, heads * C]
    state: Any,  # [heads, S, 128]
    *,
    has_activation: bool,
) -> None:
    num_heads, size, parts = weights.shape[0], weights.shape[1] - 1, weights.shape[2] // LANES
    number = jax.lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)
    is_real = (number >= low) & (number < high)
    for head in range(num_heads):
        for part in range(parts):
            bias = weights[head, size : size + 1, part * LANES : (part + 1) * LANES]
            mixed = convolved(weights, size, x, state, head, part, parts, 0, low, high) + bias
            mixed = jax.nn.silu(mixed) if has_activation else mixed
            lanes = slice((head * parts + part) * LANES, (head * parts + part + 1) * LANES)
            out[:, lanes] = jnp.where(is_real, mixed, out[:, lanes])
