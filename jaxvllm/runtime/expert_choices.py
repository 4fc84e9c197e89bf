"""The experts that the tokens of a step have chosen, which requests may be told."""

from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.models.experts import ExpertsFfn
from jaxvllm.models.layer_input import Scalar
from jaxvllm.models.spec import ModelSpec


@dataclass(frozen=True)
class ChoiceShape:
    """The size of the choices of a token: of each layer that has experts, the same number of them."""

    layers: tuple[int, ...]  # numbers of the layers with experts, among all
    top_k: int
    dtype: np.dtype[Any]  # the smallest that has all experts of a layer

    @classmethod
    def of(cls, spec: ModelSpec) -> Self:
        """Returns the size for a model.

        Raises ValueError for one without experts, and for one whose layers choose different numbers of them.
        """
        ffns = {number: layer.ffn for number, layer in enumerate(spec.layers) if isinstance(layer.ffn, ExpertsFfn)}
        counts = {ffn.router.top_k for ffn in ffns.values()}
        if len(counts) != 1 or any(isinstance(layer.late, ExpertsFfn) for layer in spec.layers):
            raise ValueError(
                "enable_return_routed_experts needs a model whose layers with experts choose equally many, one after "
                "the other, and this one is none: leave it out"
            )
        most = max(ffn.router.num_experts for ffn in ffns.values())
        return cls(tuple(ffns), counts.pop(), np.dtype(np.uint8 if most <= 256 else np.uint16))

    @property
    def of_token(self) -> tuple[int, int]:
        """The shape [layers with experts, k] of what is told of a token."""
        return len(self.layers), self.top_k

    def zeros(self, num_tokens: int) -> jax.Array:
        """Returns room for the choices of the tokens of a step, [T, layers, k]."""
        return jnp.zeros((num_tokens, *self.of_token), self.dtype)

    def stored(self, choices: jax.Array, chosen: jax.Array, number: Scalar) -> jax.Array:
        """Returns choices [T, layers, k] with the experts i32[T, k] that the tokens have chosen in layer `number`."""
        places = np.full(max(self.layers) + 1, len(self.layers), np.int32)
        places[list(self.layers)] = np.arange(len(self.layers))
        return choices.at[:, jnp.asarray(places)[number]].set(chosen.astype(self.dtype), mode="drop")
