"""`LoraArrays`: the arrays of adapters, of a model on its devices: all of them empty, or those of one that was read."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxvllm.models.block import Block
from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.dora import of_one_slot
from jaxvllm.models.expert_lora import EXPERT_DOWN, EXPERT_UP, ExpertLora
from jaxvllm.models.experts import replicas_of
from jaxvllm.models.families.family import Family
from jaxvllm.models.forms.choice import Forms
from jaxvllm.models.forms.cpu_kernel import OnCpu
from jaxvllm.models.forms.plain import MATRIX, PLAIN
from jaxvllm.models.lora import DOWN, LAYERS, MOST_MASKED, OUTSIDE, RATIO, UP, LayerLora
from jaxvllm.models.lora_modules import LoraModule, lora_modules
from jaxvllm.models.outer_lora import OuterLora
from jaxvllm.models.params import Layout, Params, StackLayers, build, first_layer, most
from jaxvllm.models.peft import LowRank, ModuleSize
from jaxvllm.models.saved_tables import OWN, TABLES, SavedTables
from jaxvllm.models.shards import sharding_on, zeros_on
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from jaxvllm.models.table_arrays import TableArrays
from jaxvllm.models.tiling import Tile, copied, spread_boxes, tiled
from sharding.mesh import MeshShape
from sharding.rules import DATA

_KINDS = (DOWN, UP, RATIO, OWN, EXPERT_DOWN, EXPERT_UP)


def with_lora(spec: ModelSpec, modules: Iterable[LoraModule], room: "LoraRoom", has_kernel: bool) -> ModelSpec:
    """Returns the spec with room for adapters in the modules, with a kernel or without.

    Raises ValueError where whole tables are to have room, and no module is one that may have such a table.
    """
    modules, num_slots, rank = tuple(modules), room.num_slots, room.rank
    one_by_one = has_kernel or num_slots > MOST_MASKED
    counts: list[dict[str, int]] = [{} for _ in spec.layers]
    num_replicas = replicas_of(spec)
    for module in modules:
        if module.layer is not None:
            of_layer = counts[module.layer]
            of_layer[module.matrix] = max(of_layer.get(module.matrix, 0), module.part + 1)

    def with_room(layer: Block, count: Mapping[str, int]) -> Block:
        dense = tuple((name, count[name]) for name in count if name in layer.matrices)
        experts = tuple((name, count[name]) for name in count if name in layer.expert_matrices)
        return replace(
            layer,
            lora=LayerLora(num_slots, rank, dense, one_by_one) if dense else None,
            expert_lora=ExpertLora(LayerLora(num_slots, rank, experts, has_kernel), num_replicas) if experts else None,
        )

    layers = map(with_room, spec.layers, counts)
    outside = dict.fromkeys((module.matrix for module in modules if module.layer is None), 1)
    if room.num_tables and not outside:
        raise ValueError(
            f"max_lora_heads {room.num_tables} is room for LM heads and embeddings of adapters, and this model has no "
            "such module that lora_target_modules names: name lm_head or embed_tokens there, or leave the option out"
        )
    tables = SavedTables(room.num_tables, tuple(outside)) if room.num_tables else None
    outer = OuterLora(LayerLora(num_slots, rank, tuple(outside.items()), has_kernel), tables) if outside else None
    return replace(spec, layers=tuple(layers), lora=outer)


@dataclass(frozen=True)
class LoraRoom:
    """It says how much room for adapters there is to be, and in which modules."""

    num_slots: int
    rank: int
    targets: tuple[str, ...] | None = None  # names of modules, or parts of these between dots; None: all modules
    num_tables: int = 0  # the slots that have room for an embedding and an LM head of the adapter's own

    def left_out(self, modules: Mapping[str, LoraModule]) -> dict[str, str]:
        """Returns why some of the modules are to have no room, by their names."""
        if self.targets is None:
            return {}
        named = {name: [one for one in self.targets if f".{one}." in f".{name}."] for name in modules}
        found = {target for targets in named.values() for target in targets}
        of_layers = any(named[name] for name, module in modules.items() if module.layer is not None)
        if unknown := [target for target in self.targets if target not in found]:
            ends = ", ".join(sorted({name.rpartition(".")[2] for name in modules}))
            raise ValueError(f"lora_target_modules has {unknown[0]!r}, and this model's modules end with {ends}")
        if not of_layers:
            raise ValueError(f"lora_target_modules must name a module of the layers, too, not only {self.targets}")
        return {name: "lora_target_modules leaves it out" for name, targets in named.items() if not targets}


@dataclass(frozen=True, eq=False)
class LoraArrays:
    """Makes the arrays of adapters for one model, on meshes of one shape, in one layout and dtype."""

    spec: ModelSpec  # with room for adapters
    modules: Mapping[str, LoraModule]
    problems: Mapping[str, str]  # why some of the modules have no room, by their names
    shape: MeshShape
    layout: Layout
    dtype: np.dtype
    forms: Forms

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        family: Family,
        shape: MeshShape,
        layout: Layout,
        dtype: DTypeLike,
        forms: Forms,
        room: LoraRoom,
    ) -> Self:
        """Makes room in `spec`.

        Raises NotImplementedError for a model none of whose matrices can be adapted, and ValueError where `room` names
        no module of a layer, or names something else.
        """
        modules = lora_modules(spec, family)
        if all(module.layer is None for module in modules.values()):
            raise NotImplementedError(f"{family.architecture} has no matrix that adapters could change yet")
        problems = room.left_out(modules)
        adapted = [module for name, module in modules.items() if name not in problems]
        has_kernel = layout == "separate" and isinstance(forms.adapters, OnCpu)
        served = with_lora(spec, adapted, room, has_kernel)
        return cls(served, modules, problems, shape, layout, jnp.dtype(dtype), forms)

    @property
    def rank(self) -> int:
        """The largest rank that an adapter may have."""
        return max(room.rank for layer in self.spec.layers for room in layer.lora_rooms)

    @property
    def outside(self) -> dict[str, tuple[int, int]]:
        """The shapes of the embedding and of the LM head, which may be adapted or replaced, too, by their names."""
        shape = self.spec.vocab_size, self.spec.hidden_size
        return {name: shape for name, module in self.modules.items() if module.layer is None}

    @cached_property
    def tables(self) -> TableArrays | None:
        """The arrays of embeddings and LM heads that adapters bring along whole, or None where they have no room."""
        room = None if self.spec.lora is None else self.spec.lora.tables
        return None if room is None else TableArrays(room, self.spec, self.shape.model, self.dtype, self.forms)

    @cached_property
    def sizes(self) -> dict[str, ModuleSize]:
        """The sizes of the modules that may be adapted, by their names."""
        return {
            name: ModuleSize(
                module.in_size, module.out_size, bool(module.index), module.num_experts, self.problems.get(name)
            )
            for name, module in self.modules.items()
        }

    def empty(self, mesh: Mesh) -> Any:
        """Returns the arrays of all slots on `mesh`, which have no adapter yet.

        The replicas of the mesh, which share experts, have slots of their own.
        """
        sharding_of, count = sharding_on(mesh), mesh.shape[DATA]

        def array(name: str, decl: ParamDecl, layers: StackLayers | None) -> Any:
            if not name.startswith((EXPERT_DOWN, EXPERT_UP)):  # those have the slots of all replicas on each device
                decl = decl.of_replicas(count, self._slot_axis(name, first_layer(layers)))
            return zeros_on(self._whole(decl, layers), self.dtype, sharding_of)

        tree = self._tree(self.spec, array)
        return tree if self.tables is None else tree | {TABLES: self.tables.empty(mesh)}

    def of_adapter(self, adapter: Mapping[str, LowRank], tables: Mapping[str, np.ndarray] | None = None) -> Any:
        """Returns the arrays of an adapter, by the names of its modules, on the host. Ratios are magnitudes so far.

        Whole `tables` are in a part of their own, which is missing where there are none.
        """
        named = {self.modules[name].matrix: table for name, table in (tables or {}).items()}
        if tables is not None and len(named) < len(tables):
            raise ValueError(f"a table has two names, {' and '.join(sorted(tables))}: leave one out")
        tree = self._low_rank(adapter, named.keys())
        if not named:
            return tree
        assert self.tables is not None, "tables are read where they have room"
        return tree | {TABLES: self.tables.of_adapter(named)}

    def _low_rank(self, adapter: Mapping[str, LowRank], saved: Set[str]) -> Any:
        """Returns the arrays of an adapter in parts that all adapters have. `saved` are its tables."""
        by_layer: dict[tuple[int | None, str], list[tuple[LoraModule, LowRank]]] = {}
        for name, matrices in adapter.items():
            module = self.modules[name]
            by_layer.setdefault((module.layer, module.matrix), []).append((module, matrices))

        def array(name: str, decl: ParamDecl, layers: StackLayers | None) -> np.ndarray:
            if name.startswith(OWN):
                return np.full(decl.shape, name.removeprefix(OWN) in saved, decl.dtype_in(self.dtype))
            if layers is None or self.layout == "separate":
                return self._filled(name, first_layer(layers), by_layer).reshape(decl.shape)
            whole = self._whole(decl, layers)
            array = np.zeros(whole.shape, decl.dtype_in(self.dtype))
            for stage, own in enumerate(layers):
                for place, layer in enumerate(own, stage * most(layers)):
                    array[place] = self._filled(name, layer, by_layer).reshape(decl.shape)
            return array

        return self._tree(self._one_slot, array)

    def _filled(
        self,
        name: str,
        layer: int | None,
        adapters: Mapping[tuple[int | None, str], Sequence[tuple[LoraModule, LowRank]]],
    ) -> np.ndarray:
        """Returns one array of a layer, or outside the layers, with heads and vocabulary as the devices have them."""
        kind = next(kind for kind in _KINDS if name.startswith(kind))
        decl, spread_out = (declared[name] for declared in self._declared[layer])
        room, on_devices = self._room(kind, layer)
        values = np.zeros(decl.shape, np.float32)
        for module, matrices in adapters.get((layer, name.removeprefix(kind)), ()):
            first = module.part * self.rank
            own = slice(first, first + matrices.rank)
            if kind in (DOWN, EXPERT_DOWN):
                values[(*module.index, own)] = matrices.down
            elif kind in (UP, EXPERT_UP):
                up = np.zeros((*matrices.up.shape[:-1], decl.shape[-1]), np.float32)
                if room is not None and room.one_by_one:
                    up[..., : matrices.rank], up[..., -1] = matrices.up, module.part
                else:
                    up[..., own] = matrices.up
                module.put_rows(up, values)
            elif matrices.magnitudes is not None:
                module.put_rows(matrices.magnitudes, values)
        out = np.zeros(spread_out.shape, decl.dtype_in(self.dtype))
        boxes = spread_boxes(decl, spread_out)
        tiled([Tile(box, copied(values), origin) for box, origin in boxes])(out, (0,) * out.ndim)
        return on_devices(name, out)

    def _room(self, kind: str, layer: int | None) -> tuple[LayerLora | None, Callable[[str, np.ndarray], np.ndarray]]:
        """Returns the room of arrays of a kind in a layer, and what brings one into the order of the devices."""
        if layer is None:
            return None, lambda _, array: array
        own = self.spec.layers[layer]
        if kind in (EXPERT_DOWN, EXPERT_UP):
            assert own.expert_lora is not None, "there are such arrays where experts have room"
            return own.expert_lora.room, own.expert_lora.on_devices
        assert own.lora is not None, "there are such arrays where matrices have room"
        return own.lora, own.lora.on_devices

    @cached_property
    def _declared(self) -> dict[int | None, tuple[dict[str, ParamDecl], dict[str, ParamDecl]]]:
        """The arrays of one adapter in each layer and outside, as one device has them and as those of a mesh do."""
        one, whole = self._one_slot, Spread(self._one_slot, self.shape.model).whole
        found: dict[int | None, tuple[dict[str, ParamDecl], dict[str, ParamDecl]]] = {
            number: (_of_one(own), _of_one(wide))
            for number, (own, wide) in enumerate(zip(one.layers, whole.layers, strict=True))
        }
        if one.lora is not None:
            sizes = (one.vocab_size, one.hidden_size), (whole.vocab_size, whole.hidden_size)
            found[None] = one.lora.declare_one(*sizes[0]), one.lora.declare_one(*sizes[1])
        return found

    @cached_property
    def _one_slot(self) -> ModelSpec:
        """The spec with room for one adapter."""
        return of_one_slot(self.spec)

    def _slot_axis(self, name: str, layer: int | None) -> int:
        """Returns the axis of slots in the array of that name, of a layer or, with None, outside the layers."""
        room: LayerLora | OuterLora | None = self.spec.lora
        if layer is not None:
            room = self.spec.layers[layer].lora
        assert room is not None, "there is room where there are such arrays"
        return room.slot_axis(name) if isinstance(room, OuterLora) else room.slot_axis(name, is_stacked=False)

    def _whole(self, decl: ParamDecl, layers: StackLayers | None) -> ParamDecl:
        return decl.stacked(len(layers) * most(layers)) if layers and self.layout == "stacked" else decl

    def _tree(self, spec: ModelSpec, array: Callable[[str, ParamDecl, StackLayers | None], Any]) -> Params:
        """Returns `array(name, declaration, layers)` of all arrays of adapters, and None for layers outside of them.

        The layout is that of the model's layers.
        """

        def leaf(name: str, decl: ParamDecl, layers: StackLayers | None) -> Any:
            if not name.startswith(_KINDS):
                return None
            form = PLAIN if name.startswith((RATIO, OWN)) else self.forms.adapters
            if name.startswith((EXPERT_DOWN, EXPERT_UP)):
                form = self.forms.expert_adapters
            return form.wrapped({MATRIX: array(name, decl, layers)})

        tree = build(Spread(spec, self.shape.model, self.shape.stages), self.layout, leaf)
        layers = tree.pop("layers")
        of_layers = _without_others(layers) if isinstance(layers, dict) else [*map(_without_others, layers)]
        return {LAYERS: of_layers, OUTSIDE: _without_others(tree)}


def _of_one(layer: Block) -> dict[str, ParamDecl]:
    """Returns the arrays of one adapter as it is read, of a layer."""
    dense = {} if layer.lora is None else layer.lora.declare_one(layer.matrices)
    return dense if layer.expert_lora is None else dense | layer.expert_lora.declare_one(layer.expert_matrices)


def _without_others(arrays: Params) -> Params:
    return {name: array for name, array in arrays.items() if array is not None}
