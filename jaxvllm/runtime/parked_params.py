"""Weights that are not on the devices: copies of them in the host's memory, or only what they were like."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Sharding
from numpy.typing import NDArray

from jaxvllm.models.params import Params

# The first and the last element of a part of an array, in each dimension.
type _Place = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class ParkedArray:
    """Stands for an array in a tree of weights, with its shape, dtype and sharding. It is a leaf of the tree."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Sharding
    parts: Mapping[_Place, NDArray[np.generic]] | None  # those of this process's devices; None: they were dropped

    @classmethod
    def of(cls, array: jax.Array, *, keeps: bool) -> Self:
        """Copies `array` to the host, or `keeps` nothing of it. It does not delete the array."""
        parts: dict[_Place, NDArray[np.generic]] = {}
        if keeps:
            for shard in array.addressable_shards:  # devices may have equal parts
                place = _place(shard.index, array.shape)
                if place not in parts:
                    # A copy: on a CPU `asarray` would look into the memory of the array and keep it alive.
                    parts[place] = np.array(shard.data)
        return cls(array.shape, array.dtype, array.sharding, parts if keeps else None)

    def restored(self) -> jax.Array:
        """Returns the array on its devices, with the same bits."""
        assert self.parts is not None, "the array was dropped"
        parts = self.parts
        return jax.make_array_from_callback(
            self.shape, self.sharding, lambda index: parts[_place(index, self.shape)], dtype=self.dtype
        )


def parked(params: Params, *, keeps: bool) -> Params:
    """Returns the same tree with a `ParkedArray` for each array."""
    if keeps:
        for array in jax.tree.leaves(params):
            array.copy_to_host_async()  # all at once, and not one after the other
    tree: Params = jax.tree.map(lambda x: ParkedArray.of(x, keeps=keeps), params)
    return tree


def restored(params: Params) -> Params:
    """Returns the same tree with all arrays on their devices, where some may be already."""
    tree: Params = jax.tree.map(lambda x: x.restored() if isinstance(x, ParkedArray) else x, params)
    return tree


def are_parked(params: Params) -> bool:
    """Returns whether the weights are not on the devices."""
    return any(isinstance(leaf, ParkedArray) for leaf in jax.tree.leaves(params))


def are_dropped(params: Params) -> bool:
    """Returns whether there are no weights at all, so that others must take their place."""
    return any(isinstance(leaf, ParkedArray) and leaf.parts is None for leaf in jax.tree.leaves(params))


def _place(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> _Place:
    assert index is not None, "every device has a part"
    ranges = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in ranges)
