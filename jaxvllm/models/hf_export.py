"""Writes the weights of a model as a checkpoint in Hugging Face format: the inverse of reading one."""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from jaxvllm.gguf_file import is_gguf
from jaxvllm.models.attention import KV_SCALES
from jaxvllm.models.checkpoint import CONFIG, check_empty, companions, read_config
from jaxvllm.models.experts import SLOTS
from jaxvllm.models.families import find_family
from jaxvllm.models.families.family import Family
from jaxvllm.models.forms import Matrix
from jaxvllm.models.held_tensors import HeldTensors
from jaxvllm.models.hf_weights import Tensors, named_sources
from jaxvllm.models.params import Params, activation_dtype, declaration, declare, layer_stacks
from jaxvllm.models.published import published_encoding, without_encoding
from jaxvllm.models.safetensors_files import DTYPES, INDEX, INTEGERS, SINGLE, WeightFiles, create_file, open_weights
from jaxvllm.models.spread import Spread
from jaxvllm.models.tiling import Box, spread_boxes
from jaxvllm.models.weight_names import OuterNames, Source

# The bytes of a file, from which on there is another: the size that transformers gives its own.
FILE_BYTES = 5 * 10**9


@dataclass(frozen=True)
class HfExport:
    """The tensors of a checkpoint, each with the parts of our arrays that it consists of."""

    spread: Spread
    outer: Mapping[str, tuple[Source, ...]]
    layers: tuple[Mapping[str, tuple[Source, ...]], ...]

    @classmethod
    def of(cls, spread: Spread, family: Family, like: Tensors | None = None) -> Self:
        """Finds the names, which are those of `like` if it is given, and otherwise the newest of the family.

        Raises NotImplementedError for a family whose tensors cannot be made of our arrays alone.
        """
        outer, layers = named_sources(HeldTensors({}) if like is None else like, family, spread.spec)
        export = cls(spread, outer, tuple(layers))
        counts: dict[str, int] = {}
        for source in export._all_sources():
            counts[source.name] = counts.get(source.name, 0) + math.prod(source.view)
        for name, shape in export.shapes.items():
            if counts[name] != math.prod(shape):
                raise NotImplementedError(
                    f"checkpoints of {family.architecture} cannot be written yet: our arrays do not hold each number "
                    f"of the tensor {name} once"
                )
        return export

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, by name."""
        return {source.name: source.shape for source in self._all_sources()}

    def tensors(self, params: Params) -> dict[str, np.ndarray]:
        """Returns the tensors of a model whose arrays are `params`, in any forms, spread as `self.spread` says."""
        into = {name: np.empty(like.shape, like.dtype) for name, like in self.declared(params).items()}
        self.fill(into, params)
        return into

    def declared(self, params: Params) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of each tensor."""
        found = {}
        for name, layer, node, _ in _nodes(params, self.spread):
            dtype = jax.tree.leaves(node)[0].dtype
            for source in self.sources(name, layer):
                found[source.name] = jax.ShapeDtypeStruct(source.shape, dtype)
        return found

    def fill(self, into: Mapping[str, np.ndarray], params: Params) -> None:
        """Fills tensors. The host has one array of one layer at a time."""
        for name, layer, node, place in _nodes(params, self.spread):
            if not (sources := self.sources(name, layer)):
                continue
            array = self._stored(name, layer, node, place)
            for source in sources:
                part = Box(source.at, source.view).index((0,) * len(source.at))
                source.part_of(into[source.name])[...] = array[part]

    def _stored(self, name: str, layer: int | None, node: Any, place: int | None) -> np.ndarray:
        """Returns an array as it is on one device, without what a mesh and a form have added to it."""
        if place is not None:
            node = jax.tree.map(lambda array: array[place], node)
        array = np.asarray(node.form.plain(node.arrays) if isinstance(node, Matrix) else node)
        decl, whole = (declaration(spec, name, layer) for spec in (self.spread.spec, self.spread.whole))
        zeros = (0,) * len(decl.shape)
        found = np.empty(decl.shape, array.dtype)
        for box, origin in spread_boxes(decl, whole):
            found[Box(origin, box.shape).index(zeros)] = array[box.index(zeros)]
        return found

    def sources(self, name: str, layer: int | None) -> tuple[Source, ...]:
        """Returns the tensors, or parts of them, that an array consists of: none of one that checkpoints lack."""
        return () if name in (KV_SCALES, SLOTS) else (self.outer if layer is None else self.layers[layer])[name]

    def _all_sources(self) -> Iterator[Source]:
        return chain.from_iterable(chain.from_iterable(part.values() for part in (self.outer, *self.layers)))


def write_checkpoint(params: Params, spread: Spread, model: Path, output: Path) -> None:
    """Writes `params` into `output`, with the config and the tokenizer of the directory `model`, where they came from.

    Tensors that are not the decoder's, such as those of a vision tower, are copied from there. Raises ValueError if
    `output` has anything in it, and NotImplementedError for a family that cannot be written; both before anything is.
    """
    if is_gguf(model):
        raise ValueError(f"{model} is a GGUF file, which has no config.json to write: train a model of a directory")
    config = read_config(model)
    family = find_family(config)
    like = _readable(model, config)
    export = HfExport.of(spread, family, like)
    declared = export.declared(params)
    others = {} if like is None else _others(like, spread, set(declared))
    copied = companions(model)
    check_empty(output, {file.name for file in copied} | {SINGLE, INDEX})
    output.mkdir(parents=True, exist_ok=True)
    for file in copied:
        shutil.copyfile(file, output / file.name)
    into: dict[str, np.ndarray] = {}
    files = _divided(declared | others)
    file_of: dict[str, str] = {}
    for number, part in enumerate(files, 1):
        name = SINGLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        into |= create_file(output / name, part)
        file_of |= dict.fromkeys(part, name)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(map(_num_bytes, (declared | others).values()))}, "weight_map": file_of}
        (output / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    export.fill(into, params)
    for name, array in others.items():
        into[name][...] = array
    # The config comes last: if anything went wrong before, the directory has none and is not taken for a model.
    written = without_encoding(config) | {"dtype": np.dtype(activation_dtype(params)).name}
    (output / CONFIG).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def _nodes(params: Params, spread: Spread) -> Iterator[tuple[str, int | None, Any, int | None]]:
    """Yields every array, or matrix in a form, of a tree: its name, its layer or None, and the node.

    If the node is a stack of layers, the place of the layer in it follows, and otherwise None.
    """
    for name in declare(spread.whole):
        yield name, None, params[name], None
    for key, stack in layer_stacks(spread.whole).items():
        for place, layer in enumerate(stack.layers):
            if isinstance(params["layers"], list):
                yield stack.name, layer, params["layers"][layer][stack.name], None
            else:
                yield stack.name, layer, params["layers"][key], place


def _readable(model: Path, config: Mapping[str, Any]) -> WeightFiles | None:
    """Returns the tensors of a directory, or None where it has none, or has them in few bits."""
    has_any = any(model.glob("*.safetensors"))
    return open_weights(model) if has_any and published_encoding(config) is None else None


def _others(like: WeightFiles, spread: Spread, written: set[str]) -> dict[str, np.ndarray]:
    """Returns the tensors that are not the decoder's, still in their files, without a second copy of the embedding."""
    tied = OuterNames().lm_head if spread.spec.tie_embeddings else None
    names = sorted(name for name in like.names - written if name != tied)
    return {name: like.tensor(name, like.shape(name), {**DTYPES, **INTEGERS}) for name in names}


def _num_bytes(like: Any) -> int:
    return math.prod(like.shape) * like.dtype.itemsize


def _divided(declared: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the tensors of each file."""
    files: list[dict[str, Any]] = [{}]
    size = 0
    for name, like in declared.items():
        if files[-1] and size + _num_bytes(like) > FILE_BYTES:
            files.append({})
            size = 0
        files[-1][name] = like
        size += _num_bytes(like)
    return files
