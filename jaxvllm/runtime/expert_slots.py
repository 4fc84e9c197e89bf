"""The slots of experts on the devices: which expert is in each, and the program that moves experts between two steps.

Arrays of experts have their slots as the first dimension, whatever their form is, and the devices share these out.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import batched
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxvllm.core.expert_placement import NOTHING, Ints, SlotChange, exchanges, experts_in, slots_of
from jaxvllm.models.expert_lora import EXPERT_DOWN, EXPERT_UP
from jaxvllm.models.experts import SLOTS, ExpertsFfn, first_slots
from jaxvllm.models.lora import LAYERS, LORA, layers_with_lora
from jaxvllm.models.params import LayerStack, Params, declare_layer, layer_stacks, most
from jaxvllm.models.spread import Spread
from jaxvllm.runtime.recipe import Recipe
from sharding.axis import ModelAxis, ReplicaAxis, StageAxis
from sharding.placement import EVERYWHERE
from sharding.rules import DATA, MODEL, STAGE

# Changes that one call of the program makes: each is a turn of a loop, so that the calls are few.
CHANGE_BATCH = 32
NO_SLOT = -1


class ExpertSlots:
    """Knows the expert in each slot of each layer, and moves them. Parameters are the caller's, who passes them in."""

    def __init__(self, spread: Spread, params: Params, mesh: Mesh, make_program: Callable[[Recipe], Any]):
        """Compiles the program for each kind of layer. `params` are those of `spread.whole` on `mesh`, as loaded."""
        ffns = {number: layer.ffn for number, layer in enumerate(spread.whole.layers)}
        self.ffns: Mapping[int, ExpertsFfn] = {
            number: ffn for number, ffn in ffns.items() if isinstance(ffn, ExpertsFfn) and ffn.has_slots
        }
        self._axes = ReplicaAxis(mesh.shape[DATA]), ModelAxis(mesh.shape[MODEL])
        self.num_devices = mesh.shape[DATA] * mesh.shape[MODEL]  # that have slots: those of all replicas of the mesh
        self.held: dict[int, Ints] = {}  # the expert in each slot of each layer, i32[slots]
        self._spread, self._whole = spread, spread.whole
        self._everywhere = NamedSharding(mesh, EVERYWHERE)
        self.begin()
        self._programs: dict[ExpertsFfn, Any] = {}
        for number, ffn in self.ffns.items():
            if ffn not in self._programs:
                self._programs[ffn] = make_program(self._recipe(params, number, mesh))

    def begin(self) -> None:
        """Takes note that the experts are in the slots in which they are loaded."""
        for number, ffn in self.ffns.items():  # not read: devices of another process may have the arrays of a stage
            assert ffn.most_copies is not None, "the layer has slots"
            self.held[number] = experts_in(first_slots(ffn.router.num_experts, ffn.most_copies), ffn.num_slots)

    def read(self, params: Params) -> None:
        """Reads from parameters which expert is in which slot. All devices must be those of this process."""
        for number, ffn in self.ffns.items():
            key, place = self._where(params, number)[SLOTS]
            table = np.asarray(_layers(params, number)[key])
            self.held[number] = experts_in(table if place is None else table[place], ffn.num_slots)

    def moved(self, params: Params, number: int, wanted: Ints) -> Params:
        """Returns parameters whose layer `number` has the experts i32[slots] that are `wanted` in its slots.

        Steps that were dispatched compute with those before. The arrays of experts are donated, and the program has
        room for four experts at most beside them (compiled for H200). Nothing is compiled.
        """
        ffn, where = self.ffns[number], self._where(params, number)
        names = self._names(number)
        layers = _layers(params, number)
        arrays = [layers[where[name][0]] for name in names]
        places = np.array([where[name][1] or 0 for name in names], np.int32)
        for some in batched(exchanges(self.held[number], wanted), CHANGE_BATCH):
            arrays = self._programs[ffn](arrays, places, _packed(some))
        self.held[number] = wanted
        changed = {where[name][0]: array for name, array in zip(names, arrays, strict=True)}
        key, place = where[SLOTS]
        # Not `device_put`, which has processes compare the arrays that they give.
        table, like = self._table(number, key, place, layers[key].shape), layers[key]
        changed[key] = jax.make_array_from_callback(like.shape, like.sharding, table.__getitem__)
        return _with_layer(params, number, layers | changed)

    def arranged(self, adapter: Any) -> Any:
        """Returns the arrays of one adapter, on the host, with those of each expert in its present slots.

        As it was read, they are in the slots in which the experts of weights are loaded. What a slot without an expert
        has is arbitrary.
        """
        params = {"layers": adapter[LAYERS]}
        for number in self.ffns:
            where, own = self._where(params, number), _layers(params, number)
            keys = dict(where[name] for name in self._names(number) if name.startswith((EXPERT_DOWN, EXPERT_UP)))
            order = np.maximum(self.held[number], 0)
            changed = {
                key: jax.tree.map(partial(_reordered, order=order, place=at), own[key]) for key, at in keys.items()
            }
            params = _with_layer(params, number, own | changed)
        return adapter | {LAYERS: params["layers"]}

    def _table(self, number: int, key: str, place: int | None, shape: tuple[int, ...]) -> Ints:
        """Returns the array of slots of a layer, or those of all layers in its stack."""

        def of(layer: int) -> Ints:
            ffn = self.ffns[layer]
            assert ffn.most_copies is not None, "the layer has slots"
            return slots_of(self.held[layer], ffn.router.num_experts, ffn.most_copies)

        if place is None:
            return of(number)
        table, stack = np.full(shape, NOTHING, np.int32), layer_stacks(self._whole)[key]
        for layer in stack.layers:
            table[self._place(stack, layer)] = of(layer)
        return table

    def _names(self, number: int) -> list[str]:
        """Returns the names of the arrays whose first dimension are slots."""
        return [name for name, decl in declare_layer(self._whole, number).items() if decl.axes[0] == "experts"]

    def _where(self, params: Params, number: int) -> dict[str, tuple[str, int | None]]:
        """Returns the key of each array of a layer with slots, and the layer's place in it if it is a stack."""
        names = [*self._names(number), SLOTS]
        if isinstance(params["layers"], list):
            return {name: (name, None) for name in names}
        return {
            stack.name: (key, self._place(stack, number))
            for key, stack in layer_stacks(self._whole).items()
            if stack.name in names and number in stack.layers
        }

    def _place(self, stack: LayerStack, number: int) -> int:
        """Returns the place of a layer in a stack, in which each stage has room for as many layers."""
        of_stages = self._spread.of_stages(stack.layers)
        [place] = [stage * most(of_stages) + own.index(number) for stage, own in enumerate(of_stages) if number in own]
        return place

    def _recipe(self, params: Params, number: int, mesh: Mesh) -> Recipe:
        where, names = self._where(params, number), self._names(number)
        held = [_layers(params, number)[where[name][0]] for name in names]
        arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), held)
        numbers = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._everywhere)
            for x in (np.zeros(len(names), np.int32), _packed(()))
        ]
        stages = StageAxis(mesh.shape[STAGE])
        run = partial(change_slots, axes=self._axes, stages=stages, is_stacked=isinstance(params["layers"], dict))
        out_specs = jax.tree.map(lambda x: x.sharding.spec, arrays) if mesh.size > 1 else None
        return Recipe(run, (arrays, *numbers), mesh, donates=(0,), out_specs=out_specs)


def _layers(params: Params, number: int) -> Params:
    """Returns the arrays of a layer and of its adapters, or those of all layers where they are stacked."""
    layers = layers_with_lora(params)
    found: Params = layers[number] if isinstance(layers, list) else layers
    return found


def _with_layer(params: Params, number: int, changed: Params) -> Params:
    """Returns parameters with those arrays that `_layers` has returned, and that have changed since."""

    def put(layers: Any) -> Any:
        if isinstance(layers, list):
            return [put(layer) if i == number else layer for i, layer in enumerate(layers)]
        return {name: changed[name] for name in layers}

    own = {"layers": put(params["layers"])}
    if LORA in params:
        own[LORA] = params[LORA] | {LAYERS: put(params[LORA][LAYERS])}
    return params | own


def _reordered(array: np.ndarray, order: Ints, place: int | None) -> np.ndarray:
    """Returns an array [slots, ..] in another order of the slots, or a stack of which layer `place` has that order."""
    if place is None:
        return array[order]
    copy = array.copy()
    copy[place] = array[place, order]
    return copy


def _packed(changes: Iterable[SlotChange]) -> Ints:
    """Returns changes for `change_slots`, i32[CHANGE_BATCH, 3]: the source, and the slots that it and `to` go to."""
    packed = np.full((CHANGE_BATCH, 3), NO_SLOT, np.int32)
    for row, one in zip(packed, changes, strict=False):
        row[:] = one.source, one.to, one.source if one.is_swap else NO_SLOT
    return packed


def change_slots(
    arrays: list[Any],
    places: jax.Array,
    changes: jax.Array,
    *,
    axes: tuple[ReplicaAxis, ModelAxis],
    stages: StageAxis,
    is_stacked: bool,
) -> list[Any]:
    """Makes changes of slots i32[CHANGE_BATCH, 3], one after the other, in the arrays of one layer, which are donated.

    arrays  # trees of [slots, ..], or of stacks [L, slots, ..] in which the layer has `places` i32[arrays]
    Inside shard_map each device has its share of the slots. It sends two experts and takes at most two in a change.
    Each stage has its part of a stack, and those without the layer exchange zeros and change nothing.
    """
    held = arrays if is_stacked else jax.tree.map(lambda x: x[None], arrays)

    def one(i: jax.Array, held: list[Any]) -> list[Any]:
        def change(place: jax.Array, tree: Any) -> Any:
            return jax.tree.map(lambda x: _changed(x, place - stages.first(len(x)), changes[i], *axes), tree)

        return [change(places[number], tree) for number, tree in enumerate(held)]

    count = (changes[:, 0] != NO_SLOT).sum(dtype=jnp.int32)
    held = jax.lax.fori_loop(0, count, one, held)
    return held if is_stacked else jax.tree.map(lambda x: x[0], held)


def _changed(x: jax.Array, place: jax.Array, change: jax.Array, replicas: ReplicaAxis, axis: ModelAxis) -> jax.Array:
    """Returns x [L, slots of this device, ..] after one change in layer `place`, which may be none of these."""
    num_slots = x.shape[1]
    first = replicas.first(axis.size * num_slots) + axis.first(num_slots)
    is_own = (place >= 0) & (place < len(x))
    place = jnp.clip(place, 0, len(x) - 1)
    source, to, back = change
    corner = (0,) * (x.ndim - 2)

    def at(slot: jax.Array) -> tuple[jax.Array, tuple[Any, ...]]:
        own = slot - first
        return is_own & (own >= 0) & (own < num_slots), (place, jnp.clip(own, 0, num_slots - 1), *corner)

    def read(slot: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, tuple[Any, ...]]:
        is_here, index = at(slot)
        return is_here, jax.lax.dynamic_slice(x, index, (1, 1, *x.shape[2:])), index

    def sent(slot: jax.Array) -> jax.Array:
        is_here, expert, _ = read(slot, x)
        return jnp.where(is_here, expert, jnp.zeros_like(expert))

    # Each is of one device, so that the sum is exact.
    experts = replicas.sum(axis.sum(jnp.stack([sent(source), sent(to)])))
    for slot, expert in zip((to, back), experts, strict=True):
        is_here, before, index = read(slot, x)
        x = jax.lax.dynamic_update_slice(x, jnp.where(is_here, expert, before), index)
    return x
