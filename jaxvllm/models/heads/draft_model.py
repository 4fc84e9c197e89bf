"""A whole model as draft head: any family, of its own size, with the tokenizer of the model that it helps."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxvllm.models.decoder import forward, project_logits
from jaxvllm.models.heads.head import DRAFT
from jaxvllm.models.heads.vocabulary import share_of
from jaxvllm.models.layer_input import Attend
from jaxvllm.models.params import Params
from jaxvllm.models.spec import ModelSpec
from sharding.axis import ALONE, ModelAxis


@dataclass(frozen=True)
class DraftModel:
    """The model `spec`, which every device computes whole. It sees tokens alone."""

    spec: ModelSpec

    def __post_init__(self) -> None:
        if any(layer.window is not None for layer in self.spec.layers):
            raise ValueError("a draft model must see all positions: take another")
        # Its keys and values are in one array of pages.
        one_size = len({layer.memories for layer in self.spec.layers}) == 1
        if self.spec.shares_memory or not one_size or self.spec.layers[0].keeps_state:
            raise ValueError("all layers of a draft model must keep keys and values of one size: take another")

    @property
    def feature_size(self) -> int:
        return 0

    @property
    def depths(self) -> tuple[int, ...]:
        return ()

    def features(self, params: Params, hidden: jax.Array, states: jax.Array) -> jax.Array:
        return hidden[:, :0]

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
        token_ids = jnp.minimum(token_ids, self.spec.vocab_size - 1)
        hidden, kv = forward(params[DRAFT], self.spec, token_ids, positions, kv, attend, ALONE)
        return hidden, features, kv

    def logits(
        self, params: Params, hidden: jax.Array, spec: ModelSpec, shard: ModelSpec, axis: ModelAxis
    ) -> jax.Array:
        return share_of(project_logits(params[DRAFT], self.spec, hidden), spec, shard, axis)
