"""`AdapterFills`: brings an adapter into its slot on the devices. The program for that is compiled at the start."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from jaxvllm.models.lora import LayerLora, filled
from jaxvllm.models.spec import ModelSpec
from jaxvllm.runtime.recipe import Recipe
from sharding.placement import of_replicas


def fill_adapter(slots: Any, one: Any, number: jax.Array, *, room: LayerLora) -> Any:
    """Returns the arrays of all slots, with those of one adapter in slot `number` i32[1]. `slots` are donated."""

    is_stacked = isinstance(slots, dict)

    def of_layer(mine: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        def put(name: str) -> Any:
            fill = partial(filled, number=number[0], axis=room.slot_axis(name, is_stacked))
            return jax.tree.map(fill, mine[name], new[name])

        return {name: put(name) for name in mine}

    return of_layer(slots, one) if is_stacked else [*map(of_layer, slots, one)]


class AdapterFills:
    """The compiled program for one tree of slots."""

    def __init__(self, slots: Any, spec: ModelSpec, mesh: Mesh, make_program: Callable[[Recipe], jax.stages.Compiled]):
        """Compiles it. `slots` are the arrays of all slots, or their abstract shapes, with shardings."""
        room = next(layer.lora for layer in spec.layers if layer.lora is not None)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), slots)
        self._slots_like = abstract

        is_stacked = isinstance(abstract, dict)

        def of_layer(mine: dict[str, Any]) -> dict[str, Any]:
            axes = {name: room.slot_axis(name, is_stacked) for name in mine}
            return {name: jax.tree.map(partial(_of_one, room, axes[name]), node) for name, node in mine.items()}

        self._like = of_layer(abstract) if is_stacked else [*map(of_layer, abstract)]
        arguments = abstract, self._like, of_replicas(mesh, (1,), np.int32)
        self._program = make_program(Recipe.changing(partial(fill_adapter, room=room), arguments, mesh))

    def empty(self) -> Any:
        """Returns the arrays of all slots without adapters, for those that a fill which broke off has taken along."""
        return jax.tree.map(lambda like: placed(np.zeros(like.shape, like.dtype), like), self._slots_like)

    def fill(self, slots: Any, number: int, one: Any) -> Any:
        """Returns `slots`, which are donated, with the arrays of one adapter, on the host, in slot `number`."""
        return self._program(slots, jax.tree.map(placed, one, self._like), np.array([number], np.int32))

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


def _of_one(room: LayerLora, axis: int, slots: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the shape of an adapter's array, of that of all slots, which are along `axis`."""
    shape = list(slots.shape)
    shape[axis] //= room.num_slots
    return jax.ShapeDtypeStruct(tuple(shape), slots.dtype, sharding=slots.sharding)
