"""The sizes of an engine's KV cache and slot table, and the abstract arrays that follow from them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, Sharding

from jaxvllm.core.kv_cache import GroupSize
from jaxvllm.core.page_groups import windowed_pages
from jaxvllm.core.page_pool import pages_for
from jaxvllm.core.state_group import MOST_STATES
from jaxvllm.models.layer_loops import known_windows
from jaxvllm.models.layer_memory import PAGE_AXES, LayerMemory
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from jaxvllm.runtime.expert_loads import LoadShape
from jaxvllm.runtime.side_rows import SideShape
from jaxvllm.runtime.slot_fields import SlotSizes
from jaxvllm.runtime.state import DeviceState, state_shapes
from pallas_kernels.backend import Backend
from pallas_kernels.ragged_paged_attention import NO_WINDOW, AbstractPages, KVPages, KVQuantization
from sharding.placement import of_replicas, place
from sharding.rules import DATA

# The logical axes of a proposer's pages, [L, P, K, S, W].
DRAFT_PAGE_AXES: tuple[str | None, ...] = (None, "pages", None, None, None)
# The pages of each group, and after them those of the proposer, if it has any.
type KVCachePages = tuple[KVPages, ...]
type AbstractCachePages = tuple[AbstractPages, ...]


def array_owners(pages: KVCachePages | AbstractCachePages) -> tuple[int, ...]:
    """Returns for each array of the cache, in the order of its leaves, the number of the pages that it belongs to."""
    return tuple(number for number, of in enumerate(pages) for _ in jax.tree.leaves(of))


def array_groups(pages: KVCachePages | AbstractCachePages, num_groups: int) -> tuple[int, ...]:
    """Returns for each array the group whose page numbers it has. A proposer's have those of the first group."""
    return tuple(owner if owner < num_groups else 0 for owner in array_owners(pages))


@dataclass(frozen=True)
class LayerGroup:
    """Layers that keep alike, and so in the same pages."""

    layers: tuple[int, ...]
    memory: LayerMemory  # whose window is None where no request outgrows it

    @property
    def window(self) -> int | None:
        """The last positions that the layers see; None is all."""
        return self.memory.window

    def size(self, num_pages: int) -> GroupSize:
        """Returns what the host is to know of the group when it has so many pages, the trash page included."""
        return GroupSize(num_pages, self.window, self.memory.keeps_state)


@dataclass(frozen=True)
class DraftCache:
    """The arrays that a proposer keeps: KV of some layers for every token, and features of the last token of each slot.

    Its pages have the numbers of those of the first group. Every device of a replica has all of it.
    """

    num_layers: int = 0
    memory: LayerMemory | None = None  # of each of these layers
    num_features: int = 0


@dataclass(frozen=True)
class CacheShape:
    """The sizes of the KV cache and the slot table.

    `num_pages` are those of the first group, which sees most; the other groups' follow from it by this rule. A windowed
    group has pages for as many requests of full length as the first group has, and no fewer than half of what it would
    have if all groups had equally many pages for the same memory: then requests that are shorter than the window, which
    need as many pages of each group, are at least half as many as without groups.
    """

    num_pages: int  # the trash page included
    page_size: int
    num_slots: int
    max_pages: int  # of one slot
    dtype: jnp.dtype  # of keys and values that have no quantization
    step_tokens: int  # that a step may compute of one prompt
    draft: DraftCache | None = None
    has_index: bool = False  # whether the slot state has a suffix index
    has_drafts: bool = False  # whether there is a proposer
    side: SideShape | None = None  # of the store of side inputs
    counts_loads: bool = False  # whether the slot state counts how many tokens have chosen each expert
    quantization: KVQuantization | None = None  # of keys and values; for those of drafts see `draft_quantization`

    def groups(self, spec: ModelSpec) -> tuple[LayerGroup, ...]:
        """Returns the groups of the model's layers, the one that sees most first.

        Layers that keep a state come last. A layer that keeps several things is in as many groups. Layers whose window
        no request outgrows see all. Layers that read another's memory are in no group. Where the step reads windows
        while it runs, so that a layer's group is not known when it is compiled, all layers are one group. Raises
        NotImplementedError where these keep different things.
        A stage has the groups of its model, of which some may have none of its layers.
        """
        of_model = self._groups_of(spec.whole)
        if spec.part_of is None:
            return of_model
        layers: list[list[int]] = [[] for _ in of_model]
        numbers = {
            memory: number
            for number, group in enumerate(of_model)
            for layer in group.layers
            for memory in spec.whole.layers[layer].memories
            if memory.seeing(group.window) == group.memory
        }
        for number, layer in enumerate(spec.layers):
            for memory in layer.memories if layer.reads is None else ():
                layers[numbers[memory]].append(number)
        return tuple(replace(group, layers=tuple(own)) for group, own in zip(of_model, layers, strict=True))

    def _groups_of(self, spec: ModelSpec) -> tuple[LayerGroup, ...]:
        """Returns the groups of all layers of a model."""
        windows = known_windows(spec)
        kept = {number: layer.memories for number, layer in enumerate(spec.layers) if layer.reads is None}
        if None in windows:
            seen = {memory.seeing(None) for memories in kept.values() for memory in memories}
            if len(seen) > 1 or spec.shares_memory:
                raise NotImplementedError("the windows of layers that keep different things must have a pattern")
            return (LayerGroup(tuple(kept), seen.pop()),)
        longest = self.max_pages * self.page_size
        layers: dict[LayerMemory, list[int]] = {}
        for number, memories in kept.items():
            window = windows[number]
            sees_all = window is None or window >= longest
            for memory in memories:
                layers.setdefault(memory.seeing(None if sees_all else window), []).append(number)
        order = sorted(layers, key=lambda memory: (memory.keeps_state, -(memory.window or NO_WINDOW)))
        return tuple(LayerGroup(tuple(layers[memory]), memory) for memory in order)

    def group_sizes(self, spec: ModelSpec) -> tuple[GroupSize, ...]:
        """Returns the number of pages and the window of each group."""
        first, *others = self.groups(spec)
        usable, of_first, *of_others = self.num_pages - 1, *(self._page_bytes(group) for group in (first, *others))
        half = usable * of_first // (2 * of_first + sum(of_others))
        sizes = [first.size(self.num_pages)]
        for group in others:
            longest = -(-usable * self.most_pages(group.memory) // self.most_pages(first.memory))
            one = self.most_pages(group.memory, self.step_tokens)
            sizes.append(group.size(1 + min(max(longest, half, one), usable)))
        return tuple(sizes)

    def most_pages(self, memory: LayerMemory, num_tokens: int = 1) -> int:
        """Returns the most pages of a group that one request holds while a step computes so many of its tokens."""
        if memory.keeps_state:
            return min(self.max_pages, MOST_STATES)
        if memory.window is None:
            return self.max_pages
        return min(self.max_pages, windowed_pages(memory.window, num_tokens, self.page_size))

    def useful_pages(self, spec: ModelSpec) -> int:
        """Returns how many pages of the first group all slots could use at most, with the trash page."""
        return self.num_slots * self.most_pages(self.groups(spec)[0].memory, self.step_tokens) + 1

    def num_requests(self, spec: ModelSpec, num_tokens: int) -> int:
        """Returns how many requests of so many tokens have room, if nearly all of them decode."""
        pages = pages_for(num_tokens, self.page_size)
        sized = zip(self.groups(spec), self.group_sizes(spec), strict=True)
        return min((size.num_pages - 1) // min(pages, self.most_pages(group.memory)) for group, size in sized)

    def pages_of(self, spec: ModelSpec, num_tokens: int) -> int:
        """Returns how many pages of the first group a request of so many tokens holds at most."""
        first = self.groups(spec)[0].memory
        return min(pages_for(num_tokens, self.page_size), self.most_pages(first, self.step_tokens))

    def pages(self, spec: ModelSpec, backend: Backend, mesh: Mesh) -> AbstractCachePages:
        """Returns the abstract pages of each group of a model spread over `mesh`, as `backend` lays them out.

        The pages of drafts follow. Each replica of the mesh has so many pages of its own, one replica after the other.
        """
        sharding, of_drafts = place(mesh)(PAGE_AXES), place(mesh)(DRAFT_PAGE_AXES)
        spread = Spread.on(spec, mesh)
        counts = [count * spread.stages for count in self.stage_room(spread)]
        of_groups = self._structs(spec, spread.whole, counts, backend)
        placed = [(struct, sharding) for struct in of_groups]
        placed += [(struct, of_drafts) for struct in self._draft_structs(backend)]

        def of_replicas(x: jax.ShapeDtypeStruct, where: Sharding) -> jax.ShapeDtypeStruct:
            layers, count, *rest = x.shape
            return jax.ShapeDtypeStruct((layers, mesh.shape[DATA] * count, *rest), x.dtype, sharding=where)

        return tuple(jax.tree.map(partial(of_replicas, where=where), struct) for struct, where in placed)

    def device_bytes(self, spread: Spread, backend: Backend) -> int:
        """Returns how many bytes of each device all pages take."""
        structs = self._structs(spread.spec, spread.shard, self.stage_room(spread), backend)
        return sum(map(_num_bytes, structs + self._draft_structs(backend)))

    def empty_share(self, spread: Spread, backend: Backend) -> float:
        """Returns which part of those bytes, on average, is for layers that only other stages have."""
        counts = self.stage_room(spread)
        each = list(map(_num_bytes, self._structs(spread.spec, spread.shard, counts, backend)))
        used = [len(group.layers) / spread.stages for group in self.groups(spread.spec)]
        own = sum(of * some / count for of, some, count in zip(each, used, counts, strict=True))
        return 1 - own / sum(each)

    def stage_room(self, spread: Spread) -> list[int]:
        """Returns for how many layers of each group a stage has pages: as many as the stage that has most of them."""
        each = [self.groups(part) for part in spread.parts]
        return [max(len(group.layers) for group in of_stages) for of_stages in zip(*each, strict=True)]

    def with_pages(self, num_pages: int) -> "CacheShape":
        return replace(self, num_pages=num_pages)

    def of_programs(self, spec: ModelSpec) -> "CacheShape":
        """Returns the shape as a step knows it.

        Only windows make `step_tokens` matter. Where there are none, engines with different token budgets share the
        programs of the buckets that they have in common.
        """
        return self if any(group.window for group in self.groups(spec)) else replace(self, step_tokens=1)

    def _structs(
        self, spec: ModelSpec, spread_out: ModelSpec, counts: Sequence[int], backend: Backend
    ) -> list[AbstractPages]:
        """Returns the pages of `counts` layers of each group, with the heads that a `Spread` of `spec` made of them."""
        return [
            group.memory.pages(count, size.num_pages, self.page_size, self.dtype, backend, self.quantization)
            for group, size, count in zip(self.groups(spread_out), self.group_sizes(spec), counts, strict=True)
        ]

    def _draft_structs(self, backend: Backend) -> list[AbstractPages]:
        draft = self.draft
        if draft is None or draft.memory is None:
            return []
        sizes = draft.num_layers, self.num_pages, self.page_size
        return [draft.memory.pages(*sizes, self.dtype, backend, self.draft_quantization)]

    @property
    def draft_quantization(self) -> KVQuantization | None:
        """The quantization of the keys and values of drafts, which have no calibrated scales.

        It is that of the model's, unless its codes need such scales.
        """
        return None if self.quantization is None or self.quantization.needs_scales else self.quantization

    def sizes(self, spec: ModelSpec) -> SlotSizes:
        """Returns what the slot state depends on."""
        windows = tuple(group.window for group in self.groups(spec))
        num_features = None if self.draft is None else self.draft.num_features
        sizes = (self.num_slots, self.max_pages, self.page_size, spec.vocab_size)
        drafts = num_features, self.has_index, self.has_drafts
        return SlotSizes(*sizes, windows, *drafts, self.side, self.loads(spec), spec.has_lora)

    def loads(self, spec: ModelSpec) -> LoadShape | None:
        """Returns the shape of the loads of experts, or None where nobody counts them."""
        return LoadShape.of(spec) if self.counts_loads else None

    def state(self, spec: ModelSpec, mesh: Mesh) -> DeviceState:
        """Returns the abstract slot states of the replicas of `mesh`, one after the other in each array.

        Every device of a replica has the whole state of it.
        """
        return jax.tree.map(lambda x: of_replicas(mesh, x.shape, x.dtype), state_shapes(self.sizes(spec)))

    def _page_bytes(self, group: LayerGroup) -> int:
        """Returns the bytes of a page of all layers of a group."""
        return len(group.layers) * group.memory.page_bytes(self.page_size, self.dtype, self.quantization)


def _num_bytes(pages: AbstractPages) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pages))
