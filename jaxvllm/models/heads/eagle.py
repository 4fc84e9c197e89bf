"""EAGLE heads: one decoder layer that reads the model's hidden states beside the tokens.

EAGLE (arXiv 2401.15077) sees the hidden state after the model's last layer. EAGLE-3 (arXiv 2503.01840) sees the states
after several layers, and has a vocabulary of its own, of the tokens that are common.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxvllm.models.block import Block
from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.decoder import embed, project_logits, rotations
from jaxvllm.models.heads.head import DRAFT, Declarations
from jaxvllm.models.heads.vocabulary import in_columns, share_of
from jaxvllm.models.layer_input import Attend, LayerInput, no_recur
from jaxvllm.models.linear import Linear
from jaxvllm.models.ops import project
from jaxvllm.models.params import Params
from jaxvllm.models.spec import ModelSpec
from pallas_kernels.ragged_paged_attention import NO_WINDOW
from sharding.axis import ALONE, ModelAxis


@dataclass(frozen=True)
class EagleHead:
    """EAGLE: the embedding of a token and the feature in front of it, through `fc` and a layer without a first norm.

    `spec` has the layer: its attention, FFN, norms and rope. The arrays in `optional` are those that not every head
    has: `fc_bias`, an embedding `embed` and an `lm_head` of its own.
    """

    spec: ModelSpec
    optional: frozenset[str] = frozenset()

    @property
    def feature_size(self) -> int:
        return self.spec.hidden_size

    @property
    def depths(self) -> tuple[int, ...]:
        return ()

    @property
    def fc(self) -> Linear:
        """The projection of an embedding beside a feature."""
        E = self.spec.hidden_size
        return Linear((E, 2 * E), (None, "embed"), "fc_bias" in self.optional)

    def declare(self) -> Declarations:
        """Returns the declarations of its arrays, which every device has whole."""
        first, *others = [layer.declare() for layer in self.spec.layers]
        del first["attention_norm"]  # `fc` stands in front of it
        outer = {"embed": table(self.spec), "lm_head": lm_head(self.spec, self.spec.vocab_size)}
        own = {name: decl for name, decl in outer.items() if name in self.optional}
        return self.fc.declare("fc") | own | {"layers": [first, *others]}

    def features(self, params: Params, hidden: jax.Array, states: jax.Array) -> jax.Array:
        return hidden

    def apply(
        self,
        params: Params,
        token_ids: jax.Array,
        positions: jax.Array,
        features: jax.Array,
        kv: Any,
        attend: Attend[Any],
        axis: ModelAxis,
    ) -> tuple[jax.Array, jax.Array, Any]:
        own = params[DRAFT]
        x = self.fc.apply(own, "fc", jnp.concatenate([embedded(params, token_ids, axis), features], 1))
        for number, (layer, weights) in enumerate(zip(self.spec.layers, own["layers"], strict=True)):
            h = layer.norm.apply(weights, "attention_norm", x) if number else x
            x, kv = decoder_layer(layer, weights, number, x, h, positions, kv, attend)
        return x, x, kv

    def logits(
        self, params: Params, hidden: jax.Array, spec: ModelSpec, shard: ModelSpec, axis: ModelAxis
    ) -> jax.Array:
        if "lm_head" in params[DRAFT]:
            return share_of(project(hidden, params[DRAFT]["lm_head"], dtype=jnp.float32), spec, shard, axis)
        return project_logits(params, shard, hidden)


@dataclass(frozen=True)
class Eagle3Head:
    """EAGLE-3: the layer reads the normed embedding beside the normed feature, and adds to the feature.

    The arrays in `optional` are those that not every head has: norms of the states that a feature is made of
    (`input_norm` over all together, `fc_norms` over each), and an embedding `embed`.
    """

    spec: ModelSpec
    depths: tuple[int, ...]
    state_size: int  # of the model's hidden states
    vocab_size: int  # of the tokens that it guesses
    num_tokens: int  # that the model has
    optional: frozenset[str] = frozenset()
    norm_before_residual: bool = False  # the layer adds to the normed feature
    norm_output: bool = False  # the next feature is what the last norm returns

    @property
    def feature_size(self) -> int:
        return self.spec.hidden_size

    @property
    def fc(self) -> Linear:
        """The projection of the states to a feature."""
        return Linear((self.spec.hidden_size, len(self.depths) * self.state_size), (None, "embed"))

    def declare(self) -> Declarations:
        """Returns the declarations of its arrays, which every device has whole."""
        E, H, depths = self.spec.hidden_size, self.state_size, len(self.depths)
        outer = {
            "input_norm": ParamDecl((depths * H,), (None,), "ones"),
            "fc_norms": ParamDecl((depths, H), (None, None), "ones"),
            "embed": table(self.spec),
        }
        first, *others = [layer.declare() for layer in self.spec.layers]
        # The first layer reads the embedding beside the feature.
        first["qkv"] = replace(first["qkv"], shape=(*first["qkv"].shape[:-1], 2 * E))
        first |= self.spec.norm.declare("feature_norm", (E,), (None,))
        return {
            **self.fc.declare("fc"),
            **{name: decl for name, decl in outer.items() if name in self.optional},
            **self.spec.norm.declare("final_norm", (E,), (None,)),
            "lm_head": lm_head(self.spec, self.vocab_size),
            "columns": ParamDecl((self.num_tokens,), (None,), dtype="int32"),
            "layers": [first, *others],
        }

    def features(self, params: Params, hidden: jax.Array, states: jax.Array) -> jax.Array:
        own = params[DRAFT]
        if "fc_norms" in own:
            states = self.spec.norm.apply({"fc_norms": own["fc_norms"][:, None]}, "fc_norms", states)
        x = jnp.moveaxis(states, 0, 1).reshape(states.shape[1], -1)
        if "input_norm" in own:
            x = self.spec.norm.apply(own, "input_norm", x)
        return self.fc.apply(own, "fc", x)

    def apply(
        self,
        params: Params,
        token_ids: jax.Array,
        positions: jax.Array,
        features: jax.Array,
        kv: Any,
        attend: Attend[Any],
        axis: ModelAxis,
    ) -> tuple[jax.Array, jax.Array, Any]:
        own, norm = params[DRAFT], self.spec.norm
        x = features
        for number, (layer, weights) in enumerate(zip(self.spec.layers, own["layers"], strict=True)):
            if number == 0:
                embedding = norm.apply(weights, "attention_norm", embedded(params, token_ids, axis))
                h = norm.apply(weights, "feature_norm", x)
                x = h if self.norm_before_residual else x
                h = jnp.concatenate([embedding, h], axis=1)
            else:
                h = norm.apply(weights, "attention_norm", x)
            x, kv = decoder_layer(layer, weights, number, x, h, positions, kv, attend)
        hidden = norm.apply(own, "final_norm", x)
        return hidden, hidden if self.norm_output else x, kv

    def logits(
        self, params: Params, hidden: jax.Array, spec: ModelSpec, shard: ModelSpec, axis: ModelAxis
    ) -> jax.Array:
        logits = project(hidden, params[DRAFT]["lm_head"], dtype=jnp.float32)
        return share_of(in_columns(logits, params[DRAFT]["columns"]), spec, shard, axis)


def table(spec: ModelSpec) -> ParamDecl:
    """Declares an embedding of a head's own."""
    return ParamDecl((spec.vocab_size, spec.hidden_size), ("vocab", "embed"), storage="table")


def lm_head(spec: ModelSpec, vocab_size: int) -> ParamDecl:
    """Declares an LM head of a head's own."""
    return ParamDecl((vocab_size, spec.hidden_size), ("vocab", "embed"), storage="matrix")


def embedded(params: Params, token_ids: jax.Array, axis: ModelAxis) -> jax.Array:
    """Returns the embeddings of tokens: the head's own, or those of the model."""
    if "embed" in params[DRAFT]:
        return embed(params[DRAFT]["embed"], token_ids, ALONE)
    return embed(params["embed"], token_ids, axis)


def decoder_layer(
    layer: Block,
    weights: Params,
    number: int,
    x: jax.Array,
    h: jax.Array,
    positions: jax.Array,
    kv: Any,
    attend: Attend[Any],
) -> tuple[jax.Array, Any]:
    """Adds to x [T, E] what attention makes of `h`, and then what the FFN makes of the sum."""
    rotation = rotations((layer.rope,), positions)(0)
    given = LayerInput(positions, rotation, attend, no_recur, ALONE, layer.memory, number, NO_WINDOW)
    h, kv = layer.attention.apply(weights, h, kv, given)
    x = x + h
    assert layer.ffn is not None, "EAGLE's layers are those of a Llama"
    return x + layer.ffn.apply(weights, layer.norm.apply(weights, "ffn_norm", x), given), kv
