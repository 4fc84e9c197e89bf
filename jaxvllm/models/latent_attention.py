"""`LatentAttention`: attention whose keys and values come from one latent of each token, which alone is kept.

DeepSeek V2, arXiv 2405.04434, section 2.1. A key of head h is the part W_k[h] c of the latent c, beside a part with a
position that all heads share; its value is W_v[h] c. Since q . (W_k c) = (W_k' q) . c, queries are brought to the
latents instead of latents to keys: attention is over one head of keys [shared part, c], whose values are c, and W_v
turns what it returns into the outputs of each head. So pages hold 576 numbers of a token instead of 40,960 (DeepSeek
V3), and nothing is expanded.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp

from jaxvllm.models.attention import QueryGrowth, kv_scales_declared, kv_scales_of
from jaxvllm.models.declaration import HeadGroups, ParamDecl
from jaxvllm.models.layer_input import LayerInput
from jaxvllm.models.layer_memory import KeysAndValues
from jaxvllm.models.linear import Linear
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.ops import project_heads
from jaxvllm.models.positive import require_positive
from jaxvllm.models.rotation import RopePairs, rotated
from jaxvllm.models.sparse_indexer import SparseIndexer
from pallas_kernels.ragged_paged_attention import IndexQueries


@dataclass(frozen=True)
class LatentAttention:
    """Attention over latents. Each device has some of the query heads, and all of the latents.

    The latent of a query, where it has one (`q_rank`), and that of its key are one product of the hidden state.
    """

    hidden_size: int
    num_heads: int
    q_rank: int | None  # the size of a query's latent; None: queries come from the hidden state
    latent_size: int  # of keys and values
    content_size: int  # of the part of a head that has no position
    rope_size: int  # of the part that has one
    value_size: int  # of a head's output
    norm: RmsNorm  # of latents
    scale: float  # multiplies q . k
    latent_scale: float = 1.0  # multiplies latents of keys and values
    rope_pairs: RopePairs = "neighbours"
    has_bias: bool = False  # of latents, and of the output
    # What chooses the positions that are seen. last: the last layer before it with an index has chosen (GLM-5.2).
    indexer: SparseIndexer | Literal["last"] | None = None
    q_growth: QueryGrowth | None = None
    has_head_gates: bool = False  # each head's output is multiplied by the sigmoid of a gate (Ling 3)
    num_kv_heads: int = 1  # copies of the latents, one on each device
    has_kv_scales: bool = False  # pages hold latents in eight bits, divided by a scale, that of keys

    def __post_init__(self) -> None:
        if isinstance(self.indexer, SparseIndexer) and self.q_rank is None:
            raise ValueError("an index reads the latents of queries, so q_lora_rank must be a number")
        sizes = (
            "hidden_size num_heads q_rank latent_size content_size rope_size value_size scale latent_scale num_kv_heads"
        )
        require_positive(self, sizes)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads do not divide over {self.num_kv_heads} copies of the latents")

    @property
    def keeps(self) -> bool:
        return True

    @property
    def head_size(self) -> int:
        """The size of a query that has been brought to the latents, and of a key. It begins with a key of the index."""
        return self._index_size + self.rope_size + self.latent_size

    @property
    def _index_size(self) -> int:
        return self.indexer.head_size if isinstance(self.indexer, SparseIndexer) else 0

    def memory(self, window: int | None) -> KeysAndValues:
        return KeysAndValues(self.num_kv_heads, self.head_size, window, self.latent_size)

    @property
    def latents(self) -> Linear:
        """The projection to a query's latent, where it has one, a key's latent, and the part of a key with a position.

        Every device computes it whole: it is small.
        """
        size = (self.q_rank or 0) + self.latent_size + self.rope_size
        return Linear((size, self.hidden_size), (None, "embed"), self.has_bias)

    @property
    def q(self) -> Linear:
        """The projection to the queries of all heads."""
        group, size = self._group, self.content_size + self.rope_size
        shape = (self.num_kv_heads, group * size, self.q_rank or self.hidden_size)
        return Linear(shape, ("kv_heads", None, "embed"), heads=HeadGroups(group, size, 0))

    @property
    def o(self) -> Linear:
        """The projection of all heads' outputs back to the hidden size."""
        heads = HeadGroups(self._group, self.value_size, 0)
        return Linear((self.hidden_size, self.num_heads * self.value_size), ("embed", "heads"), self.has_bias, heads)

    @property
    def head_gates(self) -> Linear:
        """The projection to a gate for each head."""
        shape = (self.num_kv_heads, self._group, self.hidden_size)
        return Linear(shape, ("kv_heads", None, "embed"), heads=HeadGroups(self._group, 1, 0))

    @property
    def _group(self) -> int:
        """The query heads of each copy of the latents."""
        return self.num_heads // self.num_kv_heads

    def _of_latents(self, size: int) -> ParamDecl:
        """Returns the declaration of a matrix [size, latent size] for each head."""
        shape = (self.num_kv_heads, self._group, size, self.latent_size)
        axes = ("kv_heads", None, None, None)
        return ParamDecl(shape, axes, storage="head_matrices", heads=HeadGroups(self._group, 1, 0))

    def declare(self) -> dict[str, ParamDecl]:
        decls = self.latents.declare("latents") | self.q.declare("q") | self.o.declare("o")
        decls |= self.norm.declare("kv_latent_norm", (self.latent_size,), (None,))
        if self.q_rank is not None:
            decls |= self.norm.declare("q_latent_norm", (self.q_rank,), (None,))
        if self.has_head_gates:
            decls |= self.head_gates.declare("head_gates")
        if isinstance(self.indexer, SparseIndexer):
            decls |= self.indexer.declare()
        if self.has_kv_scales:
            decls |= kv_scales_declared(self.num_kv_heads, self._group)
        return decls | {"k_up": self._of_latents(self.content_size), "v_up": self._of_latents(self.value_size)}

    def kv_copies(self, size: int) -> int:
        return size // math.gcd(self.num_kv_heads, size)

    def problem(self, size: int) -> str | None:
        return None

    def spread(self, size: int) -> Self:
        copies = self.kv_copies(size)
        num_kv_heads = self.num_kv_heads * copies
        return replace(self, num_kv_heads=num_kv_heads, num_heads=num_kv_heads * -(-self._group // copies))

    def shard(self, size: int) -> Self:
        return replace(self, num_kv_heads=self.num_kv_heads // size, num_heads=self.num_heads // size)

    def apply(self, weights: Mapping[str, Any], x: jax.Array, kv: Any, given: LayerInput) -> tuple[jax.Array, Any]:
        T, H, hidden = x.shape[0], self.num_heads, x
        of_query, latent, shared = jnp.split(
            self.latents.apply(weights, "latents", x), (self.q_rank or 0, -self.rope_size), axis=-1
        )
        if self.q_rank is not None:
            x = self.norm.apply(weights, "q_latent_norm", of_query)
        q = self.q.apply(weights, "q", x).reshape(T, H, -1)
        content = project_heads("thc,hcl->thl", q[..., : self.content_size], weights["k_up"])
        q = jnp.concatenate([self._rotated(q[..., self.content_size :], given), content], axis=-1)
        if self.q_growth is not None:
            q = q * self.q_growth.factor(given.positions).astype(q.dtype)[:, None, None]
        latent = self.norm.apply(weights, "kv_latent_norm", latent)
        if self.latent_scale != 1:
            latent = latent * jnp.asarray(self.latent_scale, latent.dtype)
        k = jnp.concatenate([self._rotated(shared, given), latent], axis=-1)
        index: IndexQueries | Literal["last"] | None = None
        if self.indexer == "last":
            index = "last"
        elif self.indexer is not None:
            index = self.indexer.queries(weights, hidden, x, given)
            k = jnp.concatenate([self.indexer.keys(weights, hidden, given), k], axis=-1)
            q = jnp.pad(q, ((0, 0), (0, 0), (self._index_size, 0)))
        options: dict[str, Any] = {"scale": self.scale, "index": index, "kv_scales": kv_scales_of(weights)}
        out, kv = given.attend(kv, given, q, k[:, None], None, soft_cap=None, **options)
        out = project_heads("thl,hvl->thv", out, weights["v_up"])
        if self.has_head_gates:
            gates = self.head_gates.apply(weights, "head_gates", hidden).astype(jnp.float32)
            out = out * jax.nn.sigmoid(gates).astype(out.dtype).reshape(T, H, 1)
        return self.o.apply_summed(weights, "o", out.reshape(T, -1), given.axis), kv

    def _rotated(self, x: jax.Array, given: LayerInput) -> jax.Array:
        return rotated(x, given.rotation, self.rope_pairs)
