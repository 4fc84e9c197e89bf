"""Reads the weights of a checkpoint in Hugging Face format, by the names of our arrays."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxvllm.gguf_file import GgufFile, is_gguf
from jaxvllm.models.attention import KV_SCALES
from jaxvllm.models.families import find_family
from jaxvllm.models.families.family import Family
from jaxvllm.models.forms.few_bits import Elements
from jaxvllm.models.kv_scales import KV_SCALE_ENDS, kv_scale_sources
from jaxvllm.models.params import declare_layer
from jaxvllm.models.published import published_encoding
from jaxvllm.models.published.encoded_files import EncodedFiles
from jaxvllm.models.published.parts import ScaledCodes
from jaxvllm.models.published.stored_codes import StoredCodes
from jaxvllm.models.safetensors_files import open_weights
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.tiling import Box, Fill, Tile, tiled
from jaxvllm.models.weight_names import OuterNames, Source, outer_sources

logger = logging.getLogger(__name__)


class Tensors(Protocol):
    """The tensors of a checkpoint, by their names, wherever they are."""

    @property
    def names(self) -> set[str]: ...

    def where(self, name: str) -> str:
        """Returns the place of a tensor, for errors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor that is there."""

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ValueError if the tensor is missing, or another one. Nothing of it is read."""

    def fill(self, source: Source) -> Fill:
        """Returns the function that fills the part of our array that `source` tells. Raises ValueError as `check`."""


@runtime_checkable
class CodedTensors(Protocol):
    """Tensors of which some are stored as codes and scales."""

    def codes(self, source: Source) -> ScaledCodes | None:
        """Returns the codes and scales of the part of our array that `source` tells, or None where it has none."""


@dataclass(frozen=True)
class StoredWeights:
    """Every array that a model needs, with the tensors that its parts come from."""

    tensors: Tensors
    outer: Mapping[str, tuple[Source, ...]]
    layers: tuple[Mapping[str, tuple[Source, ...]], ...]

    @classmethod
    def open(
        cls, directory: Path, config: Mapping[str, Any], spec: ModelSpec, needs_kv_scales: bool = False
    ) -> "StoredWeights":
        """Opens the weights of a directory, in the encoding that `config` tells, or of a GGUF file. Checks all tensors.

        Raises ValueError that names the file and the tensor which is missing, unexpected, or of another shape or dtype.
        Layers may lack scales of keys and values, but not with `needs_kv_scales`. Each scale must be a positive number.
        """
        tensors: Tensors
        if is_gguf(directory):
            from jaxvllm.models.published.gguf_tensors import GgufTensors

            tensors = GgufTensors.of(GgufFile.open(directory, has_texts=False))
        else:
            files, encoding = open_weights(directory), published_encoding(config)
            tensors = files if encoding is None else EncodedFiles.of(files, encoding)
        return cls.of(tensors, find_family(config), spec, needs_kv_scales)

    @classmethod
    def of(
        cls,
        tensors: Tensors,
        family: Family,
        spec: ModelSpec,
        needs_kv_scales: bool = False,
        prefix: str | None = None,
        is_part: bool = False,
    ) -> "StoredWeights":
        """Checks every tensor, as `open` does. Their names begin with `prefix`, which is told by them if it is None.

        If it `is_part` of the weights, arrays may be missing. One that is there must be there with all of its tensors.
        """
        prefix = _prefix(family, tensors) if prefix is None else prefix
        prefixes = _layer_prefixes(family, spec, prefix)
        outer, layers = named_sources(tensors, family, spec, prefix)
        scales = _kv_scales(tensors, spec, prefixes)
        weights = cls(tensors, outer, tuple({**own, **more} for own, more in zip(layers, scales, strict=True)))
        if is_part:
            weights = weights._only_given()
        weights._check_names(family, spec)
        weights._check_kv_scales(prefixes, needs_kv_scales and not is_part)
        return weights

    @classmethod
    def part_of(cls, tensors: Tensors, family: Family, spec: ModelSpec) -> "StoredWeights":
        """Checks the tensors of a part of the weights. Raises ValueError as `open`, and where none of them is known."""
        found = None
        for prefix in (*family.prefixes, ""):
            try:
                return cls.of(tensors, family, spec, prefix=prefix, is_part=True)
            except ValueError as error:  # the prefix that most checkpoints have tells most
                found = found or error
        assert found is not None, "a family has a prefix"
        raise found

    def has(self, name: str, layer: int | None) -> bool:
        """Returns whether it has the array of that name, of a layer or, with None, outside the layers."""
        return name in (self.outer if layer is None else self.layers[layer])

    def _only_given(self) -> "StoredWeights":
        """Returns only the arrays with tensors. Raises ValueError where an array has some of its tensors alone."""
        names = self.tensors.names

        def given(arrays: Mapping[str, tuple[Source, ...]]) -> Mapping[str, tuple[Source, ...]]:
            kept = {}
            for array, sources in arrays.items():
                there = [source.name for source in sources if source.name in names]
                missing = [source.name for source in sources if source.name not in names]
                if there and missing:
                    raise ValueError(
                        f"{self.tensors.where(there[0])}: {there[0]} and {missing[0]} are parts of one matrix here, "
                        "and only the former is given: give all parts of a matrix in one update"
                    )
                if there:
                    kept[array] = sources
            return kept

        return replace(self, outer=given(self.outer), layers=tuple(map(given, self.layers)))

    def fill(self, name: str, layer: int | None) -> Fill:
        """Returns the function that fills the array of that name, of a layer or, with None, outside the layers."""
        sources = self.outer[name] if layer is None else self.layers[layer][name]
        if not sources:  # of scales
            return lambda out, start: out.fill(1)
        boxes = [Box(source.at, source.view) for source in sources]
        fills = map(self.tensors.fill, sources)
        return tiled([Tile(box, fill, (0,) * len(box.start)) for box, fill in zip(boxes, fills, strict=True)])

    @property
    def rounds_tokens(self) -> bool:
        """Whether the checkpoint is made for tokens that are rounded as its matrices are."""
        return isinstance(self.tensors, EncodedFiles) and self.tensors.encoding.rounds_tokens

    def stored(self, name: str, layer: int | None) -> StoredCodes | None:
        """Returns what is stored of a matrix, or None where a part of it is not stored as codes and scales."""
        if not isinstance(self.tensors, CodedTensors):
            return None
        parts = []
        for source in self.outer[name] if layer is None else self.layers[layer][name]:
            if (codes := self.tensors.codes(source)) is None:
                return None
            parts.append((source, codes))
        return StoredCodes(tuple(parts))

    def elements(self, name: str, layer: int | None) -> Elements:
        """Returns what is stored of the elements of a matrix that is stored as codes and scales."""
        stored = self.stored(name, layer)
        assert stored is not None, "a form was chosen for what is stored"
        return stored.elements

    def _check_names(self, family: Family, spec: ModelSpec) -> None:
        """Checks that every needed tensor is there with its shape, and that there is no unknown one."""
        tensors = self.tensors
        groups = (group for part in (self.outer, *self.layers) for group in part.values())
        used = {source.name: source.shape for group in groups for source in group}
        for name, shape in used.items():
            tensors.check(name, shape)
        # Old Llamas store their RoPE frequencies; some tied models store the embedding twice.
        tied = ("lm_head.weight",) if spec.tie_embeddings else ()
        known = ("rotary_emb.inv_freq", *family.redundant, *tied, *KV_SCALE_ENDS)
        # Layers after the last one that predict further tokens are draft heads: see `models.heads.mtp`.
        ends = "eh_proj.weight"
        starts = tuple(name.removesuffix(ends) for name in tensors.names if name.endswith(f".{ends}"))
        foreign = (*family.foreign, *(start for start in starts if not any(name.startswith(start) for name in used)))
        unexpected = sorted(
            name for name in tensors.names - set(used) if not name.endswith(known) and not name.startswith(foreign)
        )
        if isinstance(tensors, EncodedFiles):
            unexpected = [name for name in unexpected if not tensors.is_bias_of_zeros(name)]
        if unexpected:
            name = unexpected[0]
            raise ValueError(
                f"{tensors.where(name)}: unexpected tensor {name}"
                f"{f' and {len(unexpected) - 1} more' if unexpected[1:] else ''}: {family.architecture} has none "
                "of that name with this config, and ignoring it would change the model"
            )

    def _check_kv_scales(self, prefixes: Sequence[str], must_have: bool) -> None:
        """Checks that scales of keys and values are positive numbers, and that every layer has some if it must."""
        scaled = {number: arrays for number, arrays in enumerate(self.layers) if KV_SCALES in arrays}
        lacking = [number for number, arrays in scaled.items() if not arrays[KV_SCALES]]
        if lacking and must_have:
            number = lacking[0]
            where = self.tensors.where(next(sources[0].name for sources in self.layers[number].values() if sources))
            raise ValueError(
                f"{where}: layer {number} has no scale of its keys and values, such as "
                f"{prefixes[number]}self_attn.k_scale, and integers say nothing without one: give weights that have it "
                "in all layers, or kv_cache_dtype int8_per_token_head or the dtype of the model"
            )
        if lacking:
            logger.warning(
                "%d of %d layers have no k_scale or v_scale: keys and values are rounded to eight bits unscaled there",
                len(lacking),
                len(scaled),
            )
        sources = {source.name: source for arrays in scaled.values() for source in arrays[KV_SCALES]}
        for name, source in sources.items():
            scales = np.empty(source.view, np.float32)
            self.tensors.fill(source)(scales, (0, 0))
            if (wrong := scales[~((scales > 0) & (scales < np.inf))]).size:
                raise ValueError(
                    f"{self.tensors.where(name)}: tensor {name} has a scale of {wrong[0]}: scales of keys and values "
                    "must be positive numbers"
                )


def named_sources(
    tensors: Tensors, family: Family, spec: ModelSpec, prefix: str | None = None
) -> tuple[dict[str, tuple[Source, ...]], list[Mapping[str, tuple[Source, ...]]]]:
    """Returns the sources of the arrays outside the layers and of each layer, by the names that `tensors` have.

    The names begin with `prefix`, which is told by them if it is None. Scales of keys and values are not among them.
    """
    prefix = _prefix(family, tensors) if prefix is None else prefix
    starts = enumerate(_layer_prefixes(family, spec, prefix))
    layers = [family.layer_sources(spec, layer, start) for layer, start in starts]
    return outer_sources(spec, prefix, _names(family, tensors)), layers


def _layer_prefixes(family: Family, spec: ModelSpec, prefix: str) -> list[str]:
    return [family.names.layer_prefix(prefix, layer) for layer in range(spec.num_layers)]


def _kv_scales(tensors: Tensors, spec: ModelSpec, prefixes: Sequence[str]) -> list[Mapping[str, tuple[Source, ...]]]:
    """Returns the sources of each layer's scales of keys and values, where it has some.

    The names of a layer's tensors begin with its one of `prefixes`.
    """
    names = [name for name in tensors.names if name.endswith(KV_SCALE_ENDS)]
    found: list[Mapping[str, tuple[Source, ...]]] = []
    for number, layer in enumerate(spec.layers):
        decl = declare_layer(spec, number).get(KV_SCALES)
        prefix = prefixes[number if layer.reads is None else layer.reads]
        sources = () if decl is None else kv_scale_sources(names, tensors.shape, prefix, decl.shape[0])
        found.append({} if decl is None else {KV_SCALES: sources})
    return found


def _names(family: Family, tensors: Tensors) -> OuterNames:
    """Returns the names outside the layers. The LM head has its usual name where the family's is not there."""
    usual = OuterNames().lm_head
    if family.names.lm_head in tensors.names or usual not in tensors.names:
        return family.names
    return replace(family.names, lm_head=usual)


def _prefix(family: Family, tensors: Tensors) -> str:
    """Returns the prefix that tensors have in this checkpoint: one of the family's, or none.

    None is what models have that were saved without their LM head, such as Qwen3-Embedding.
    """
    for prefix in (*family.prefixes, ""):
        if f"{prefix}{family.names.embed}" in tensors.names:
            return prefix
    return family.prefixes[0]
