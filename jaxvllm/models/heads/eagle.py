"""EAGLE heads: one decoder layer that reads the model's hidden states beside the tokens.

EAGLE (arXiv 2401.15077) sees the hidden state after the model's last layer. EAGLE-3 (arXiv 2503.01840) sees the states
after several layers, and has a vocabulary of its own, of the tokens that are common.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxvllm.models.block import Block
from jaxvllm.models.decoder import embed, project_logits, rotations
from jaxvllm.models.heads.head import DRAFT
from jaxvllm.models.heads.vocabulary import in_columns, share_of
from jaxvllm.models.layer_input import Attend, LayerInput, no_recur
from jaxvllm.models.ops import project
from jaxvllm.models.params import Params
from jaxvllm.models.spec import ModelSpec
from pallas_kernels.ragged_paged_attention import NO_WINDOW
from sharding.axis import ALONE, ModelAxis


@dataclass(frozen=True)
class EagleHead:
    """EAGLE: the embedding of a token and the feature in front of it, through `fc` and a layer without a first norm.

    `spec` has the layer: its attention, FFN, norms and rope.
    """

    spec: ModelSpec

    @property
    def feature_size(self) -> int:
        return self.spec.hidden_size

    @property
    def depths(self) -> tuple[int, ...]:
        return ()

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
        x = project(jnp.concatenate([embedded(params, token_ids, axis), features], 1), own["fc"], own.get("fc_bias"))
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
    """EAGLE-3: the layer reads the normed embedding beside the normed feature, and adds to the feature."""

    spec: ModelSpec
    depths: tuple[int, ...]
    norm_before_residual: bool = False  # the layer adds to the normed feature
    norm_output: bool = False  # the next feature is what the last norm returns

    @property
    def feature_size(self) -> int:
        return self.spec.hidden_size

    def features(self, params: Params, hidden: jax.Array, states: jax.Array) -> jax.Array:
        own = params[DRAFT]
        if "fc_norms" in own:
            states = self.spec.norm.apply({"fc_norms": own["fc_norms"][:, None]}, "fc_norms", states)
        x = jnp.moveaxis(states, 0, 1).reshape(states.shape[1], -1)
        if "input_norm" in own:
            x = self.spec.norm.apply(own, "input_norm", x)
        return project(x, own["fc"])

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
    return x + layer.ffn.apply(weights, layer.norm.apply(weights, "ffn_norm", x), ALONE), kv
