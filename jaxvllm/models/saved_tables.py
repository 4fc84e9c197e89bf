"""`SavedTables`: the room for embeddings and LM heads that adapters bring along whole, in the place of the model's.

PEFT saves such a table where `modules_to_save` names its module. The first slots of adapters have room for them. Each
table is an array of its own there, of the same shape as the model's and in the dtype that the model computes in. So a
new one takes the place of the array before it: nothing is compiled, and no program copies it.

Few adapters have any, so that a slot tells by a number which tables are its adapter's own, and a step reads no table
but those that its tokens have. Hidden states go to the LM head with one more column for each slot with such room: a one
in that of its own head, or zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms import Matrix
from jaxvllm.models.ops import look_up, project, rows_of
from jaxvllm.models.token_adapters import TokenAdapters
from sharding.axis import ModelAxis

# The place of the tables in the tree of the arrays of adapters: by name, a list of those of all slots that have room.
TABLES = "tables"
# The names of what tells whether a slot's adapter has such a table of its own begin so.
OWN = "lora_own_"

# What a slot has of a table.
type Table = jax.Array | Matrix


@dataclass(frozen=True)
class SavedTables:
    """The room of the first `num_slots` adapters for tables of these names."""

    num_slots: int
    names: tuple[str, ...]

    def declare_flags(self, num_slots: int) -> dict[str, ParamDecl]:
        """Returns what tells, for each of all slots of adapters, whether the adapter has a table of its own."""
        return {OWN + name: ParamDecl((num_slots,), (None,), "zeros", dtype="int32") for name in self.names}

    def embedded(
        self,
        flags: jax.Array,
        tables: Sequence[Table],
        ids: jax.Array,
        x: jax.Array,
        tokens: TokenAdapters,
        axis: ModelAxis,
    ) -> jax.Array:
        """Returns x [T, E], what was looked up for `ids` i32[T], or the rows of those tables that tokens have."""
        slots = _slots(flags, tokens)
        own = jnp.zeros_like(x)
        for number, table in enumerate(tables, 1):
            is_own = slots == number

            def looked_up(own: jax.Array, table: Table, is_own: jax.Array) -> jax.Array:
                share = len(rows_of(table))
                here = ids - axis.first(share)
                is_here = is_own & (here >= 0) & (here < share)
                return jnp.where(is_here[:, None], look_up(table, jnp.clip(here, 0, share - 1)), own)

            with_table = partial(looked_up, table=table, is_own=is_own)
            own = jax.lax.cond(jnp.any(is_own), with_table, lambda own: own, own)
        return jnp.where((slots > 0)[:, None], axis.sum(own), x)

    def columns(self, flags: jax.Array, tokens: TokenAdapters, dtype: DTypeLike) -> jax.Array:
        """Returns the columns [T, N] that say whose head each token has."""
        return (_slots(flags, tokens)[:, None] == jnp.arange(1, self.num_slots + 1)).astype(dtype)

    def logits(self, tables: Sequence[Table], hidden: jax.Array, columns: jax.Array, logits: jax.Array) -> jax.Array:
        """Returns f32[R, V], this device's share of the logits, or of those rows that have a head, of their own.

        They are rows of hidden states [R, E], with columns [R, N].
        """
        for number, table in enumerate(tables):
            is_own = columns[:, number] != 0

            def of_head(logits: jax.Array, table: Table, is_own: jax.Array) -> jax.Array:
                return jnp.where(is_own[:, None], project(hidden, table, dtype=logits.dtype), logits)

            with_head = partial(of_head, table=table, is_own=is_own)
            logits = jax.lax.cond(jnp.any(is_own), with_head, lambda logits: logits, logits)
        return logits


def _slots(flags: jax.Array, tokens: TokenAdapters) -> jax.Array:
    """Returns the slots i32[T] of the tokens whose adapters have a table of their own, and 0 for the others."""
    has_own = (tokens.slots > 0) & (flags[jnp.maximum(tokens.slots - 1, 0)] > 0)
    return jnp.where(has_own, tokens.slots, 0)
