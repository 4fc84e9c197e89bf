"""The loads of experts on the device: how many tokens have chosen each of them, in each layer.

They lie in the state, as the suffix index does: they belong to no slot, and engines that do not count them do not have
them. Every device has all loads, because every device has all choices.
"""

from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp

from jaxvllm.models.experts import num_experts
from jaxvllm.models.spec import ModelSpec

EXPERT_LOADS = "expert_loads"


@dataclass(frozen=True)
class LoadShape:
    """The size of the loads. Layers without experts have some too, which stay at zero."""

    num_layers: int
    num_experts: int  # the most that a layer has

    @classmethod
    def of(cls, spec: ModelSpec) -> Self:
        """Returns the size for a model with experts."""
        return cls(spec.num_layers, max(num_experts(spec).values()))

    def zeros(self) -> jax.Array:
        """Returns loads of no token, u32[L, X]."""
        return jnp.zeros((self.num_layers, self.num_experts), jnp.uint32)

    def new(self) -> dict[str, jax.Array]:
        """Returns the part of the state that has the loads."""
        return {EXPERT_LOADS: self.zeros()}


def counted(loads: jax.Array, chosen: jax.Array, is_real: jax.Array, number: jax.Array | int) -> jax.Array:
    """Returns loads u32[L, X] with the experts i32[T, k] that tokens have chosen in layer `number`.

    is_real  # bool[T]: False for padding, which is not counted
    """
    return loads.at[number, chosen].add(is_real[:, None].astype(jnp.uint32))


def with_loads(state: dict[str, jax.Array], loads: jax.Array | None) -> dict[str, jax.Array]:
    """Adds the loads u32[L, X] of a step, if there are any, to those in `state`."""
    return state if loads is None else state | {EXPERT_LOADS: state[EXPERT_LOADS] + loads}


def take_loads(state: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns the state with loads of no token, and those that it had, u32[L, X]. `state` is donated."""
    loads = state[EXPERT_LOADS]
    return state | {EXPERT_LOADS: jnp.zeros_like(loads)}, loads
