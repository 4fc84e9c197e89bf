"""The kinds of attention that a layer can have: each is a value that declares its arrays and computes with them.

A new kind of attention is a class beside `GroupedQueryAttention`, in a module of its own, which a family's spec names.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol, Self

import jax
import jax.numpy as jnp

from jaxvllm.models.declaration import HeadGroups, ParamDecl
from jaxvllm.models.ops import RmsNorm, biased, project
from sharding.axis import ModelAxis

# head: over each head alone (Qwen 3). full: over all heads together (OLMo 2).
QkNorm = Literal["none", "head", "full"]
# Called with (kv, q, k, v): writes k, v [T, K, D] of this layer to the cache, attends with q [T, H, D], and returns
# [T, H, D] and the new cache.
AttendHere = Callable[[Any, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


class Attention(Protocol):
    """The attention of a layer. It is frozen and hashable, and equal for layers that compute alike."""

    def declare(self) -> dict[str, ParamDecl]:
        """Returns its arrays by name. Layers share a stack of arrays that have one name and equal declarations."""

    def problem(self, size: int) -> str | None:
        """Returns why it cannot be spread over `size` devices, or None when it can."""

    def spread(self, size: int) -> Self:
        """Returns the same attention with sizes that divide over `size` devices.

        Copies of heads and heads of zeros, which change nothing, make them divide.
        """

    def shard(self, size: int) -> Self:
        """Returns the part that each of `size` devices computes. The sizes must divide already."""

    def apply(
        self,
        weights: Mapping[str, Any],
        x: jax.Array,
        rotation: tuple[jax.Array, jax.Array],
        kv: Any,
        attend: AttendHere,
        axis: ModelAxis,
    ) -> tuple[jax.Array, Any]:
        """Returns the output [T, E] for x [T, E], summed over `axis`, and the cache with this step's keys and values.

        `rotation` has cos and sin of the layer's rope, f32[T, rotary_dim / 2].
        """


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Attention whose query heads share KV heads in groups (arXiv 2305.13245), multi-head and multi-query included."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm: RmsNorm  # of queries and keys, where qk_norm has any
    qk_norm: QkNorm = "none"
    qkv_bias: bool = False
    o_bias: bool = False

    @property
    def group_size(self) -> int:
        """The number of query heads that share a KV head, G."""
        return self.num_heads // self.num_kv_heads

    def declare(self) -> dict[str, ParamDecl]:
        E, K, G, D = self.hidden_size, self.num_kv_heads, self.group_size, self.head_size
        heads = HeadGroups(G, D, 2 * D)
        decls = {
            # For each KV head: its G query heads, its key and its value.
            "qkv": ParamDecl((K, (G + 2) * D, E), ("kv_heads", None, "embed"), storage="matrix", heads=heads),
            "o": ParamDecl((E, K * G * D), ("embed", "heads"), storage="matrix", heads=HeadGroups(G, D, 0)),
        }
        if self.qkv_bias:
            decls["qkv_bias"] = ParamDecl((K, (G + 2) * D), ("kv_heads", None), "zeros", heads=heads)
        if self.o_bias:
            decls["o_bias"] = ParamDecl((E,), ("embed",), "zeros")
        if self.qk_norm == "head":
            decls["q_norm"] = decls["k_norm"] = self.norm.declare((D,), (None,))
        elif self.qk_norm == "full":
            axes = ("kv_heads", None, None)
            decls["q_norm"] = replace(self.norm.declare((K, G, D), axes), heads=HeadGroups(G, 1, 0))
            decls["k_norm"] = replace(self.norm.declare((K, 1, D), axes), heads=HeadGroups(G, 0, 1))
        return decls

    def kv_copies(self, size: int) -> int:
        """Returns how many of `size` devices, or of the heads of one device, hold the same KV head."""
        return size // math.gcd(self.num_kv_heads, size)

    def problem(self, size: int) -> str | None:
        if self.qk_norm == "full" and self.group_size % self.kv_copies(size):
            return (
                f"{self.num_heads} query heads over {self.num_kv_heads} KV heads do not divide over {size} devices, "
                "and this model norms all of them together"
            )
        return None

    def spread(self, size: int) -> Self:
        copies = self.kv_copies(size)
        num_kv_heads = self.num_kv_heads * copies
        return replace(self, num_kv_heads=num_kv_heads, num_heads=num_kv_heads * -(-self.group_size // copies))

    def shard(self, size: int) -> Self:
        return replace(self, num_kv_heads=self.num_kv_heads // size, num_heads=self.num_heads // size)

    def apply(
        self,
        weights: Mapping[str, Any],
        x: jax.Array,
        rotation: tuple[jax.Array, jax.Array],
        kv: Any,
        attend: AttendHere,
        axis: ModelAxis,
    ) -> tuple[jax.Array, Any]:
        q, k, v = self._qkv(weights, x, rotation, axis)
        out, kv = attend(kv, q, k, v)
        return biased(axis.sum(project(out.reshape(out.shape[0], -1), weights["o"])), weights.get("o_bias")), kv

    def _qkv(
        self, weights: Mapping[str, Any], x: jax.Array, rotation: tuple[jax.Array, jax.Array], axis: ModelAxis
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns q [T, H, D], k and v [T, K, D] of x [T, E], with q and k normed and rotated."""
        T, K, G, D = x.shape[0], self.num_kv_heads, self.group_size, self.head_size
        qkv = project(x, weights["qkv"], weights.get("qkv_bias")).reshape(T, K, G + 2, D)
        q, k, v = qkv[:, :, :G], qkv[:, :, G : G + 1], qkv[:, :, G + 1]
        if self.qk_norm == "head":
            q, k = self.norm(q, weights["q_norm"]), self.norm(k, weights["k_norm"])
        elif self.qk_norm == "full":
            # Where KV heads are copied, each has the same number of copies, so the mean stays the same.
            over = partial(self.norm, axes=(1, 2, 3), mean=axis.mean)
            q, k = over(q, weights["q_norm"]), over(k, weights["k_norm"])
        return _rotate(q, *rotation).reshape(T, K * G, D), _rotate(k, *rotation).reshape(T, K, D), v


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Applies RoPE to x [T, heads.., D]: dimension i of the first rotary_dim turns with i + rotary_dim / 2."""
    half = cos.shape[-1]
    cos, sin = (table[:, None, None] for table in (cos, sin))
    a, b, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1).astype(x.dtype)
