"""`LoraArrays`: the arrays of adapters, of a model on its devices: all of them empty, or those of one that was read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.dora import of_one_slot
from jaxvllm.models.families.family import Family
from jaxvllm.models.forms.choice import Forms
from jaxvllm.models.forms.cpu_kernel import OnCpu
from jaxvllm.models.forms.form import Form
from jaxvllm.models.forms.plain import MATRIX, PLAIN
from jaxvllm.models.lora import DOWN, LAYERS, MOST_MASKED, OUTSIDE, RATIO, UP, LayerLora
from jaxvllm.models.outer_lora import EMBED, HEAD, OuterLora
from jaxvllm.models.params import Layout, Params, StackLayers, build, first_layer, most
from jaxvllm.models.peft import LowRank
from jaxvllm.models.shards import sharding_on, zeros_on
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from jaxvllm.models.tiling import Tile, copied, spread_boxes, tiled
from jaxvllm.models.weight_names import Source, outer_sources
from sharding.mesh import MeshShape
from sharding.rules import DATA

_ENDING = ".weight"
# The kernels for CPUs take no matrix with fewer rows, which gates of a few heads have.
_LEAST_ROWS = 4


@dataclass(frozen=True)
class LoraModule:
    """A linear module of a checkpoint, or its embedding, and the part of one of our matrices that it is."""

    layer: int | None  # None: outside the layers
    matrix: str
    part: int  # its number among the modules of the matrix
    in_size: int
    out_size: int
    sources: tuple[Source, ...]  # of the matrix, those that are rows of this module

    def put_rows(self, rows: np.ndarray, to: np.ndarray) -> None:
        """Puts what each row of the module has, [out, ..], where its rows are in that of the matrix, [.., ..]."""
        for source in self.sources:
            own = replace(source, shape=rows.shape, view=(*source.view[:-1], *rows.shape[1:]), is_turned=False)
            box = tuple(slice(at, at + size) for at, size in zip(source.at[:-1], source.view[:-1], strict=True))
            to[box] += own.part_of(rows)


def lora_modules(spec: ModelSpec, family: Family) -> dict[str, LoraModule]:
    """Returns the modules that adapters may change, by the names that they have in checkpoints of the family."""
    found: dict[str, LoraModule] = {}
    for prefix in dict.fromkeys((*family.prefixes, "")):
        for number, layer in enumerate(spec.layers):
            sources = family.layer_sources(spec, number, family.names.layer_prefix(prefix, number))
            for matrix, decl in layer.matrices.items():
                found |= _modules_of(number, matrix, decl, sources.get(matrix, ()))
        found |= _outer_modules(spec, family, prefix)
    return found


def _outer_modules(spec: ModelSpec, family: Family, prefix: str) -> dict[str, LoraModule]:
    """Returns the embedding and the LM head, which are two modules also where they share a table."""
    sources = outer_sources(replace(spec, tie_embeddings=False), prefix, family.names)
    found = {}
    for matrix in (EMBED, HEAD):
        [source, *others] = sources[matrix]
        if not others and source.name.endswith(_ENDING) and source.view == source.shape:
            out_size, size = source.shape
            if matrix == EMBED:
                out_size, size = size, out_size
                source = replace(source, view=(out_size, size), is_turned=True)
            found[source.name.removesuffix(_ENDING)] = LoraModule(None, matrix, 0, size, out_size, (source,))
    return found


def _modules_of(layer: int, matrix: str, decl: ParamDecl, sources: Sequence[Source]) -> dict[str, LoraModule]:
    """Returns the modules of a matrix, or none where it is something else than whole rows of such modules."""
    size = decl.shape[-1]
    are_rows = (
        source.name.endswith(_ENDING)
        and len(source.shape) == 2
        and isinstance(source.rows, slice)
        and source.view[-1] == size == source.shape[0 if source.is_turned else 1]
        for source in sources
    )
    if not sources or not all(are_rows) or decl.shape[-2] < _LEAST_ROWS:
        return {}
    modules = {}
    for part, name in enumerate(dict.fromkeys(source.name for source in sources)):
        own = tuple(source for source in sources if source.name == name)
        out_size = own[0].shape[1 if own[0].is_turned else 0]
        modules[name.removesuffix(_ENDING)] = LoraModule(layer, matrix, part, size, out_size, own)
    return modules


def with_lora(
    spec: ModelSpec, modules: Mapping[str, LoraModule], num_slots: int, rank: int, has_kernel: bool
) -> ModelSpec:
    """Returns the spec with room for `num_slots` adapters of up to `rank`, on devices that have a kernel for them."""
    one_by_one = has_kernel or num_slots > MOST_MASKED
    counts: list[dict[str, int]] = [{} for _ in spec.layers]
    for module in modules.values():
        if module.layer is not None:
            of_layer = counts[module.layer]
            of_layer[module.matrix] = max(of_layer.get(module.matrix, 0), module.part + 1)
    layers = (
        replace(layer, lora=LayerLora(num_slots, rank, tuple(count.items()), one_by_one) if count else None)
        for layer, count in zip(spec.layers, counts, strict=True)
    )
    outside = dict.fromkeys((module.matrix for module in modules.values() if module.layer is None), 1)
    outer = OuterLora(LayerLora(num_slots, rank, tuple(outside.items()), has_kernel)) if outside else None
    return replace(spec, layers=tuple(layers), lora=outer)


@dataclass(frozen=True, eq=False)
class LoraArrays:
    """Makes the arrays of adapters for one model, on meshes of one shape, in one layout and dtype."""

    spec: ModelSpec  # with room for adapters
    modules: Mapping[str, LoraModule]
    shape: MeshShape
    layout: Layout
    dtype: np.dtype
    form: Form

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        family: Family,
        shape: MeshShape,
        layout: Layout,
        dtype: DTypeLike,
        forms: Forms,
        *,
        num_slots: int,
        rank: int,
    ) -> Self:
        """Makes room in `spec`. Raises NotImplementedError for a model none of whose matrices can be adapted."""
        modules = lora_modules(spec, family)
        if all(module.layer is None for module in modules.values()):
            raise NotImplementedError(f"{family.architecture} has no matrix that adapters could change yet")
        has_kernel = layout == "separate" and isinstance(forms.adapters, OnCpu)
        served = with_lora(spec, modules, num_slots, rank, has_kernel)
        return cls(served, modules, shape, layout, jnp.dtype(dtype), forms.adapters)

    @property
    def rank(self) -> int:
        """The largest rank that an adapter may have."""
        return max(layer.lora.rank for layer in self.spec.layers if layer.lora is not None)

    @property
    def outside(self) -> frozenset[str]:
        """The names of the embedding and of the LM head, which may be adapted, too."""
        return frozenset(name for name, module in self.modules.items() if module.layer is None)

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The sizes of the modules that may be adapted, (in, out), by their names."""
        return {name: (module.in_size, module.out_size) for name, module in self.modules.items()}

    def empty(self, mesh: Mesh) -> Any:
        """Returns the arrays of all slots on `mesh`, which have no adapter yet.

        The replicas of the mesh, which share experts, have slots of their own.
        """
        sharding_of, count = sharding_on(mesh), mesh.shape[DATA]

        def array(name: str, decl: ParamDecl, layers: StackLayers | None) -> Any:
            of_replicas = decl.of_replicas(count, self._slot_axis(name, first_layer(layers)))
            return zeros_on(self._whole(of_replicas, layers), self.dtype, sharding_of)

        return self._tree(self.spec, array)

    def of_adapter(self, adapter: Mapping[str, LowRank]) -> Any:
        """Returns the arrays of an adapter, by the names of its modules, on the host. Ratios are magnitudes so far."""
        by_layer: dict[tuple[int | None, str], list[tuple[LoraModule, LowRank]]] = {}
        for name, matrices in adapter.items():
            module = self.modules[name]
            by_layer.setdefault((module.layer, module.matrix), []).append((module, matrices))

        def array(name: str, decl: ParamDecl, layers: StackLayers | None) -> np.ndarray:
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
        kind = next(kind for kind in (DOWN, UP, RATIO) if name.startswith(kind))
        decl, spread_out = (declared[name] for declared in self._declared[layer])
        lora = None if layer is None else self.spec.layers[layer].lora
        values = np.zeros(decl.shape, np.float32)
        for module, matrices in adapters.get((layer, name.removeprefix(kind)), ()):
            first = module.part * self.rank
            own = slice(first, first + matrices.rank)
            if kind == DOWN:
                values[own] = matrices.down
            elif kind == UP:
                up = np.zeros((module.out_size, decl.shape[-1]), np.float32)
                if lora is not None and lora.one_by_one:
                    up[:, : matrices.rank], up[:, -1] = matrices.up, module.part
                else:
                    up[:, own] = matrices.up
                module.put_rows(up, values)
            elif matrices.magnitudes is not None:
                module.put_rows(matrices.magnitudes, values)
        out = np.zeros(spread_out.shape, decl.dtype_in(self.dtype))
        boxes = spread_boxes(decl, spread_out)
        tiled([Tile(box, copied(values), origin) for box, origin in boxes])(out, (0,) * out.ndim)
        return out if lora is None else lora.on_devices(name, out)

    @cached_property
    def _declared(self) -> dict[int | None, tuple[dict[str, ParamDecl], dict[str, ParamDecl]]]:
        """The arrays of one adapter in each layer and outside, as one device has them and as those of a mesh do."""
        one, whole = self._one_slot, Spread(self._one_slot, self.shape.model).whole
        found: dict[int | None, tuple[dict[str, ParamDecl], dict[str, ParamDecl]]] = {
            number: (own.lora.declare_one(own.matrices), own.lora.declare_one(wide.matrices))
            for number, (own, wide) in enumerate(zip(one.layers, whole.layers, strict=True))
            if own.lora is not None
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
        room = self.spec.lora if layer is None else self.spec.layers[layer].lora
        assert room is not None, "there is room where there are such arrays"
        return room.slot_axis(name) if isinstance(room, OuterLora) else room.slot_axis(name, is_stacked=False)

    def _whole(self, decl: ParamDecl, layers: StackLayers | None) -> ParamDecl:
        return decl.stacked(len(layers) * most(layers)) if layers and self.layout == "stacked" else decl

    def _tree(self, spec: ModelSpec, array: Callable[[str, ParamDecl, StackLayers | None], Any]) -> Params:
        """Returns `array(name, declaration, layers)` of all arrays of adapters, and None for layers outside of them.

        The layout is that of the model's layers.
        """

        def leaf(name: str, decl: ParamDecl, layers: StackLayers | None) -> Any:
            if not name.startswith((DOWN, UP, RATIO)):
                return None
            form = PLAIN if name.startswith(RATIO) else self.form
            return form.wrapped({MATRIX: array(name, decl, layers)})

        tree = build(Spread(spec, self.shape.model, self.shape.stages), self.layout, leaf)
        layers = tree.pop("layers")
        of_layers = _without_others(layers) if isinstance(layers, dict) else [*map(_without_others, layers)]
        return {LAYERS: of_layers, OUTSIDE: _without_others(tree)}


def _without_others(arrays: Params) -> Params:
    return {name: array for name, array in arrays.items() if array is not None}
