"""`AdapterFills`: brings an adapter into its slot on the devices. The programs for that are compiled at the start."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from jaxvllm.models.dora import of_one_slot, with_ratios
from jaxvllm.models.expert_lora import EXPERT_DOWN, EXPERT_UP, ExpertLora
from jaxvllm.models.lora import LAYERS, LORA, OUTSIDE, LayerLora, filled
from jaxvllm.models.outer_lora import OuterLora
from jaxvllm.models.params import Params
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from jaxvllm.runtime.recipe import Recipe
from sharding.axis import ModelAxis
from sharding.placement import of_replicas


@dataclass(frozen=True)
class SlotAxes:
    """Tells which axis of each array of adapters is that of slots."""

    layers: LayerLora | None
    experts: ExpertLora | None
    outside: OuterLora | None

    @classmethod
    def of(cls, spec: ModelSpec) -> Self:
        """Takes the rooms of a model, whose layers have equal ones but for their matrices."""
        layers = next((layer.lora for layer in spec.layers if layer.lora is not None), None)
        experts = next((layer.expert_lora for layer in spec.layers if layer.expert_lora is not None), None)
        return cls(layers, experts, spec.lora)

    def in_layers(self, name: str, is_stacked: bool) -> int:
        """Returns that of the array of this name in layers, which may be a stack of those of several."""
        if name.startswith((EXPERT_DOWN, EXPERT_UP)):
            assert self.experts is not None, "there are such arrays where experts have room"
            return self.experts.slot_axis(name, is_stacked)
        assert self.layers is not None, "there are such arrays where matrices have room"
        return self.layers.slot_axis(name, is_stacked)

    def changed(self, change: Callable[..., Any], *trees: Params) -> Params:
        """Returns a tree like `trees` of `change(axis, *nodes)`, for the nodes of each name in these trees."""

        def of_layer(is_stacked: bool, *dicts: Params) -> Params:
            axes = {name: self.in_layers(name, is_stacked) for name in dicts[0]}
            return {name: change(axis, *(one[name] for one in dicts)) for name, axis in axes.items()}

        layers, outside = ([tree[part] for tree in trees] for part in (LAYERS, OUTSIDE))
        is_stacked = isinstance(layers[0], dict)
        own: Params = {}
        if self.outside is not None:
            axes = {name: self.outside.slot_axis(name) for name in outside[0]}
            own = {name: change(axis, *(one[name] for one in outside)) for name, axis in axes.items()}
        of_layers: Any = (
            of_layer(True, *layers) if is_stacked else [of_layer(False, *each) for each in zip(*layers, strict=True)]
        )
        return {LAYERS: of_layers, OUTSIDE: own}


def fill_adapter(slots: Params, one: Params, number: jax.Array, *, axes: SlotAxes) -> Params:
    """Returns the arrays of all slots, with those of one adapter in slot `number` i32[1]. `slots` are donated."""

    def put(axis: int, mine: Any, new: Any) -> Any:
        return jax.tree.map(partial(filled, number=number[0], axis=axis), mine, new)

    return axes.changed(put, slots, one)


class AdapterFills:
    """The compiled programs for one tree of slots."""

    def __init__(
        self, params: Params, spec: ModelSpec, mesh: Mesh, make_program: Callable[[Recipe], jax.stages.Compiled]
    ):
        """Compiles what fills slots. `params` are abstract shapes, with shardings, and have the arrays of all slots."""
        slots, layers = params[LORA], params["layers"]
        axes = SlotAxes.of(spec)

        def like(axis: int, node: Any) -> Any:
            return jax.tree.map(partial(_of_one, spec.num_lora_slots, axis), node)

        self._slots_like, self._like = slots, axes.changed(like, slots)
        arguments = slots, self._like, of_replicas(mesh, (1,), np.int32)
        self._program = make_program(Recipe.changing(partial(fill_adapter, axes=axes), arguments, mesh))

        def compile_ratios() -> jax.stages.Compiled:
            spread = Spread.on(of_one_slot(spec), mesh)
            run = partial(with_ratios, spec=spread.shard, axis=ModelAxis(spread.size))
            return make_program(Recipe.changing(run, (self._like[LAYERS], layers), mesh))

        # Few adapters need it, so that other programs are compiled first.
        self.compile_ratios = cache(compile_ratios)

    def empty(self) -> Any:
        """Returns the arrays of all slots without adapters, for those that a fill which broke off has taken along."""
        return jax.tree.map(lambda like: placed(np.zeros(like.shape, like.dtype), like), self._slots_like)

    def fill(self, params: Params, number: int, arrays: Any, has_magnitudes: bool = False) -> Params:
        """Returns `params` with the arrays of one adapter, on the host, in slot `number`. The slots are donated."""
        one = jax.tree.map(placed, arrays, self._like)
        if has_magnitudes:
            one |= {LAYERS: self.compile_ratios()(one[LAYERS], params["layers"])}
        return params | {LORA: self._program(params[LORA], one, np.array([number], np.int32))}

    @staticmethod
    def packed(one: Any) -> NDArray[np.int32]:
        """Returns the bytes of an adapter's arrays, on the host, for another process: i32[words]."""
        whole = b"".join(array.tobytes() for array in jax.tree.leaves(one))
        return np.frombuffer(whole + bytes(-len(whole) % 4), "<i4")

    def unpacked(self, words: NDArray[np.int32]) -> Any:
        """Returns the arrays of an adapter whose bytes these are."""
        whole, first, arrays = words.astype("<i4").tobytes(), 0, []
        for like in jax.tree.leaves(self._like):
            arrays.append(np.frombuffer(whole, like.dtype, math.prod(like.shape), first).reshape(like.shape))
            first += arrays[-1].nbytes
        return jax.tree.unflatten(jax.tree.structure(self._like), arrays)


def placed(array: NDArray[Any], like: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns an array that all processes have on the host, on those devices of `like` that this one has.

    It is not `device_put`, for which processes would wait for each other.
    """
    assert like.sharding is not None, "an array of a model has a place"
    return jax.make_array_from_callback(like.shape, like.sharding, array.__getitem__)


def _of_one(num_slots: int, axis: int, slots: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the shape of an adapter's array, of that of all slots, which are along `axis`."""
    shape = list(slots.shape)
    shape[axis] //= num_slots
    return jax.ShapeDtypeStruct(tuple(shape), slots.dtype, sharding=slots.sharding)
