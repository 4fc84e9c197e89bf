"""`AdapterFills`: brings an adapter into its slot on the devices. The program for that is compiled at the start."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxvllm.models.lora import LayerLora, filled
from jaxvllm.models.spec import ModelSpec
from jaxvllm.runtime.recipe import Recipe
from sharding.placement import of_replicas


def fill_adapter(slots: Any, one: Any, number: jax.Array, *, room: LayerLora) -> Any:
    """Returns the arrays of all slots, with those of one adapter in slot `number` i32[1]. `slots` are donated."""

    def of_layer(mine: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        def put(name: str) -> Any:
            fill = partial(filled, number=number[0], axis=room.slot_axis(name))
            return jax.tree.map(fill, mine[name], new[name])

        return {name: put(name) for name in mine}

    return of_layer(slots, one) if isinstance(slots, dict) else [*map(of_layer, slots, one)]


class AdapterFills:
    """The compiled program for one tree of slots."""

    def __init__(self, slots: Any, spec: ModelSpec, mesh: Mesh, make_program: Callable[[Recipe], jax.stages.Compiled]):
        """Compiles it. `slots` are the arrays of all slots, or their abstract shapes, with shardings."""
        room = next(layer.lora for layer in spec.layers if layer.lora is not None)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), slots)

        def of_layer(mine: dict[str, Any]) -> dict[str, Any]:
            return {name: jax.tree.map(partial(_of_one, room, name), node) for name, node in mine.items()}

        self._like = of_layer(abstract) if isinstance(abstract, dict) else [*map(of_layer, abstract)]
        arguments = abstract, self._like, of_replicas(mesh, (1,), np.int32)
        self._program = make_program(Recipe.changing(partial(fill_adapter, room=room), arguments, mesh))

    def fill(self, slots: Any, number: int, one: Any) -> Any:
        """Returns `slots`, which are donated, with the arrays of one adapter, on the host, in slot `number`."""
        on_devices = jax.tree.map(lambda array, like: jax.device_put(array, like.sharding), one, self._like)
        return self._program(slots, on_devices, np.array([number], np.int32))


def _of_one(room: LayerLora, name: str, slots: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the shape of an adapter's array of that name, of that of all slots."""
    shape = list(slots.shape)
    shape[room.slot_axis(name)] //= room.num_slots
    return jax.ShapeDtypeStruct(tuple(shape), slots.dtype, sharding=slots.sharding)
