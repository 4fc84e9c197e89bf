"""Builds the tree of parameters on devices. Each device's shard of each array is read alone, one layer at a time."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.experts import first_slots
from jaxvllm.models.forms import Forms
from jaxvllm.models.params import Layout, Params, StackLayers, build, declaration, most
from jaxvllm.models.spread import Spread
from jaxvllm.models.tiling import Box, Fill, Tile, aligned_zeros, spread_boxes, tiled
from sharding.placement import place

# Returns how an array, or a stack of layers, is split over devices.
ShardingOf = Callable[[ParamDecl], NamedSharding]
# Returns the function that fills the array of that name, of a layer or, with None, outside the layers.
Weights = Callable[[str, int | None], Fill]
# Yields the array of that name, of a layer or, with None, outside the layers. It comes in one part or in several that
# follow each other along the first dimension. The parts are on their devices and in their dtype already.
Parts = Callable[[str, ParamDecl, int | None], Iterator[jax.Array]]


def read_shards(weights: Weights, spread: Spread, layout: Layout, dtype: DTypeLike, sharding_of: ShardingOf) -> Parts:
    """Reads the arrays of `spread.whole` from `weights` of `spread.spec`, as far as this process's devices hold them.

    The host has one array of one layer at a time; gate and up of a stacked layer come one after the other. CPU devices
    use the host's array without a copy.
    """

    def parts(name: str, whole: ParamDecl, layer: int | None) -> Iterator[jax.Array]:
        stored, wanted = weights(name, layer), whole.dtype_in(dtype)
        boxes = spread_boxes(declaration(spread.spec, name, layer), whole)
        fill = tiled([Tile(box, stored, origin) for box, origin in boxes])
        for part in _halves(whole) if layout == "stacked" and layer is not None else [Box.whole(whole.shape)]:

            def shard(index: tuple[slice, ...] | None, part: Box = part) -> np.ndarray:
                assert index is not None
                box = Box.of_index(index, part.shape)
                out = aligned_zeros(box.shape, wanted)
                fill(out, box.moved(part.start).start)
                return out

            yield jax.make_array_from_callback(part.shape, sharding_of(whole), shard, wanted)

    return parts


def _halves(decl: ParamDecl) -> Iterator[Box]:
    """Yields gate and up apart, because they are two tensors, and any other array as a whole."""
    axis, size = decl.axes[0], decl.shape[0]
    step = 1 if axis is None and len(decl.shape) > 1 else size
    for first in range(0, size, step):
        yield Box((first, *(0 for _ in decl.shape[1:])), (step, *decl.shape[1:]))


def sharding_on(mesh: Mesh) -> ShardingOf:
    """Returns how the arrays of a model are split over `mesh`."""
    sharding = place(mesh)
    return lambda decl: sharding(decl.axes)


def assemble(
    spread: Spread, stage: int, layout: Layout, dtype: DTypeLike, sharding_of: ShardingOf, parts: Parts, forms: Forms
) -> Params:
    """Builds the tree of a stage of `spread` from its arrays. Only those of a stacked layer may come in several parts.

    Each part is in its place before the next one is read, because an unfinished transfer or update keeps its memory.
    """

    def parts_of(name: str, decl: ParamDecl, layer: int | None) -> Iterator[jax.Array]:
        if decl.storage != "slots":
            return parts(name, decl, layer)
        return iter([jax.device_put(first_slots(*decl.shape), sharding_of(decl))])

    def leaf(name: str, decl: ParamDecl, layers: StackLayers | None) -> Any:
        if layers is None or layout == "separate":
            [array] = parts_of(name, decl, layers[0][0] if layers else None)
            return jax.block_until_ready(forms.kept(array, decl, layers is not None, sharding_of))

        def zeros(decl: ParamDecl) -> jax.Array:
            whole = decl.stacked(most(layers))
            made = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharding_of(whole))
            array: jax.Array = made(whole.shape, whole.dtype_in(dtype))
            return array

        stack = forms.node(decl, True, zeros)
        held = jax.tree.leaves(stack)
        puts = [jax.jit(_put, donate_argnums=0, out_shardings=array.sharding) for array in held]
        for i, layer in enumerate(layers[stage]):
            first = 0
            for part in parts_of(name, decl, layer):
                kept = jax.tree.leaves(forms.kept(part, decl, True, sharding_of))
                at = np.int32(i), np.int32(first)
                held = [put(array, new, *at) for put, array, new in zip(puts, held, kept, strict=True)]
                jax.block_until_ready(held)
                first += len(part)
        return jax.tree.unflatten(jax.tree.structure(stack), held)

    return build(spread, layout, leaf)


def joined(stages: Sequence[Params], like: Params) -> Params:
    """Returns the tree of all stages, shaped and split as `like`, of those that this process has devices of."""

    def join(whole: jax.ShapeDtypeStruct, *arrays: jax.Array) -> jax.Array:
        shards = [shard.data for array in arrays for shard in array.addressable_shards]
        assert whole.sharding is not None, "an array of a model has a place"
        return jax.make_array_from_single_device_arrays(whole.shape, whole.sharding, shards)

    tree: Params = jax.tree.map(join, like, *stages)
    return tree


def _put(stack: jax.Array, part: jax.Array, i: jax.Array, first: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(stack, part[None], (i, first, *(0 for _ in part.shape[1:])))
