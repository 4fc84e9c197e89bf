"""`LayerInput`: what a layer sees of a step, beside the hidden states that the layer before it returned."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from sharding.axis import ModelAxis

# Called with (kv, q, k, v): writes k, v [T, K, D] of this layer to the cache, attends with q [T, H, D], and returns
# [T, H, D] and the new cache.
AttendHere = Callable[[Any, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


@dataclass(frozen=True)
class LayerInput:
    """The T packed tokens of a step, and the ways to the cache and to the other devices."""

    positions: jax.Array  # i32[T]
    rotation: tuple[jax.Array, jax.Array]  # cos and sin of the layer's rope, f32[T, rotary_dim / 2]
    attend: AttendHere
    axis: ModelAxis
