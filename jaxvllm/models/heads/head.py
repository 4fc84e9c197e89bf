"""The interface of a draft head, whatever its architecture."""

from typing import Any, Protocol

import jax

from jaxvllm.models.layer_input import Attend
from jaxvllm.models.params import Params
from jaxvllm.models.spec import ModelSpec
from sharding.axis import ModelAxis

# The declarations of a head's arrays, in the tree that its parameters have.
type Declarations = dict[str, Any]
# Where the parameters of a draft head are among those of its model. Every device has them whole.
DRAFT = "draft"


class DraftHead(Protocol):
    """A network that guesses the token after a known one. It is frozen and hashable.

    It sees that token, and the feature of the position before: what the model thought there, or where that is unknown,
    what the head itself thought. `params` are those of the model, with those of the head under `DRAFT`.
    """

    @property
    def spec(self) -> ModelSpec:
        """The head's layers, all of which have keys and values: how many, and their heads."""

    @property
    def feature_size(self) -> int:
        """The size F of a feature. With 0 the head sees tokens alone."""

    @property
    def depths(self) -> tuple[int, ...]:
        """The N layers of the model, by their numbers, after which the head sees the states."""

    def features(self, params: Params, hidden: jax.Array, states: jax.Array) -> jax.Array:
        """Returns the features [T, F] of tokens with `hidden` [T, E] after the final norm, and `states` [N, T, E]."""

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
        """Returns hidden states [T, E'], the features [T, F] that they stand for, and the cache.

        token_ids, positions  # i32[T]
        features  # [T, F], of the position before each token
        """

    def logits(
        self, params: Params, hidden: jax.Array, spec: ModelSpec, shard: ModelSpec, axis: ModelAxis
    ) -> jax.Array:
        """Returns this device's share f32[R, V] of the logits, over the vocabulary of the model `spec`."""
