"""The tokens of states whose channels know nothing of each other, as the kernels for TPUs and GPUs take them in."""

from typing import NamedTuple

import jax


class WindowTokens(NamedTuple):
    """The tokens of a short convolution, and its weights.

    taps  # f32[K, W, C]
    bias  # f32[K, C]
    channels  # [T, K, C]
    """

    taps: jax.Array
    bias: jax.Array
    channels: jax.Array


class ChannelTokens(NamedTuple):
    """The tokens of the first Mamba after the convolution, and what takes them in.

    pace  # f32[K, S, C]: A, which is below 0
    skip  # f32[K, C]: D, by which x is multiplied and added to what is read
    x  # [T, K, C]
    dt  # f32[T, K, C]
    b  # f32[T, K, S]: the same for all blocks of channels, as c is
    c  # f32[T, K, S]
    """

    pace: jax.Array
    skip: jax.Array
    x: jax.Array
    dt: jax.Array
    b: jax.Array
    c: jax.Array
