"""`TokenAdapters`: which adapter each token of a step has, and which adapters there are in it."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.grouped_matmul import RowOrder, order_rows


class RowAdapters(NamedTuple):
    """The adapters of N rows, each of which is a token that goes to an expert, one of X."""

    slots: jax.Array  # i32[N]; 0 for rows without one
    order: RowOrder  # by expert and adapter: group x S + s has the rows of expert x and slot s + 1, of S slots


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

    def of_rows(self, tokens: jax.Array, experts: jax.Array, num_experts: int, backend: Backend) -> RowAdapters:
        """Takes rows of `tokens` i32[N] that go to `experts` i32[N], or nowhere where that is `num_experts`."""
        slots, count = self.slots[tokens], self.num_slots
        has_group = (slots > 0) & (experts < num_experts)
        groups = jnp.where(has_group, experts * count + slots - 1, num_experts * count)
        return RowAdapters(slots, order_rows(groups, num_experts * count, backend))

    @property
    def num_slots(self) -> int:
        """The number of slots, N."""
        return len(self.in_use)
