"""`LayerCache`: the memories of a device's layers in one step, as the layers use them: in groups, by place and row."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxvllm.models.layer_input import LayerInput, Scalar
from jaxvllm.models.layer_memory import KeysAndValues
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.state_kernel import StateKernel, state_kernel
from jaxvllm.models.state_memory import Columns, StateMemory, Token
from jaxvllm.runtime.cache_shape import CacheShape, KVCachePages, LayerGroup
from jaxvllm.runtime.expert_loads import counted
from pallas_kernels.backend import Backend
from pallas_kernels.ragged_paged_attention import (
    ChosenPositions,
    IndexQueries,
    KVPages,
    RaggedRows,
    codes_of,
    must_choose,
)

# Of each group whose layers keep a state, by its number: what those states may still take in of a step's tokens,
# with a leading axis of layers.
type TakenIn = dict[int, Token]


class Kept(NamedTuple):
    """The layers of a step pass these values on, each to the next.

    pages: of each group
    taken: what the states of layers did not take in yet
    chosen: the positions that the last index of the layers has chosen, where a layer after its own reads them
    loads: u32[L, X], how many tokens have chosen each expert of each layer, where they are counted
    choices: [T, layers with experts, k], the experts that each token has chosen, where they are told
    """

    pages: KVCachePages
    taken: TakenIn
    chosen: ChosenPositions | None
    loads: jax.Array | None
    choices: jax.Array | None = None


@dataclass(frozen=True, eq=False)
class LayerCache:
    """The cache of the layers of `spec` for the rows of a step, with a page table i32[R, groups, max_pages].

    With `most_drafted` no row has more tokens than that, and all but the first of a row are drafts. Layer states
    do not take these tokens in before `commit` says how many of them count.
    """

    spec: ModelSpec
    shape: CacheShape
    rows: RaggedRows
    pages: KVCachePages  # before the step
    dtype: DTypeLike  # of activations
    backend: Backend
    most_drafted: int | None = None
    is_cut: bool = False  # whether a row may go on in the next microbatch of the step

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The groups of layers. When a step is compiled, it is known in which one each layer is."""
        return self.shape.groups(self.spec)

    @cached_property
    def _number_of(self) -> dict[Any, int]:
        """The number of the group of each memory."""
        return {
            memory: number
            for number, group in enumerate(self.groups)
            for layer in group.layers
            for memory in self.spec.layers[layer].memories
            if memory.seeing(group.window) == group.memory
        }

    @cached_property
    def _places(self) -> np.ndarray:
        """The place of each layer in each group that it is in, i32[groups, layers].

        A layer's number may be that of a loop.
        """
        places = np.zeros((len(self.groups), self.spec.num_layers), np.int32)
        for number, group in enumerate(self.groups):
            places[number, list(group.layers)] = np.arange(len(group.layers))
        return places

    @cached_property
    def _rows_of(self) -> list[RaggedRows]:
        """The rows of each group, with its page table."""
        found = []
        for number, group in enumerate(self.groups):
            rows = replace(self.rows, page_table=self.rows.page_table[:, number])
            if isinstance(group.memory, KeysAndValues):
                rows = group.memory.seen_by(rows, self.shape.page_size)
            found.append(rows)
        return found

    @cached_property
    def _plans(self) -> dict[tuple[int, int], Any]:
        """The plans that the kernels make once a step, by the number of a group and of query heads."""
        plans = {}
        for layer in self.spec.layers:
            key = number, heads = self._number_of[layer.memory], layer.attention.num_heads
            if key not in plans and isinstance(memory := self.groups[number].memory, KeysAndValues):
                rows, pages = self._rows_of[number], self.pages[number]
                plans[key] = memory.plan(rows, pages, heads, self.dtype, self.backend)
        return plans

    @cached_property
    def _state_kernels(self) -> dict[int, tuple[StateKernel, Any]]:
        """The kernels of groups that keep states, and their plans, by the group's number.

        Drafts have none. Neither do rows that may go on in the next microbatch: `StateMemory.advance` writes their
        states to page 0 last and reads them from there first, and no kernel does.
        """
        kernels: dict[int, tuple[StateKernel, Any]] = {}
        if self.is_cut:
            return kernels
        for number, group in enumerate(self.groups):
            if isinstance(group.memory, StateMemory) and group.layers and self.most_drafted is None:
                kernel = state_kernel(group.memory, self.backend)
                if kernel is not None:
                    kernels[number] = kernel, kernel.plan(self._rows_of[number], self.shape.page_size)
        return kernels

    def make_plans(self) -> None:
        """Makes what layers share. It is called outside of the loops over layers, whose values are theirs alone."""
        assert self._rows_of is not None and self._plans is not None and self._state_kernels is not None

    @property
    def begin(self) -> Kept:
        """Returns what the layers begin with: the pages, and no token taken in."""
        taken: TakenIn = {}
        for number, group in enumerate(self.groups):
            if self.most_drafted is not None and isinstance(group.memory, StateMemory):
                each = len(self.pages[number]), len(self.rows.kv_lens), self.most_drafted, group.memory.num_kv_heads
                parts = group.memory.rule.taken_parts
                taken[number] = {name: jnp.zeros((*each, *part), jnp.float32) for name, part in parts.items()}
        loads = None if (shape := self.shape.loads(self.spec)) is None else shape.zeros()
        return Kept(self.pages, taken, None, loads)

    def without_choice(self, kept: Kept) -> Kept:
        """Returns what the first layer is given: no index has chosen yet.

        That is no position, or None where no layer reads another's choice, or all see everything.
        """
        top_k = self.spec.shared_choice
        if top_k is None or not must_choose(top_k, self._rows_of[0], self.pages[0]):
            return kept._replace(chosen=None)
        return kept._replace(chosen=ChosenPositions(jnp.full((len(self.rows.token_rows), top_k), -1, jnp.int32)))

    def count(self, kept: Kept, chosen: jax.Array, number: Scalar) -> Kept:
        """Counts the experts i32[T, k] that the tokens of the step have chosen in layer `number`."""
        assert kept.loads is not None, "nobody counts loads"
        return kept._replace(loads=counted(kept.loads, chosen, self.rows.is_real(), number))

    def attend(
        self,
        kept: Kept,
        given: LayerInput,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        *,
        scale: float,
        soft_cap: float | None,
        sinks: jax.Array | None = None,
        slopes: jax.Array | None = None,
        kv_scales: jax.Array | None = None,
        index: IndexQueries | Literal["last"] | None = None,
    ) -> tuple[jax.Array, Kept]:
        """Is the layers' `Attend`."""
        pages, chosen = kept.pages, kept.chosen
        number, memory = self._number_of[given.memory], given.memory
        assert isinstance(memory, KeysAndValues), "attention keeps keys and values"
        own, place = pages[number], self._place(number, given)
        if chosen is not None and isinstance(index, IndexQueries):
            assert k is not None, "a layer with an index has keys of its own"
            kept_as = {"quantization": self.shape.quantization, "kv_scales": kv_scales}
            chosen, own = memory.choose(own, place, self._rows_of[number], k, index, self.backend, **kept_as)
            k = None
        rows = self._rows_of[number]
        if given.is_needed is not None and len(given.is_needed) == len(rows.token_rows):
            rows = replace(rows, is_needed=given.is_needed)
        seen = chosen if index is not None and chosen is not None else None if index == "last" else index
        out, own = memory.attend(
            own,
            place,
            rows,
            q,
            k,
            v,
            given.window,
            scale=scale,
            soft_cap=soft_cap,
            sinks=sinks,
            slopes=slopes,
            quantization=self.shape.quantization,
            kv_scales=kv_scales,
            index=seen,
            plan=self._plans[number, q.shape[1]],
            backend=self.backend,
        )
        return out, kept._replace(pages=_replaced(pages, number, own), chosen=chosen)

    def recur(
        self, kept: Kept, given: LayerInput, weights: Mapping[str, jax.Array], tokens: Token
    ) -> tuple[jax.Array, Kept]:
        """Is the layers' `Recur`."""
        pages, taken = kept.pages, kept.taken
        number, memory = self._number_of[given.memory], given.memory
        assert isinstance(memory, StateMemory), "only a state takes tokens in"
        place, states = self._place(number, given), codes_of(pages[number])
        if number in self._state_kernels:
            kernel, plan = self._state_kernels[number]
            out, own = kernel(states, place, plan, weights, tokens)
            return out, kept._replace(pages=_replaced(pages, number, own))
        where = states, place, self._columns(number)
        if self.most_drafted is None:
            out, own = memory.advance(*where, weights, tokens)
            return out, kept._replace(pages=_replaced(pages, number, own))
        out, seen = memory.look_ahead(*where, weights, tokens, self.most_drafted)
        # In stages, a part of the step may have no token of a row, or of any.
        is_here = self.rows.query_lens() > 0

        def stored(x: jax.Array, new: jax.Array) -> jax.Array:
            return x.at[place].set(jnp.where(is_here.reshape(-1, *[1] * (new.ndim - 1)), new, x[place]))

        return out, kept._replace(taken=taken | {number: jax.tree.map(stored, taken[number], seen)})

    def commit(self, pages: KVCachePages, taken: TakenIn, counts: jax.Array) -> KVCachePages:
        """Lets the states of all layers take in the first `counts` i32[R] tokens of each row, of those in `taken`."""
        for number, seen in taken.items():
            memory, columns = self.groups[number].memory, self._columns(number)
            assert isinstance(memory, StateMemory)

            def one_layer(
                place: jax.Array,
                own: jax.Array,
                memory: StateMemory = memory,
                columns: Columns = columns,
                seen: Token = seen,
            ) -> jax.Array:
                return memory.commit(own, place, columns, jax.tree.map(lambda x: x[place], seen), counts)

            pages = _replaced(
                pages, number, jax.lax.fori_loop(0, len(self.groups[number].layers), one_layer, pages[number])
            )
        return pages

    def _place(self, number: int, given: LayerInput) -> jax.Array | int:
        if len(self.groups) == 1 and not self.spec.shares_memory:
            return given.number
        return jnp.asarray(self._places[number])[given.number]

    def _columns(self, number: int) -> Columns:
        return Columns(self._rows_of[number], self.shape.page_size)


def _replaced(pages: KVCachePages, number: int, own: KVPages) -> KVCachePages:
    return (*pages[:number], own, *pages[number + 1 :])
