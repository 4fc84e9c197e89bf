"""`TokenAdapters`: which adapter each token of a step has, and which adapters there are in it."""

from dataclasses import dataclass
from functools import partial
from typing import Self

import jax
import jax.numpy as jnp


@partial(jax.tree_util.register_dataclass, data_fields=["slots", "in_use", "num_in_use"], meta_fields=[])
@dataclass(frozen=True)
class TokenAdapters:
    """The adapters of the T tokens of a step, in slots 1 to N. It is made once a step, for all layers."""

    slots: jax.Array  # i32[T]; 0 for tokens without one
    in_use: jax.Array  # i32[N]: all slots, those that a token has first
    num_in_use: jax.Array  # i32: how many these are

    @classmethod
    def of(cls, slots: jax.Array, num_slots: int) -> Self:
        """Takes tokens whose adapters are in `slots` i32[T]."""
        numbers = jnp.arange(1, num_slots + 1, dtype=jnp.int32)
        is_used = (slots[:, None] == numbers).any(0)
        return cls(slots, numbers[jnp.argsort(~is_used, stable=True)], is_used.sum(dtype=jnp.int32))

    @property
    def num_slots(self) -> int:
        """The number of slots, N."""
        return len(self.in_use)
