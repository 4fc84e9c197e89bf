"""Builds the tree of parameters on devices. Each device's shard of each array is read alone, one layer at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.experts import first_slots
from jaxvllm.models.forms import Forms, Matrix
from jaxvllm.models.forms.choice import MatrixKey
from jaxvllm.models.forms.few_bits import Elements, FewBits
from jaxvllm.models.large_pages import kept_zeros
from jaxvllm.models.params import Layout, Params, StackLayers, build, declaration, first_layer, most
from jaxvllm.models.spread import Spread
from jaxvllm.models.tiling import Box, Fill, Tile, aligned_zeros, by_threads, spread_boxes, tiled
from sharding.placement import place

# Threads put so many elements of what is stored in order. Most of it is NumPy's, without Python's lock.
_PIECE = 1 << 19

# Returns how an array, or a stack of layers, is split over devices.
ShardingOf = Callable[[ParamDecl], NamedSharding]
# Returns the function that fills the array of that name, of a layer or, with None, outside the layers.
Weights = Callable[[str, int | None], Fill]
# Makes zeros of a shape and a dtype.
Zeros = Callable[[tuple[int, ...], np.dtype], np.ndarray]
# Returns what is stored of the elements of that matrix.
StoredElements = Callable[[str, int | None], Elements]
# Yields the array of that name, of a layer or, with None, outside the layers. It comes in one part or in several that
# follow each other along the first dimension. The parts are on their devices and in their dtype already, and those that
# come as a `Matrix` are in their form.
Parts = Callable[[str, ParamDecl, int | None], Iterator[jax.Array | Matrix]]


def read_shards(weights: Weights, spread: Spread, layout: Layout, dtype: DTypeLike, sharding_of: ShardingOf) -> Parts:
    """Reads the arrays of `spread.whole` from `weights` of `spread.spec`, as far as this process's devices hold them.

    The host has one array of one layer at a time; gate and up of a stacked layer come one after the other. CPU devices
    use the host's array without a copy.
    """

    def parts(name: str, whole: ParamDecl, layer: int | None) -> Iterator[jax.Array]:
        fill = spread_fill(spread, name, whole, layer, weights(name, layer))
        for part in _parts(whole, layout, layer):
            yield _read(fill, whole, part, whole.dtype_in(dtype), sharding_of, aligned_zeros)

    return parts


def read_stored(
    stored: StoredElements,
    forms: Mapping[MatrixKey, FewBits],
    rest: Parts,
    spread: Spread,
    layout: Layout,
    dtype: DTypeLike,
    sharding_of: ShardingOf,
) -> Parts:
    """Reads what is `stored` of the matrices that have a form in `forms`, and all others as `rest` does.

    Nothing is decoded. The host has the arrays of one matrix of one layer at a time, as `read_shards` says.
    """

    def parts(name: str, whole: ParamDecl, layer: int | None) -> Iterator[jax.Array | Matrix]:
        if (form := forms.get((name, layer))) is None:
            yield from rest(name, whole, layer)
            return
        elements = stored(name, layer)
        if declaration(spread.spec, name, layer).shape != whole.shape:
            elements = elements.mapped(lambda fill: spread_fill(spread, name, whole, layer, fill))
        fills, decls = form.fills(whole, elements), form.declare(whole)
        for part in _parts(whole, layout, layer):
            arrays = {
                key: _read(by_threads(fills[key], _PIECE), decl, part, decl.dtype_in(dtype), sharding_of, kept_zeros)
                for key, decl in decls.items()
            }
            yield Matrix(form, arrays)

    return parts


def spread_fill(spread: Spread, name: str, whole: ParamDecl, layer: int | None, stored: Fill) -> Fill:
    """Returns the function that fills the array of that name in `spread.whole`, from the one of `spread.spec`."""
    boxes = spread_boxes(declaration(spread.spec, name, layer), whole)
    return tiled([Tile(box, stored, origin) for box, origin in boxes])


def _read(
    fill: Fill, decl: ParamDecl, half: int | None, dtype: np.dtype, sharding_of: ShardingOf, zeros: Zeros
) -> jax.Array:
    """Reads the array with this declaration, or one half along its first dimension, each device its own part.

    `zeros` makes the memory, which an array on a CPU keeps.
    """
    shape = decl.shape if half is None else (1, *decl.shape[1:])
    before = half or 0

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        box = Box.of_index(index, shape)
        out = zeros(box.shape, dtype)
        fill(out, (box.start[0] + before, *box.start[1:]))
        return out

    return jax.make_array_from_callback(shape, sharding_of(decl), shard, dtype)


def _parts(decl: ParamDecl, layout: Layout, layer: int | None) -> Iterator[int | None]:
    """Yields the parts that an array is read in, None for all of it. Gate and up of a stacked layer are two tensors."""
    is_halves = layout == "stacked" and layer is not None and decl.axes[0] is None and len(decl.shape) > 2
    yield from range(decl.shape[0]) if is_halves else (None,)


def sharding_on(mesh: Mesh) -> ShardingOf:
    """Returns how the arrays of a model are split over `mesh`."""
    sharding = place(mesh)
    return lambda decl: sharding(decl.axes)


def zeros_on(decl: ParamDecl, dtype: DTypeLike, sharding_of: ShardingOf) -> jax.Array:
    """Makes an array of zeros where the one of that declaration lies, of a model in `dtype`."""
    made = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharding_of(decl))
    array: jax.Array = made(decl.shape, decl.dtype_in(dtype))
    return array


@dataclass(frozen=True)
class WeightPatch:
    """A change of some arrays of a stage, those that are `given`, by their names and layers, in the tree `before`.

    All others stay, the slots of experts among them. None stands for outside the layers.
    """

    before: Params
    given: Callable[[str, int | None], bool]


def assemble(
    spread: Spread,
    stage: int,
    layout: Layout,
    dtype: DTypeLike,
    sharding_of: ShardingOf,
    parts: Parts,
    forms: Forms,
    patch: WeightPatch | None = None,
) -> Params:
    """Builds the tree of a stage of `spread` from its arrays. Only those of a stacked layer may come in several parts.

    Each part is in its place before the next one is read, because an unfinished transfer or update keeps its memory.
    With a `patch`, an array that is not given is the same as before, and a stack some of whose layers are is a copy.
    """

    def parts_of(name: str, decl: ParamDecl, layer: int | None) -> Iterator[jax.Array | Matrix]:
        if decl.storage != "slots":
            return parts(name, decl, layer)
        # Not `device_put`, for which processes would wait for each other.
        return iter([jax.make_array_from_callback(decl.shape, sharding_of(decl), first_slots(*decl.shape).__getitem__)])

    def leaf(name: str, decl: ParamDecl, layers: StackLayers | None, before: Any = None) -> Any:
        number = first_layer(layers)
        given = () if layers is None else layers[stage]
        if patch is not None:
            given = tuple(layer for layer in given if patch.given(name, layer))
            if not given and not (layers is None and patch.given(name, None)):
                return before

        def kept(part: jax.Array | Matrix) -> Any:
            if isinstance(part, Matrix):
                return part
            return forms.kept(part, name, decl, number, sharding_of)

        if layers is None or layout == "separate":
            [part] = parts_of(name, decl, number)
            return jax.block_until_ready(kept(part))

        def zeros(decl: ParamDecl) -> jax.Array:
            return zeros_on(decl.stacked(most(layers)), dtype, sharding_of)

        stack = forms.node(name, decl, number, zeros) if patch is None else jax.tree.map(jnp.copy, before)
        held = jax.tree.leaves(stack)
        puts = [jax.jit(_put, donate_argnums=0, out_shardings=array.sharding) for array in held]
        for layer in given:
            i, first = layers[stage].index(layer), 0
            for part in parts_of(name, decl, layer):
                new = jax.tree.leaves(kept(part))
                at = np.int32(i), np.int32(first)
                held = [put(array, own, *at) for put, array, own in zip(puts, held, new, strict=True)]
                jax.block_until_ready(held)
                first += len(new[0])
        return jax.tree.unflatten(jax.tree.structure(stack), held)

    if patch is None:
        return build(spread, layout, leaf)
    makers = build(spread, layout, lambda *of_leaf: partial(leaf, *of_leaf))
    made: Params = _filled(makers, patch.before)
    return made


def _filled(makers: Any, before: Any) -> Any:
    """Returns the tree that `makers` make, each of what was in its place before."""
    if isinstance(makers, dict):
        return {name: _filled(make, before[name]) for name, make in makers.items()}
    if isinstance(makers, list):
        return [_filled(make, old) for make, old in zip(makers, before, strict=True)]
    return makers(before)


def of_stage(whole: Params, spread: Spread, stage: Mesh, forms: Forms) -> Params:
    """Returns what the devices of a stage have of a tree that `joined` has made. Nothing is copied."""
    devices, sharding_of = set(stage.local_devices), sharding_on(stage)

    def leaf(name: str, decl: ParamDecl, layers: StackLayers | None) -> Any:
        return forms.node(name, decl, first_layer(layers), lambda own: own.stacked(most(layers)) if layers else own)

    def part(decl: ParamDecl, array: jax.Array) -> jax.Array:
        shards = [shard.data for shard in array.addressable_shards if shard.device in devices]
        return jax.make_array_from_single_device_arrays(decl.shape, sharding_of(decl), shards)

    tree: Params = jax.tree.map(part, build(spread, "stacked", leaf), whole)
    return tree


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
