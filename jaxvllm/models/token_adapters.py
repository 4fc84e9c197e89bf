"""`TokenAdapters`: which adapter each token of a step has, and which adapters there are in it."""

from dataclasses import dataclass
from functools import partial
from typing import Self

import jax
import jax.numpy as jnp

from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.grouped_matmul import RowOrder, order_rows


@partial(jax.tree_util.register_dataclass, data_fields=["slots", "in_use", "num_in_use", "order"], meta_fields=[])
@dataclass(frozen=True)
class TokenAdapters:
    """The adapters of the T tokens of a step, in slots 1 to N. It is made once a step, for all layers."""

    slots: jax.Array  # i32[T]; 0 for tokens without one
    in_use: jax.Array  # i32[N]: all slots, those that a token has first
    num_in_use: jax.Array  # i32: how many these are
    order: RowOrder  # of the tokens: group g has those of slot g + 1

    @classmethod
    def of(cls, slots: jax.Array, num_slots: int, backend: Backend = REFERENCE) -> Self:
        """Takes tokens whose adapters are in `slots` i32[T]. What of it no matrix asks for is not computed."""
        numbers = jnp.arange(1, num_slots + 1, dtype=jnp.int32)
        is_used = (slots[:, None] == numbers).any(0)
        in_use = numbers[jnp.argsort(~is_used, stable=True)]
        order = order_rows(jnp.where(slots > 0, slots - 1, num_slots), num_slots, backend)
        return cls(slots, in_use, is_used.sum(dtype=jnp.int32), order)

    @property
    def num_slots(self) -> int:
        """The number of slots, N."""
        return len(self.in_use)
