"""`TokenAdapters`: which adapter each token of a step has, and the tokens in the order of their adapters."""

from dataclasses import dataclass
from functools import partial
from typing import Self

import jax
import jax.numpy as jnp


@partial(jax.tree_util.register_dataclass, data_fields=["slots", "order", "places", "starts"], meta_fields=[])
@dataclass(frozen=True)
class TokenAdapters:
    """The adapters of the T tokens of a step, in slots 1 to N. It is made once a step, for all layers."""

    slots: jax.Array  # i32[T]; 0 for tokens without one
    order: jax.Array  # i32[T]: the tokens by their slots, those without an adapter last
    places: jax.Array  # i32[T]: where each token is in this order
    starts: jax.Array  # i32[N + 1]: where the tokens of slot n begin there, at [n - 1], and where the last of them end

    @classmethod
    def of(cls, slots: jax.Array, num_slots: int) -> Self:
        """Sorts tokens whose adapters are in `slots` i32[T]."""
        keys = jnp.where(slots == 0, num_slots, slots - 1)
        order = jnp.argsort(keys, stable=True).astype(jnp.int32)
        tokens = jnp.arange(len(slots), dtype=jnp.int32)
        starts = (keys[:, None] < jnp.arange(num_slots + 1)).sum(0, dtype=jnp.int32)
        return cls(slots, order, jnp.zeros_like(order).at[order].set(tokens), starts)

    @property
    def num_slots(self) -> int:
        """The number of slots, N."""
        return len(self.starts) - 1
