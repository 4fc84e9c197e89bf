"""The kinds of attention that a layer can have: each is a value that declares its arrays and computes with them.

A new kind of attention is a class beside `GroupedQueryAttention`, in a module of its own, which a family's spec names.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Self

import jax
import jax.numpy as jnp

from jaxvllm.models.declaration import HeadGroups, ParamDecl
from jaxvllm.models.layer_input import LayerInput
from jaxvllm.models.layer_memory import KeysAndValues, LayerMemory
from jaxvllm.models.linear import Linear
from jaxvllm.models.norm import Norm, RmsNorm
from jaxvllm.models.positive import require_positive
from jaxvllm.models.rotation import RopePairs, rotated

# head: over each head alone (Qwen 3). own: the same with weights of each head's own (Command R+). weightless: the same
# without a weight (Llama 4). full: over all heads together (OLMo 2).
QkNorm = Literal["none", "head", "own", "weightless", "full"]
# The projections beside those of the queries. A layer may take its keys before their norm and rope for its values, or
# read the keys and values of an earlier layer (Gemma 4).
KvProjections = Literal["key and value", "key", "none"]
_OWN: Mapping[KvProjections, int] = {"key and value": 2, "key": 1, "none": 0}


class Attention(Protocol):
    """The attention of a layer. It is frozen and hashable, and equal for layers that compute alike."""

    @property
    def hidden_size(self) -> int:
        """The size of the hidden states that it reads and returns, E."""

    @property
    def num_heads(self) -> int:
        """The number of query heads."""

    @property
    def head_size(self) -> int:
        """The size of a query head, of which a rope turns a part; 0 where no rope turns anything."""

    @property
    def keeps(self) -> bool:
        """Whether the layer has a memory of its own. Otherwise it reads that of an earlier layer."""

    def memory(self, window: int | None) -> LayerMemory:
        """Returns the memory that it reads, for a layer with this window."""

    def declare(self) -> dict[str, ParamDecl]:
        """Returns its arrays by name. Layers share a stack of arrays that have one name and equal declarations."""

    def kv_copies(self, size: int) -> int:
        """Returns how many of `size` devices, or of the heads of one device, hold the same KV head."""

    def problem(self, size: int) -> str | None:
        """Returns why it cannot be spread over `size` devices, or None when it can."""

    def spread(self, size: int) -> Self:
        """Returns the same attention with sizes that divide over `size` devices.

        Copies of heads and heads of zeros, which change nothing, make them divide.
        """

    def shard(self, size: int) -> Self:
        """Returns the part that each of `size` devices computes. The sizes must divide already."""

    def apply(self, weights: Mapping[str, Any], x: jax.Array, kv: Any, given: LayerInput) -> tuple[jax.Array, Any]:
        """Returns the output [T, E] for x [T, E], summed over devices, and the cache with this step's KV."""


@dataclass(frozen=True)
class QueryGrowth:
    """Queries that grow with their position p: times 1 + beta ln(1 + floor((p + first) / period)).

    Position 0 counts as `first`: as 1 in Llama 4, as 0 in Ministral 3.
    """

    beta: float
    period: int  # tokens
    first: int = 0

    def factor(self, positions: jax.Array) -> jax.Array:
        """Returns the factors f32[T] at `positions` i32[T]."""
        return 1 + self.beta * jnp.log1p(((positions + self.first) // self.period).astype(jnp.float32))


# The array of the scales of keys and values, [K, 2].
KV_SCALES = "kv_scales"


def kv_scales_declared(num_kv_heads: int, group: int) -> dict[str, ParamDecl]:
    """Returns the scales of each head's keys and values in pages, which has `group` query heads."""
    heads, axes = HeadGroups(group, 0, 2), ("kv_heads", None)
    scales = ParamDecl((num_kv_heads, 2), axes, "ones", "scales", dtype="float32", heads=heads, is_trained=False)
    return {KV_SCALES: scales}


def kv_scales_of(weights: Mapping[str, Any]) -> jax.Array | None:
    """Returns the scales of keys and of values f32[2, K], or None for a layer without."""
    return weights[KV_SCALES].T if KV_SCALES in weights else None


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Attention whose query heads share KV heads in groups (arXiv 2305.13245), multi-head and multi-query included."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm: Norm  # of queries and keys, where qk_norm has any
    scale: float  # multiplies q . k
    soft_cap: float | None = None  # bounds these products
    qk_norm: QkNorm = "none"
    is_normed_late: bool = False  # queries and keys are normed after their rope, and not before (Hunyuan)
    qkv_bias: bool = False
    o_bias: bool = False
    rope_pairs: RopePairs = "halves"
    q_growth: QueryGrowth | None = None
    kv: KvProjections = "key and value"
    v_norm: bool = False  # values are divided by their root mean square
    v_size: int | None = None  # of values, whose rows in `qkv`, and so in the pages, zeros fill up; None: head_size
    v_scale: float = 1.0  # multiplies values
    qkv_limit: float | None = None  # bounds queries, keys and values, both sides
    gated: bool = False  # each output of a query head is multiplied by the sigmoid of a gate of its own
    # All outputs of a query head are multiplied by this function of one gate (Laguna, Step 3.7). None: by nothing.
    head_gating: Literal["softplus", "sigmoid"] | None = None
    in_chunks: bool = False  # the window is a chunk: it begins at a multiple of its size, and not at a token's distance
    # Queries are projections of a normed vector of this size, which all heads share (Step 3). None: of what is read.
    q_rank: int | None = None
    has_sinks: bool = False  # each query head has one more logit, which takes weight and has no value
    # What a logit of each query head, those of all devices, loses with each position between its key and its query
    # (ALiBi, arXiv 2108.12409).
    slopes: tuple[float, ...] | None = None
    has_kv_scales: bool = False  # pages hold its keys and values in eight bits, divided by scales of each KV head

    def __post_init__(self) -> None:
        require_positive(
            self, "hidden_size num_heads num_kv_heads head_size scale soft_cap v_size v_scale qkv_limit q_rank"
        )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        if self.v_size is not None and self.v_size > self.head_size:
            raise ValueError(f"values of size {self.v_size} must not be larger than keys, of size {self.head_size}")
        if self.slopes is not None and len(self.slopes) % self.num_heads:
            raise ValueError(f"slopes must be one number for each of {self.num_heads} query heads: {self.slopes}")
        assert self.q_rank is None or not self.gated, "no model has both"

    @property
    def keeps(self) -> bool:
        return self.kv != "none"

    def memory(self, window: int | None) -> KeysAndValues:
        return KeysAndValues(self.num_kv_heads, self.head_size, window, chunk=window if self.in_chunks else None)

    @property
    def group_size(self) -> int:
        """The number of query heads that share a KV head, G."""
        return self.num_heads // self.num_kv_heads

    @property
    def qkv(self) -> Linear:
        """The projection to, for each KV head, its G query heads, and its key and its value where it has them.

        Where outputs are gated, a gate follows each query head. With `q_rank` there are no query heads.
        """
        K, D, own = self.num_kv_heads, self.head_size, _OWN[self.kv]
        heads = HeadGroups(self.group_size, D * self._query_parts if self.q_rank is None else 0, own * D)
        shape, axes = (K, heads.group * heads.size + heads.own, self.hidden_size), ("kv_heads", None, "embed")
        return Linear(shape, axes, self.qkv_bias, heads)

    @property
    def q_latent(self) -> Linear:
        """The projection to what all query heads share. Every device has all of it."""
        return Linear((self.q_rank or 0, self.hidden_size), (None, "embed"))

    @property
    def q(self) -> Linear:
        """The projection of that to the query heads."""
        shape = self.num_kv_heads, self.group_size * self.head_size, self.q_rank or 0
        return Linear(shape, ("kv_heads", None, None), heads=HeadGroups(self.group_size, self.head_size, 0))

    @property
    def _query_parts(self) -> int:
        """The parts of a query head, each of `head_size`."""
        return 2 if self.gated else 1

    @property
    def o(self) -> Linear:
        """The projection of all heads' outputs back to the hidden size."""
        size = self.v_size or self.head_size
        shape = (self.hidden_size, self.num_heads * size)
        return Linear(shape, ("embed", "heads"), self.o_bias, HeadGroups(self.group_size, size, 0))

    @property
    def head_gates(self) -> Linear:
        """The projection to a gate for each query head."""
        K, G = self.num_kv_heads, self.group_size
        return Linear((K, G, self.hidden_size), ("kv_heads", None, "embed"), heads=HeadGroups(G, 1, 0))

    def declare(self) -> dict[str, ParamDecl]:
        K, G, D = self.num_kv_heads, self.group_size, self.head_size
        decls = self.qkv.declare("qkv") | self.o.declare("o")
        if self.q_rank is not None:
            decls |= self.q_latent.declare("q_latent") | self.q.declare("q")
            decls |= self.norm.declare("q_latent_norm", (self.q_rank,), (None,))
        if self.head_gating is not None:
            decls |= self.head_gates.declare("head_gates")
        if self.qk_norm == "head":
            decls |= self.norm.declare("q_norm", (D,), (None,))
            decls |= self.norm.declare("k_norm", (D,), (None,)) if self.keeps else {}
        elif self.qk_norm in ("own", "full"):
            for name, heads_each, groups in (("q_norm", G, HeadGroups(G, 1, 0)), ("k_norm", 1, HeadGroups(G, 0, 1))):
                norm = self.norm.declare(name, (K, heads_each, D), ("kv_heads", None, None))
                decls |= {key: replace(decl, heads=groups) for key, decl in norm.items()}
        if self.has_sinks:
            heads = HeadGroups(G, 1, 0)
            decls["sinks"] = ParamDecl((K, G), ("kv_heads", None), "zeros", dtype="float32", heads=heads)
        return decls | kv_scales_declared(K, G) if self.has_kv_scales else decls

    def kv_copies(self, size: int) -> int:
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
        num_kv_heads, share = self.num_kv_heads * copies, -(-self.group_size // copies)
        slopes = self.slopes
        if slopes is not None:
            groups = [slopes[first : first + self.group_size] for first in range(0, len(slopes), self.group_size)]
            filled = (0.0,) * (copies * share - self.group_size)
            slopes = tuple(slope for group in groups for slope in group + filled)
        return replace(self, num_kv_heads=num_kv_heads, num_heads=num_kv_heads * share, slopes=slopes)

    def shard(self, size: int) -> Self:
        return replace(self, num_kv_heads=self.num_kv_heads // size, num_heads=self.num_heads // size)

    def apply(self, weights: Mapping[str, Any], x: jax.Array, kv: Any, given: LayerInput) -> tuple[jax.Array, Any]:
        q, k, v, gate = self._qkv(weights, x, given)
        sinks, slopes = weights["sinks"].reshape(-1) if self.has_sinks else None, self._own_slopes(given)
        of_heads: dict[str, Any] = {"sinks": sinks, "slopes": slopes, "kv_scales": kv_scales_of(weights)}
        out, kv = given.attend(kv, given, q, k, v, scale=self.scale, soft_cap=self.soft_cap, **of_heads)
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        if self.head_gating is not None:
            gates = self.head_gates.apply(weights, "head_gates", x).astype(jnp.float32)
            gates = jax.nn.softplus(gates) if self.head_gating == "softplus" else jax.nn.sigmoid(gates)
            out = out * gates.astype(out.dtype).reshape(*out.shape[:2], 1)
        if self.v_size is not None:
            out = out[..., : self.v_size]
        if self.v_scale != 1:
            out = out * jnp.asarray(self.v_scale, out.dtype)
        return self.o.apply_summed(weights, "o", out.reshape(out.shape[0], -1), given.axis), kv

    def _own_slopes(self, given: LayerInput) -> jax.Array | None:
        """Returns the slopes f32[H] of this device's query heads."""
        if self.slopes is None:
            return None
        slopes = jnp.asarray(self.slopes, jnp.float32)
        return jax.lax.dynamic_slice_in_dim(slopes, given.axis.first(self.num_heads), self.num_heads)

    def _qkv(
        self, weights: Mapping[str, Any], x: jax.Array, given: LayerInput
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
        """Returns q [T, H, D], k and v [T, K, D] of x [T, E], with q and k normed and rotated, and gates [T, H, D]."""
        T, K, D, own = x.shape[0], self.num_kv_heads, self.head_size, _OWN[self.kv]
        G, gate = self.group_size * self._query_parts, None
        qkv = self.qkv.apply(weights, "qkv", x).reshape(T, K, -1, D)
        if self.q_rank is not None:
            latent = self.norm.apply(weights, "q_latent_norm", self.q_latent.apply(weights, "q_latent", x))
            qkv = jnp.concatenate([self.q.apply(weights, "q", latent).reshape(T, K, G, D), qkv], axis=2)
        if self.qkv_limit is not None:
            qkv = jnp.clip(qkv, -self.qkv_limit, self.qkv_limit)
        q = qkv[:, :, :G]
        if self.gated:
            q, gate = q[:, :, ::2], q[:, :, 1::2].reshape(T, -1, D)
        q = self._turned(weights, "q_norm", q, given).reshape(T, -1, D)
        if self.q_growth is not None:
            q = q * self.q_growth.factor(given.positions).astype(q.dtype)[:, None, None]
        if not self.keeps:
            return q, None, None, gate
        k, v = qkv[:, :, G : G + 1], qkv[:, :, G + own - 1]
        k = self._turned(weights, "k_norm", k, given).reshape(T, K, D)
        return q, k, self._without_weight(v) if self.v_norm else v, gate

    def _turned(self, weights: Mapping[str, Any], name: str, x: jax.Array, given: LayerInput) -> jax.Array:
        """Returns queries or keys [T, K, heads, D] after their norm and their rope."""
        if self.is_normed_late:
            return self._normed(weights, name, self._rotated(x, given), given)
        return self._rotated(self._normed(weights, name, x, given), given)

    def _normed(self, weights: Mapping[str, Any], name: str, x: jax.Array, given: LayerInput) -> jax.Array:
        """Returns queries or keys [T, K, heads, D], normed as the model does."""
        if self.qk_norm in ("head", "own"):
            return self.norm.apply(weights, name, x)
        if self.qk_norm == "weightless":
            return self._without_weight(x)
        if self.qk_norm == "full":
            assert isinstance(self.norm, RmsNorm), "no model has another norm over all heads"
            # Where KV heads are copied, each has the same number of copies, so the mean stays the same.
            return self.norm.over(x, weights[name], axes=(1, 2, 3), mean=given.axis.mean)
        return x

    def _rotated(self, x: jax.Array, given: LayerInput) -> jax.Array:
        """Returns queries or keys [T, K, heads, D] as the layer's rope turns them."""
        return rotated(x, given.rotation, self.rope_pairs)

    def _without_weight(self, x: jax.Array) -> jax.Array:
        assert isinstance(self.norm, RmsNorm), "no model has another norm over values"
        return self.norm.over(x, jnp.asarray(1 - self.norm.offset, jnp.float32))
