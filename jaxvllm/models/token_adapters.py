"""`TokenAdapters`: which adapter each token of a step has, and which adapters there are in it."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.grouped_matmul import RowOrder, order_rows
from sharding.axis import ReplicaAxis


class RowAdapters(NamedTuple):
    """The adapters of N rows, each of which is a token that goes to an expert, one of X.

    Where replicas share experts, rows are tokens of any of them, and the slots of the first replica come first.
    """

    slots: jax.Array  # i32[N]; 0 for rows without one
    order: RowOrder  # by expert and adapter: group x S + s has the rows of expert x and slot s + 1, of S slots

    @classmethod
    def of(cls, slots: jax.Array, experts: jax.Array, num_slots: int, num_experts: int, backend: Backend) -> Self:
        """Takes rows whose adapters are in `slots`, and which go to `experts` i32[N], or nowhere: `num_experts`."""
        has_group = (slots > 0) & (experts < num_experts)
        groups = jnp.where(has_group, experts * num_slots + slots - 1, num_experts * num_slots)
        return cls(slots, order_rows(groups, num_experts * num_slots, backend))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["slots", "has_slot", "in_use", "num_in_use", "order"],
    meta_fields=[],
)
@dataclass(frozen=True)
class TokenAdapters:
    """The adapters of the T tokens of a step, in slots 1 to N. It is made once a step, for all layers."""

    slots: jax.Array  # i32[T]; 0 for tokens without one
    has_slot: tuple[jax.Array, ...]  # bool[T] for each of the N slots: whether a token has its adapter
    in_use: jax.Array  # i32[N]: all slots, those that a token has first
    num_in_use: jax.Array  # i32: how many these are
    order: RowOrder  # of the tokens: group g has those of slot g + 1

    @classmethod
    def of(cls, slots: jax.Array, num_slots: int, backend: Backend = REFERENCE) -> Self:
        """Takes tokens whose adapters are in `slots` i32[T]. What of it no matrix asks for is not computed."""
        numbers = jnp.arange(1, num_slots + 1, dtype=jnp.int32)
        has_slot = tuple(slots == number for number in range(1, num_slots + 1))
        is_used = (slots[:, None] == numbers).any(0)
        in_use = numbers[jnp.argsort(~is_used, stable=True)]
        order = order_rows(jnp.where(slots > 0, slots - 1, num_slots), num_slots, backend)
        return cls(slots, has_slot, in_use, is_used.sum(dtype=jnp.int32), order)

    def masked(self, of_slots: jax.Array) -> jax.Array:
        """Returns [T, N W], what the adapters of all slots make of all tokens, with zeros for those of others.

        What an adapter makes of the tokens of others may be infinite. So it is replaced, and not multiplied by zero.
        """
        # TPUs compare with a constant within the product that follows. With one slot XLA would compare once for all
        # products of a layer, which takes v6e 2,100 cycles in each, and so that comparison is made once a step.
        numbers = np.repeat(np.arange(1, self.num_slots + 1, dtype=np.int32), of_slots.shape[1] // self.num_slots)
        is_own = self.has_slot[0][:, None] if self.num_slots == 1 else self.slots[:, None] == numbers
        return jnp.where(is_own, of_slots, jnp.zeros((), of_slots.dtype))

    def among(self, replicas: ReplicaAxis) -> jax.Array:
        """Returns the slots of the tokens among those of all replicas, i32[T]; 0 for tokens without an adapter."""
        return jnp.where(self.slots > 0, self.slots + replicas.first(self.num_slots), 0)

    @property
    def num_slots(self) -> int:
        """The number of slots, N."""
        return len(self.in_use)
