"""`OuterLora`: what adapters of low rank of the embedding and of the LM head are on the devices, and how they are used.

The embedding is a matrix [E, V] here, whose products with tokens are looked up. The two are adapted apart from each
other, also where the model has one table for both: so PEFT computes with adapters that are not merged.

The LM head multiplies hidden states in several programs, some of which do not know whose they are. So each hidden state
that it may read goes there with what A of its adapter makes of it, in the columns of its slot, and zeros in the others:
f[T, E + N W]. Where all of these are zeros, nothing is multiplied by B. Adapters may also have whole tables of their
own, for which more columns follow (`models.saved_tables`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.lora import DOWN, OUTSIDE, RATIO, UP, LayerLora
from jaxvllm.models.ops import project, project_grouped, rows_of
from jaxvllm.models.saved_tables import OWN, TABLES, SavedTables
from jaxvllm.models.token_adapters import TokenAdapters
from sharding.axis import ModelAxis

# What adapters may change outside the layers.
EMBED, HEAD = "embed", "lm_head"
# TPUs look up as many tokens by a product.
_FEW_TOKENS = 64


@dataclass(frozen=True)
class OuterLora:
    """The room of the embedding and of the LM head for adapters: that of a layer with these two matrices.

    One by one, there is a matrix [.., W] of B for each slot, for which CPUs have a kernel. Where XLA multiplies, slots
    are masked, however many there are, because most steps have no adapter of these two.
    """

    room: LayerLora
    tables: SavedTables | None = None  # the room for whole tables, if there is any

    def declare_one(self, vocab_size: int, hidden_size: int) -> dict[str, ParamDecl]:
        """Returns the arrays of one adapter: A [W, V], [W, E] and B [E, W], [V, W], and what tells its own tables."""
        decls = _without_ratios(self.room.declare_one(_matrices(vocab_size, hidden_size)))
        width = self.room.width(1)  # no row of B says which part it has: there is one
        of_rank = {
            name: replace(one, shape=(*one.shape[:-1], width)) if name.startswith(UP) else one
            for name, one in decls.items()
        }
        return of_rank | ({} if self.tables is None else self.tables.declare_flags(1))

    def declare(self, vocab_size: int, hidden_size: int) -> dict[str, ParamDecl]:
        """Returns the arrays of all slots."""
        return {name: self._in_slots(name, one) for name, one in self.declare_one(vocab_size, hidden_size).items()}

    def _in_slots(self, name: str, one: ParamDecl) -> ParamDecl:
        if self.tables is not None and name.startswith(OWN):
            return self.tables.declare_flags(self.room.num_slots)[name]
        shape, axis = list(one.shape), self.slot_axis(name)
        if self.room.one_by_one:
            return replace(one, shape=(self.room.num_slots, *shape), axes=(None, *one.axes), storage="experts")
        shape[axis] *= self.room.num_slots
        return replace(one, shape=tuple(shape), storage="matrix")

    def slot_axis(self, name: str) -> int:
        """Returns the axis of slots in the arrays of that name."""
        return 0 if name.startswith(OWN) else self.room.slot_axis(name, is_stacked=False)

    @property
    def num_columns(self) -> int:
        """The number of columns beside a hidden state: N W of low rank, and one for each slot with room for a head."""
        tables = self._saved(HEAD)
        return self._num_low_rank + (0 if tables is None else tables.num_slots)

    @property
    def _num_low_rank(self) -> int:
        return self.room.num_slots * self.room.width(1) if self._has(HEAD) else 0

    def embedded(
        self, adapters: Mapping[str, Any], ids: jax.Array, x: jax.Array, tokens: TokenAdapters, axis: ModelAxis
    ) -> jax.Array:
        """Returns x [T, E], what was looked up for `ids` i32[T], as the adapters of `tokens` change it."""
        weights = adapters[OUTSIDE]
        if (saved := self._saved(EMBED)) is not None:
            x = saved.embedded(weights[OWN + EMBED], adapters[TABLES][EMBED], ids, x, tokens, axis)
        return self._low_rank_embedded(weights, ids, x, tokens, axis) if self._has(EMBED) else x

    def _has(self, name: str) -> bool:
        return name in dict(self.room.parts)

    def _saved(self, name: str) -> SavedTables | None:
        return self.tables if self.tables is not None and name in self.tables.names else None

    def _low_rank_embedded(
        self, weights: Mapping[str, Any], ids: jax.Array, x: jax.Array, tokens: TokenAdapters, axis: ModelAxis
    ) -> jax.Array:
        down = rows_of(weights[DOWN + EMBED])
        share = down.shape[-1]
        ids = ids - axis.first(share)
        is_here = (ids >= 0) & (ids < share)
        ids = jnp.clip(ids, 0, share - 1)
        if self.room.one_by_one:
            of_own = down[jnp.maximum(tokens.slots - 1, 0), :, ids]
            of_slots = jnp.tile(of_own, (1, self.room.num_slots))
        else:
            of_slots = _columns_at(down, ids)
        columns = axis.sum(jnp.where(is_here[:, None], tokens.masked(of_slots), 0))
        return self._raised(weights[UP + EMBED], columns, x)

    def with_zeros(self, hidden: jax.Array) -> jax.Array:
        """Returns hidden states [T, E] with the columns that `logits` reads, of tokens without adapters."""
        return jnp.pad(hidden, ((0, 0), (0, self.num_columns)))

    def with_columns(self, adapters: Mapping[str, Any], hidden: jax.Array, tokens: TokenAdapters) -> jax.Array:
        """Returns the same with the columns of the adapters of `tokens`."""
        weights, parts = adapters[OUTSIDE], [hidden]
        if self._has(HEAD):
            parts.append(self._low_rank_columns(weights, hidden, tokens))
        if (saved := self._saved(HEAD)) is not None:
            parts.append(saved.columns(weights[OWN + HEAD], tokens, hidden.dtype))
        return jnp.concatenate(parts, axis=1)

    def _low_rank_columns(self, weights: Mapping[str, Any], hidden: jax.Array, tokens: TokenAdapters) -> jax.Array:
        down, count = weights[DOWN + HEAD], self.room.num_slots
        if self.room.one_by_one:

            def with_slot(number: jax.Array, of_slots: jax.Array) -> jax.Array:
                slot = tokens.in_use[number]
                h = project_grouped(hidden, down, _all_of(slot - 1, count, len(hidden)))
                return jax.lax.dynamic_update_index_in_dim(of_slots, h, slot - 1, 1)

            zeros = jnp.zeros((len(hidden), count, self.room.width(1)), hidden.dtype)
            of_slots = jax.lax.fori_loop(0, tokens.num_in_use, with_slot, zeros).reshape(len(hidden), -1)
        else:
            of_slots = project(hidden, down)
        return tokens.masked(of_slots)

    def logits(
        self, adapters: Mapping[str, Any], hidden: jax.Array, columns: jax.Array, logits: jax.Array
    ) -> jax.Array:
        """Returns f32[R, V], this device's share of the logits of hidden states [R, E], as their columns change it."""
        low_rank, of_tables = jnp.split(columns, [self._num_low_rank], axis=1)
        if self._has(HEAD):
            logits = self._raised(adapters[OUTSIDE][UP + HEAD], low_rank, logits)
        if (saved := self._saved(HEAD)) is not None:
            logits = saved.logits(adapters[TABLES][HEAD], hidden, of_tables, logits)
        return logits

    def _raised(self, up: Any, columns: jax.Array, y: jax.Array) -> jax.Array:
        """Returns y [T, ..] with the products of B and of the columns of each slot that some token has."""
        if not self.room.one_by_one:
            return jax.lax.cond(
                jnp.any(columns != 0), lambda y: y + project(columns, up, dtype=y.dtype), lambda y: y, y
            )
        count = self.room.num_slots
        of_slots = columns.reshape(len(columns), count, -1)

        def with_slot(number: jax.Array, y: jax.Array) -> jax.Array:
            own = jax.lax.dynamic_index_in_dim(of_slots, number, 1, keepdims=False)
            starts = _all_of(number, count, len(own))
            return jax.lax.cond(
                jnp.any(own != 0), lambda y: y + project_grouped(own, up, starts).astype(y.dtype), lambda y: y, y
            )

        return jax.lax.fori_loop(0, count, with_slot, y)


def _matrices(vocab_size: int, hidden_size: int) -> dict[str, ParamDecl]:
    return {
        EMBED: ParamDecl((hidden_size, vocab_size), ("embed", "vocab")),
        HEAD: ParamDecl((vocab_size, hidden_size), ("vocab", "embed")),
    }


def _without_ratios(decls: Mapping[str, ParamDecl]) -> dict[str, ParamDecl]:
    return {name: decl for name, decl in decls.items() if not name.startswith(RATIO)}


def _columns_at(down: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the columns `ids` i32[T] of A [W, V], [T, W].

    To look up columns, XLA:TPU turns all of A first, and fills each column up to 128 numbers: 74,000 cycles of a decode
    step of v6e for 152k words. A product reads A as it is, and takes 3,400. With many tokens it takes more.
    """
    if len(ids) > _FEW_TOKENS:
        return down[:, ids].T
    return jax.lax.platform_dependent(down, ids, tpu=columns_by_product, default=lambda down, ids: down[:, ids].T)


def columns_by_product(down: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the columns `ids` i32[T] of A [W, V] exactly, [T, W]."""
    is_chosen = (ids[:, None] == jnp.arange(down.shape[1])).astype(down.dtype)
    dimensions = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(is_chosen, down, dimensions, precision=jax.lax.Precision.HIGHEST)


def _all_of(number: jax.Array, count: int, num_tokens: int) -> jax.Array:
    """Returns the starts of `count` groups of tokens, of which group `number` has all."""
    return jnp.where(jnp.arange(count + 1) > number, num_tokens, 0).astype(jnp.int32)
