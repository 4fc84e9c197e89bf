"""`TunixModel`: a model of tunix's own as the weights of an engine, which gets a copy of them in its own order."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import jax
import numpy as np
from flax import nnx

from jaxvllm.engine.llm import LLM
from jaxvllm.model_name import resolve
from jaxvllm.models import checkpoint
from jaxvllm.models.families import find_family
from jaxvllm.models.heads.head import DRAFT
from jaxvllm.models.hf_export import HfExport
from jaxvllm.models.hf_import import params_of, without_numbers
from jaxvllm.models.params import Params
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from jaxvllm.tunix_families import Kept, TunixFamily, find_tunix_family


@dataclass(frozen=True)
class TunixModel:
    """A model of tunix whose weights an engine of the same architecture takes: see `of`.

    places: where each tensor of a checkpoint is: the path of its parameter, what to do with that, and the expert
    like: the engine's weights, without their numbers
    """

    model: Any
    export: HfExport
    places: Mapping[str, tuple[str, Kept, int | None]]
    like: Params

    @classmethod
    def of(cls, model: Any, llm: LLM) -> Self:
        """Returns the weights of a model for an engine, which must compute the same with them.

        Raises ValueError for a model of another architecture, with parameters that are not mapped, such as those of
        LoRA, of another size, or with another rope, and NotImplementedError for an engine that cannot take them.
        """
        family = find_family(checkpoint.read_config(resolve(llm.config.model)))
        named = find_tunix_family(model, family.architecture)
        weights = {name: node for name, node in llm.weights.items() if name != DRAFT}
        mesh: Any = jax.tree.leaves(weights)[0].sharding.mesh
        spread = Spread.on(llm.engine.spec, mesh)
        if spread.stages > 1:
            raise NotImplementedError("an engine of several stages takes no model of tunix's: give TunixActor.of(llm)")
        params = _params(model)
        others = {device for array in params.values() for device in array.devices()} ^ set(mesh.devices.flat)
        if others:
            names = ", ".join(sorted(map(str, others)))
            raise ValueError(f"tunix's model and the engine must be on the same devices, and only one is on {names}")
        export = HfExport.of(spread, family)
        prefix = family.prefixes[0]
        places = _places(export, named, prefix, params)
        _check_layers(model, named, spread.spec)
        return cls(model, export, places, without_numbers(weights))

    def tree(self) -> Mapping[str, Any]:
        """Returns the weights as they are now, as `LLM.update_weights` takes them.

        They are a tree like the engine's, copied by one program on the devices. Where the engine rounds matrices, they
        are tensors by their names in a checkpoint, which the host reads and rounds.
        """
        found: Mapping[str, Any] = self._copied(_params(self.model))
        return found

    @cached_property
    def _copied(self) -> Callable[[Mapping[str, jax.Array]], Mapping[str, Any]]:
        def tensors(params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
            shapes = self.export.shapes
            return {
                name: kept.tensor(params[path], expert).reshape(shapes[name])
                for name, (path, kept, expert) in self.places.items()
            }

        def tree(params: Mapping[str, jax.Array]) -> Params:
            return params_of(tensors(params), self.export, self.like)

        try:
            made = jax.eval_shape(tree, _params(self.model))
        except ValueError:  # a form says that it rounds
            return jax.jit(tensors)
        structures: list[Any] = [jax.tree.structure(made), jax.tree.structure(self.like)]
        if structures[0] != structures[1]:  # the engine has scales of keys and values
            return jax.jit(tensors)
        return jax.jit(tree, out_shardings=jax.tree.map(lambda array: array.sharding, self.like))


def _params(model: Any) -> dict[str, jax.Array]:
    """Returns the parameters of a module by their paths, joined by dots."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): variable.get_value() for path, variable in flat}


def _places(
    export: HfExport, family: TunixFamily, prefix: str, params: Mapping[str, jax.Array]
) -> dict[str, tuple[str, Kept, int | None]]:
    """Returns where each tensor is. Raises ValueError for one that is nowhere, and for a parameter that is none."""
    places = {}
    for name, shape in export.shapes.items():
        place = _place(name.removeprefix(prefix), family, params)
        if place is None:
            raise ValueError(f"tunix's {family.model} has no parameter for the tensor {name} of the engine's model")
        path, kept, expert = places[name] = place
        of_model = jax.eval_shape(
            lambda array, kept=kept, expert=expert: kept.tensor(array, expert), params[path]
        ).shape
        if int(np.prod(of_model)) != int(np.prod(shape)) or (not kept.order and of_model != shape):
            raise ValueError(
                f"the parameter {path} of tunix's model has shape {of_model}, and the engine's {name} {shape}"
            )
    unknown = sorted(params.keys() - {path for path, _, _ in places.values()})
    if unknown:
        more = f" and {len(unknown) - 1} more" if unknown[1:] else ""
        raise ValueError(
            f"the parameter {unknown[0]}{more} of tunix's {family.model} is not mapped: the engine's model has no such "
            "tensor (merge LoRA, and leave vision towers out)"
        )
    return places


def _place(name: str, family: TunixFamily, params: Mapping[str, jax.Array]) -> tuple[str, Kept, int | None] | None:
    """Returns the place of a tensor whose name is told without its prefix, or None where it has none."""
    start, table, expert = "", family.outer, None
    if found := re.fullmatch(r"(layers\.\d+\.)(.+)", name):
        (start, name), table = found.groups(), family.layer
    if found := re.search(r"\.experts\.(\d+)\.", name):
        name, expert = name.replace(found[0], ".experts.*."), int(found[1])
    for kept in table.get(name, ()):
        if (path := start + kept.path) in params:
            return path, kept, expert
    return None


def _check_layers(model: Any, family: TunixFamily, spec: ModelSpec) -> None:
    """Raises ValueError where a layer of tunix's model has other heads than the engine's, or rotates in another way."""
    for number, layer in enumerate(spec.layers):
        size, theirs = layer.attention.head_size, model.layers[number].attn.head_dim
        if size != theirs:
            raise ValueError(
                f"heads of layer {number} have {theirs} dimensions in tunix's model and {size} in the engine's"
            )
        assert layer.rope is not None, "all families here rotate"
        base, divisor = family.rope(model, number)
        frequencies = 1 / base ** (np.arange(0, size, 2) / size) / divisor
        of_engine = layer.rope.inv_freq
        if (
            layer.rope.scale != 1
            or len(of_engine) != len(frequencies)
            or not np.allclose(of_engine, frequencies, atol=0)
        ):
            divided = "" if divisor == 1 else f", divided by {divisor:g}"
            raise ValueError(
                f"layer {number} of tunix's {family.model} rotates with a base of {base:g}{divided}, whatever its "
                "config says, and the engine in another way by its config.json: give TunixActor.of(llm) to tunix, or "
                "start the engine with hf_overrides that change rope_theta and rope_scaling"
            )
