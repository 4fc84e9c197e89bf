"""The weights of a checkpoint in safetensors, by the names of our arrays."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxvllm.models.families.family import Family
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.tiling import Box, Fill, Tile, copied, tiled
from jaxvllm.models.weight_files import WeightFiles, open_weights
from jaxvllm.models.weight_names import Source, outer_sources


@dataclass(frozen=True)
class StoredWeights:
    """Every array that a model needs, and where its parts lie in the files."""

    files: WeightFiles
    outer: Mapping[str, tuple[Source, ...]]
    layers: tuple[Mapping[str, tuple[Source, ...]], ...]

    @classmethod
    def open(cls, directory: Path, family: Family, spec: ModelSpec) -> "StoredWeights":
        """ValueError names the file and the tensor that is missing, unexpected, of another shape or dtype."""
        files = open_weights(directory)
        prefix = _prefix(family, files)
        weights = cls(
            files,
            outer_sources(spec, prefix),
            tuple(family.layer_sources(spec, f"{prefix}layers.{i}.") for i in range(spec.num_layers)),
        )
        weights._check_names(family, spec)
        return weights

    def fill(self, name: str, layer: int | None) -> Fill:
        """What fills the array of that name, of a layer or, with None, outside the layers."""
        sources = self.outer[name] if layer is None else self.layers[layer][name]
        tiles = []
        for source in sources:
            rows = self.files.tensor(source.name, source.shape)[source.rows]
            # A copy would be the whole tensor on the host.
            view = rows.reshape(source.view, copy=False)
            tiles.append(Tile(Box(source.at, source.view), copied(view), (0,) * view.ndim))
        return tiled(tiles)

    def _check_names(self, family: Family, spec: ModelSpec) -> None:
        """Every tensor that we need is there with its shape, and none is there that we do not understand."""
        files = self.files
        groups = (group for part in (self.outer, *self.layers) for group in part.values())
        used = {source.name: source.shape for group in groups for source in group}
        for name, shape in used.items():
            files.tensor(name, shape)
        # Old Llamas store their RoPE frequencies; some tied models store the embedding twice.
        known = ("rotary_emb.inv_freq", *(("lm_head.weight",) if spec.tie_embeddings else ()))
        unexpected = sorted(
            name for name in files.names - set(used) if not name.endswith(known) and not name.startswith(family.foreign)
        )
        if unexpected:
            name = unexpected[0]
            raise ValueError(
                f"{files.directory / files.file_of[name]}: unexpected tensor {name}"
                f"{f' and {len(unexpected) - 1} more' if unexpected[1:] else ''}: {family.architecture} has none "
                "of that name with this config, and ignoring it would change the model"
            )


def _prefix(family: Family, files: WeightFiles) -> str:
    """Which of its prefixes the family's tensors have here."""
    for prefix in family.prefixes:
        if f"{prefix}embed_tokens.weight" in files.names:
            return prefix
    return family.prefixes[0]
