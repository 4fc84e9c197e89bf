"""`AdapterFills`: brings an adapter into its slot on the devices. The programs for that are compiled at the start."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from jaxvllm.models.dora import of_one_slot, with_ratios
from jaxvllm.models.expert_lora import EXPERT_DOWN, EXPERT_UP, ExpertLora
from jaxvllm.models.lora import LAYERS, LORA, OUTSIDE, LayerLora, filled
from jaxvllm.models.outer_lora import EMBED, HEAD, OuterLora
from jaxvllm.models.params import Params
from jaxvllm.models.saved_tables import TABLES
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from jaxvllm.models.table_arrays import with_table
from jaxvllm.runtime.conditional_loop import run_if
from jaxvllm.runtime.pipeline import Pipeline
from jaxvllm.runtime.recipe import Recipe
from sharding.axis import ModelAxis, StageAxis
from sharding.placement import of_replicas
from sharding.rules import DATA

# The tables that an adapter may bring along.
_TABLE_NAMES = (EMBED, HEAD)


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
        """Returns a tree like `trees` of `change(name, axis, *nodes)`, for the nodes of each name in these trees."""

        def of_layer(is_stacked: bool, *dicts: Params) -> Params:
            axes = {name: self.in_layers(name, is_stacked) for name in dicts[0]}
            return {name: change(name, axis, *(one[name] for one in dicts)) for name, axis in axes.items()}

        layers, outside = ([tree[part] for tree in trees] for part in (LAYERS, OUTSIDE))
        is_stacked = isinstance(layers[0], dict)
        own: Params = {}
        if self.outside is not None:
            axes = {name: self.outside.slot_axis(name) for name in outside[0]}
            own = {name: change(name, axis, *(one[name] for one in outside)) for name, axis in axes.items()}
        of_layers: Any = (
            of_layer(True, *layers) if is_stacked else [of_layer(False, *each) for each in zip(*layers, strict=True)]
        )
        return {LAYERS: of_layers, OUTSIDE: own}


@dataclass(frozen=True, eq=False)
class AdapterFill:
    """An adapter that comes into a slot of one of the replicas that share a mesh. Others may have others there."""

    arrays: Params  # of one slot, on the host
    slot: int
    has_magnitudes: bool = False  # whether ratios are to be computed of them
    replica: int = 0

    def packed(self) -> NDArray[np.int32]:
        """Returns it as words i32[N] for another process."""
        whole = b"".join(array.tobytes() for array in jax.tree.leaves(self.arrays))
        tables = self.arrays.get(TABLES, {})
        has_tables = (name in tables for name in _TABLE_NAMES)
        head = np.array([self.slot, self.has_magnitudes, self.replica, *has_tables], "<i4")
        return np.concatenate([head, np.frombuffer(whole + bytes(-len(whole) % 4), "<i4")])


def fill_adapter(slots: Params, one: Params, numbers: jax.Array, *, axes: SlotAxes, is_shared: bool) -> Params:
    """Returns the arrays of all slots, with those of one adapter in its slot. `slots` are donated.

    `numbers` i32[2] are that of the slot in this replica, and that among the slots of all replicas, which experts have.
    Where replicas that share experts have slots of their own (`is_shared`), the first is 0 in all but one of them.
    """

    own, among_all = numbers

    def with_one(slots: Params, number: jax.Array, of_experts: bool) -> Params:
        def put(name: str, axis: int, mine: Any, new: Any) -> Any:
            if name.startswith((EXPERT_DOWN, EXPERT_UP)) != of_experts:
                return mine
            return jax.tree.map(partial(filled, number=number, axis=axis), mine, new)

        return axes.changed(put, slots, one)

    slots = with_one(slots, among_all, of_experts=True)
    put_own = partial(with_one, number=own, of_experts=False)
    return run_if(own > 0, put_own, slots) if is_shared else put_own(slots)


def ratios_on_stages(one: Any, layers: Any, *, spread: Spread) -> Any:
    """Returns what `with_ratios` does, of those layers that a device's stage has."""
    parts: dict[ModelSpec, list[int]] = {}
    for stage, part in enumerate(spread.parts):
        parts.setdefault(part, []).append(stage)
    pipeline = Pipeline(StageAxis(spread.stages))
    for part, stages in parts.items():
        run = partial(with_ratios, layers=layers, spec=part, axis=ModelAxis(spread.size))
        one = pipeline.only_on(stages, run, one)
    return one


class AdapterFills:
    """The compiled programs for one tree of slots."""

    def __init__(
        self, params: Params, spec: ModelSpec, mesh: Mesh, make_program: Callable[[Recipe], jax.stages.Compiled]
    ):
        """Compiles what fills slots. `params` are abstract shapes, with shardings, and have the arrays of all slots."""
        slots, layers = _in_slots(params[LORA]), params["layers"]
        axes, self._num_replicas = SlotAxes.of(spec), mesh.shape[DATA]

        self._num_slots = spec.num_lora_slots  # of each replica

        def like(_: str, axis: int, node: Any) -> Any:
            return jax.tree.map(partial(_of_one, self._num_replicas * self._num_slots, axis), node)

        self._slots_like, self._like = params[LORA], axes.changed(like, slots)
        # Of the host, which needs no place: one for each of the replicas that have tables of their own.
        self._tables_like = {
            name: jax.tree.map(lambda x: _shared_out(x, self._num_replicas), tables[0])
            for name, tables in params[LORA].get(TABLES, {}).items()
        }
        arguments = slots, self._like, of_replicas(mesh, (2,), np.int32)
        fill = partial(fill_adapter, axes=axes, is_shared=self._num_replicas > 1)
        self._program = make_program(Recipe.changing(fill, arguments, mesh))

        def compile_ratios() -> jax.stages.Compiled:
            run = partial(ratios_on_stages, spread=Spread.on(of_one_slot(spec), mesh))
            return make_program(Recipe.changing(run, (self._like[LAYERS], layers), mesh))

        # Few adapters need it, so that other programs are compiled first.
        self.compile_ratios = cache(compile_ratios)

    def empty(self) -> Any:
        """Returns the arrays of all slots without adapters, for those that a fill which broke off has taken along."""
        return jax.tree.map(lambda like: placed(np.zeros(like.shape, like.dtype), like), self._slots_like)

    def fill(self, params: Params, fill: AdapterFill) -> Params:
        """Returns `params` with an adapter in its slot. The slots are donated."""
        one = jax.tree.map(placed, _in_slots(fill.arrays), self._like)
        if fill.has_magnitudes:
            one |= {LAYERS: self.compile_ratios()(one[LAYERS], params["layers"])}
        numbers = np.zeros((self._num_replicas, 2), np.int32)
        numbers[fill.replica, 0] = fill.slot
        numbers[:, 1] = fill.replica * self._num_slots + fill.slot
        slots = self._program(_in_slots(params[LORA]), one, numbers.reshape(-1))
        if TABLES not in params[LORA]:
            return params | {LORA: slots}
        tables, where = dict(params[LORA][TABLES]), (fill.replica, self._num_replicas)
        for name, new in fill.arrays.get(TABLES, {}).items():
            tables[name] = with_table(tables[name], fill.slot, new, *where)
        return params | {LORA: slots | {TABLES: tables}}

    def unpacked(self, words: NDArray[np.int32]) -> AdapterFill:
        """Returns what `AdapterFill.packed` has made words of."""
        num_words = 3 + len(_TABLE_NAMES)
        slot, has_magnitudes, replica, *has_tables = words[:num_words].tolist()
        whole = words[num_words:].astype("<i4").tobytes()
        names = [name for name, has in zip(_TABLE_NAMES, has_tables, strict=True) if has]
        like = self._like | ({TABLES: {name: self._tables_like[name] for name in names}} if names else {})
        first, arrays = 0, []
        for one in jax.tree.leaves(like):
            arrays.append(np.frombuffer(whole, one.dtype, math.prod(one.shape), first).reshape(one.shape))
            first += arrays[-1].nbytes
        return AdapterFill(jax.tree.unflatten(jax.tree.structure(like), arrays), slot, bool(has_magnitudes), replica)


def _in_slots(arrays: Params) -> Params:
    """Returns the arrays that have all slots along an axis: all but tables, each of which is an array of its own."""
    return {name: own for name, own in arrays.items() if name != TABLES}


def _shared_out(tables: jax.ShapeDtypeStruct, num_replicas: int) -> jax.ShapeDtypeStruct:
    rows, *others = tables.shape
    return jax.ShapeDtypeStruct((rows // num_replicas, *others), tables.dtype)


def placed(array: NDArray[Any], like: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns an array that all processes have on the host, on those devices of `like` that this one has.

    It is not `device_put`, for which processes would wait for each other.
    """
    assert like.sharding is not None, "an array of a model has a place"
    return jax.make_array_from_callback(like.shape, like.sharding, array.__getitem__)


def _of_one(num_slots: int, axis: int, slots: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the shape of an adapter's array, of that of all slots, which are along `axis`. Every replica has it."""
    assert isinstance(slots.sharding, NamedSharding), "an array of a model has a place"
    shape, mesh_axes = list(slots.shape), [*slots.sharding.spec]
    shape[axis] //= num_slots
    mesh_axes[axis] = None
    sharding = NamedSharding(slots.sharding.mesh, PartitionSpec(*mesh_axes))
    return jax.ShapeDtypeStruct(tuple(shape), slots.dtype, sharding=sharding)
