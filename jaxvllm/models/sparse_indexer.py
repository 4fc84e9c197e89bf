"""`SparseIndexer`: chooses the positions that latent attention sees, where a context is longer than a few of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.layer_input import LayerInput
from jaxvllm.models.linear import Linear
from jaxvllm.models.norm import LayerNorm
from jaxvllm.models.positive import require_positive
from jaxvllm.models.rotation import RopePairs, rotated
from pallas_kernels.ragged_paged_attention import IndexQueries


@dataclass(frozen=True)
class SparseIndexer:
    """A small attention without values (DeepSeek V3.2, arXiv 2512.02556): the score of a position is the sum over heads
    of w relu(q . k), and each query attends to the `top_k` positions with the best scores.

    Published implementations turn q and k by a Hadamard matrix and round them to eight bits; like transformers, this
    one does neither, which changes scores by rounding alone. Every device computes all of it.
    """

    hidden_size: int
    q_rank: int  # the size of the query's latent that its queries are made from
    num_heads: int
    head_size: int
    top_k: int
    norm: LayerNorm  # of keys
    rope_pairs: RopePairs

    def __post_init__(self) -> None:
        require_positive(self, "hidden_size q_rank num_heads head_size top_k")

    @property
    def q(self) -> Linear:
        return Linear((self.num_heads * self.head_size, self.q_rank), (None, "embed"))

    @property
    def k(self) -> Linear:
        return Linear((self.head_size, self.hidden_size), (None, "embed"))

    @property
    def weights(self) -> Linear:
        return Linear((self.num_heads, self.hidden_size), (None, "embed"))

    def declare(self) -> dict[str, ParamDecl]:
        """Returns its arrays by name."""
        decls = self.q.declare("index_q") | self.k.declare("index_k") | self.weights.declare("index_weights")
        return decls | self.norm.declare("index_k_norm", (self.head_size,), (None,))

    def queries(self, weights: Mapping[str, Any], x: jax.Array, q_latent: jax.Array, given: LayerInput) -> IndexQueries:
        """Returns what the tokens with the hidden states x [T, E] and the latents q_latent [T, q_rank] ask."""
        q = self.q.apply(weights, "index_q", q_latent).reshape(len(x), self.num_heads, self.head_size)
        counts = self.weights.apply(weights, "index_weights", x).astype(jnp.float32)
        counts = counts * (self.num_heads * self.head_size) ** -0.5
        return IndexQueries(rotated(q, given.rotation, self.rope_pairs), counts, self.top_k)

    def keys(self, weights: Mapping[str, Any], x: jax.Array, given: LayerInput) -> jax.Array:
        """Returns the keys [T, D] of the tokens with the hidden states x [T, E]."""
        k = self.norm.apply(weights, "index_k_norm", self.k.apply(weights, "index_k", x))
        return rotated(k, given.rotation, self.rope_pairs)
