"""`AdapterFills`: brings an adapter into its slot on the devices. The programs for that are compiled at the start."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxvllm.core.lora import LoraAdapter
from jaxvllm.models.dora import of_one_slot, with_ratios
from jaxvllm.models.lora import LAYERS, LORA, OUTSIDE, LayerLora, filled
from jaxvllm.models.params import Params
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from jaxvllm.runtime.recipe import Recipe
from sharding.axis import ModelAxis
from sharding.placement import of_replicas


def fill_adapter(slots: Params, one: Params, number: jax.Array, *, room: LayerLora) -> Params:
    """Returns the arrays of all slots, with those of one adapter in slot `number` i32[1]. `slots` are donated."""

    def put(name: str, is_stacked: bool, mine: Any, new: Any) -> Any:
        fill = partial(filled, number=number[0], axis=room.slot_axis(name, is_stacked))
        return jax.tree.map(fill, mine, new)

    return _by_name(put, slots, one)


def _by_name(change: Callable[..., Any], *trees: Params) -> Params:
    """Returns a tree like `trees` of `change(name, is_stacked, nodes..)`, for the nodes of each name in these trees."""

    def of_dict(is_stacked: bool, *dicts: Params) -> Params:
        return {name: change(name, is_stacked, *(one[name] for one in dicts)) for name in dicts[0]}

    layers = [tree[LAYERS] for tree in trees]
    if isinstance(layers[0], dict):
        of_layers: Any = of_dict(True, *layers)
    else:
        of_layers = [of_dict(False, *each) for each in zip(*layers, strict=True)]
    return {LAYERS: of_layers, OUTSIDE: of_dict(False, *(tree[OUTSIDE] for tree in trees))}


class AdapterFills:
    """The compiled programs for one tree of slots."""

    def __init__(
        self, params: Params, spec: ModelSpec, mesh: Mesh, make_program: Callable[[Recipe], jax.stages.Compiled]
    ):
        """Compiles what fills slots. `params` are abstract shapes, with shardings, and have the arrays of all slots."""
        room = next(layer.lora for layer in spec.layers if layer.lora is not None)
        slots, layers = params[LORA], params["layers"]

        def like(name: str, is_stacked: bool, node: Any) -> Any:
            return jax.tree.map(partial(_of_one, room, is_stacked, name), node)

        self._like = _by_name(like, slots)
        arguments = slots, self._like, of_replicas(mesh, (1,), np.int32)
        self._program = make_program(Recipe.changing(partial(fill_adapter, room=room), arguments, mesh))

        def compile_ratios() -> jax.stages.Compiled:
            spread = Spread.on(of_one_slot(spec), mesh)
            run = partial(with_ratios, spec=spread.shard, axis=ModelAxis(spread.size))
            return make_program(Recipe.changing(run, (self._like[LAYERS], layers), mesh))

        # Few adapters need it, so that other programs are compiled first.
        self.compile_ratios = cache(compile_ratios)

    def fill(self, params: Params, number: int, adapter: LoraAdapter) -> Params:
        """Returns `params` with an adapter, whose arrays are on the host, in slot `number`. The slots are donated."""
        one = jax.tree.map(lambda array, like: jax.device_put(array, like.sharding), adapter.arrays, self._like)
        if adapter.has_magnitudes:
            one |= {LAYERS: self.compile_ratios()(one[LAYERS], params["layers"])}
        return params | {LORA: self._program(params[LORA], one, np.array([number], np.int32))}


def _of_one(room: LayerLora, is_stacked: bool, name: str, slots: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the shape of an adapter's array of that name, of that of all slots."""
    shape = list(slots.shape)
    shape[room.slot_axis(name, is_stacked)] //= room.num_slots
    return jax.ShapeDtypeStruct(tuple(shape), slots.dtype, sharding=slots.sharding)
