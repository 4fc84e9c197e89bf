"""`LayerInput`: the step as one layer sees it, beside the hidden states that the layer before it returned."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax

from jaxvllm.models.layer_memory import LayerMemory
from jaxvllm.models.token_adapters import TokenAdapters
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.ragged_paged_attention import IndexQueries
from sharding.axis import ModelAxis

# A layer's number, window or rope: a Python int where it is known, an i32 scalar inside a loop.
Scalar = int | jax.Array
# cos and sin of a rope, f32[T, rotary_dim / 2].
type Rotation = tuple[jax.Array, jax.Array]


class Attend[Kv](Protocol):
    """Writes the keys and values of a layer to the cache and attends.

    given: the step as the layer sees it
    q  # [T, H, D]: normed and rotated, not yet scaled; head h reads KV head h // G
    k, v  # [T, K, D]; None: the layer whose memory is read has written them already. v alone: it is the end of k
    scale, soft_cap  # what multiplies q . k, and what bounds it then (None: nothing)
    sinks  # f32[H]: one more logit for each head, which takes weight and has no value (None: no head has one)
    slopes  # f32[H]: what a logit loses with each position between its key and its query (None: nothing)
    kv_scales  # f32[2, K]: the scales of keys and of values, if pages hold them in eight bits (None: ones)
    index  # what chooses the positions that are seen (last: the last layer with an index has; None: all are)
    Returns [T, H, size of a value] and the new cache.
    """

    def __call__(
        self,
        kv: Kv,
        given: "LayerInput",
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        /,
        *,
        scale: float,
        soft_cap: float | None,
        sinks: jax.Array | None = None,
        slopes: jax.Array | None = None,
        kv_scales: jax.Array | None = None,
        index: IndexQueries | Literal["last"] | None = None,
    ) -> tuple[jax.Array, Kv]: ...


class Recur[Kv](Protocol):
    """Lets the state of a layer take in the tokens of a step, in their order.

    given: the step as the layer sees it
    weights: what the rule of the layer's memory needs beside the tokens
    tokens: what the rule takes in, [T, ..] each
    Returns what the layer reads after each token, [T, ..], and the new cache.
    """

    def __call__(
        self, kv: Kv, given: "LayerInput", weights: Mapping[str, jax.Array], tokens: Mapping[str, jax.Array], /
    ) -> tuple[jax.Array, Kv]: ...


def no_recur(kv: Any, given: "LayerInput", *_: Any) -> tuple[jax.Array, Any]:
    """Takes the place of `Recur` where no layer keeps a state."""
    raise AssertionError("a layer keeps a state, and nobody said where")


@dataclass(frozen=True)
class LayerInput:
    """The T packed tokens of a step, and the ways to the cache and to the other devices."""

    positions: jax.Array  # i32[T]
    rotation: Rotation | None  # of the layer's rope, where it has one
    attend: Attend[Any]
    recur: Recur[Any]
    axis: ModelAxis
    memory: LayerMemory  # that the layer reads, its own or an earlier layer's
    number: Scalar  # of the layer whose memory that is
    # A token sees the last `window` positions, itself included, or all where that is NO_WINDOW. It is an int, or an
    # i32 scalar inside a loop over layers that differ in it.
    window: Scalar
    # bool[T]: False for padding, and in the last layer for tokens that nobody reads: what its
    # attention and its FFN return for those is arbitrary. None: all tokens are needed.
    is_needed: jax.Array | None = None
    embedding: jax.Array | None = None  # [T, P]: what the tokens mean to this layer alone, in models that have that
    # Returns the cache in which the experts that tokens have chosen, i32[T, k], are counted. None: nobody counts them.
    count: Callable[[Any, jax.Array], Any] | None = None
    backend: Backend = REFERENCE  # whose kernels compute what no form of a matrix and no memory does
    adapters: TokenAdapters | None = None  # None: no token has one
