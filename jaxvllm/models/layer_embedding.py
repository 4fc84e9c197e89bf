"""`LayerEmbedding`: what a token means to each layer alone, beside its embedding for all (Gemma 3n, Gemma 4)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms.form import Activation
from jaxvllm.models.linear import Linear
from jaxvllm.models.norm import Norm
from jaxvllm.models.ops import activate


@dataclass(frozen=True)
class LayerEmbedding:
    """Gives each layer `size` numbers of a token: from a table, and from the embedding that all layers see.

    A gate of the layer's hidden state multiplies them, and a projection of that is normed and added to the state.
    """

    size: int
    num_layers: int
    hidden_size: int
    activation: Activation
    norm: Norm
    # The first tokens, which the table of a checkpoint has; others mean what token 0 means. None: it has all.
    known_tokens: int | None = None

    @property
    def projection(self) -> Linear:
        """The projection of the embedding that all layers see. Every device has all of it."""
        return Linear((self.num_layers, self.size, self.hidden_size), (None, None, "embed"))

    @property
    def gate(self) -> Linear:
        return Linear((self.size, self.hidden_size), (None, "embed"))

    @property
    def out(self) -> Linear:
        """The projection back to the hidden size."""
        return Linear((self.hidden_size, self.size), ("embed", None))

    def declare(self, vocab_size: int) -> dict[str, ParamDecl]:
        """Returns the arrays outside the layers, for a model of this vocabulary."""
        table = ParamDecl((vocab_size, self.num_layers * self.size), ("vocab", None), storage="table")
        norm = self.norm.declare("layer_embedding_norm", (self.size,), (None,))
        return {"layer_embeddings": table} | self.projection.declare("layer_embedding_projection") | norm

    def declare_layer(self) -> dict[str, ParamDecl]:
        """Returns the arrays of one layer."""
        decls = self.gate.declare("layer_embedding_gate") | self.out.declare("layer_embedding_out")
        return decls | self.norm.declare("layer_embedding_post_norm", (self.hidden_size,), ("embed",))

    def of_tokens(self, params: Mapping[str, Any], rows: jax.Array, x: jax.Array) -> jax.Array:
        """Returns [L, T, P] of the tokens' rows [T, L P] of the table, and their embeddings x [T, E]."""
        projected = self.projection.apply(params, "layer_embedding_projection", x)
        projected = projected * jnp.asarray(self.hidden_size**-0.5, x.dtype)
        projected = self.norm.apply(params, "layer_embedding_norm", projected)
        own = rows.reshape(projected.shape) * jnp.asarray(self.size**0.5, x.dtype)
        return jnp.moveaxis((projected + own) * jnp.asarray(2**-0.5, x.dtype), 1, 0)

    def apply(self, weights: Mapping[str, Any], x: jax.Array, embedding: jax.Array) -> jax.Array:
        """Returns what a layer adds to x [T, E], for its `embedding` [T, P]."""
        gate = activate(self.gate.apply(weights, "layer_embedding_gate", x), self.activation)
        out = self.out.apply(weights, "layer_embedding_out", gate * embedding)
        return self.norm.apply(weights, "layer_embedding_post_norm", out)
