"""Reads the weights of a checkpoint in Hugging Face format, by the names of our arrays.

Tensors lie in one safetensors file or many. No other file is read, and nothing is executed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxvllm.models.families.family import Family
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.tiling import Box, Fill, Tile, copied, tiled
from jaxvllm.models.weight_names import OuterNames, Source, outer_sources

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}

INTEGERS: Mapping[str, np.dtype] = {"I64": np.dtype(np.int64), "I32": np.dtype(np.int32)}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the header of its file describes it."""

    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file


@dataclass(frozen=True)
class WeightFile:
    """A safetensors file that is mapped into memory. Only the parts that are used are read."""

    tensors: Mapping[str, StoredTensor]
    mapped: np.ndarray  # u8[bytes of the file]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens the file. Raises ValueError when it is not a complete safetensors file."""
        try:
            with safe_open(path, framework="numpy"):
                pass  # opening it checks the header, and the length of the file against it
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not a complete safetensors file ({error}): download it again") from error
        mapped = np.memmap(path, np.uint8, mode="r")
        # The format is a u64 (the length of the header), the header in JSON, and the data.
        data = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
        header = json.loads(mapped[8:data].tobytes())
        tensors = {
            name: StoredTensor(entry["dtype"], tuple(entry["shape"]), data + entry["data_offsets"][0])
            for name, entry in header.items()
            if name != "__metadata__"
        }
        return cls(tensors, mapped)


@dataclass(frozen=True)
class WeightFiles:
    """Open checkpoint files. A tensor's bytes are read when they are copied out of it, straight from the file."""

    directory: Path
    file_of: Mapping[str, str]  # file name by tensor name
    files: Mapping[str, WeightFile]  # by file name

    @property
    def names(self) -> set[str]:
        return set(self.file_of)

    def where(self, name: str) -> str:
        """Returns the file of a tensor."""
        return str(self.directory / self.file_of[name])

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ValueError as `tensor` does, which reads nothing yet."""
        self.tensor(name, shape)

    def tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Returns the tensor, still in its file. Raises ValueError if it is missing, or has another shape or dtype."""
        if name not in self.file_of:
            raise ValueError(f"{self.directory} lacks the tensor {name}, which should have shape {shape}")
        where = f"{self.where(name)}: tensor {name}"
        file = self.files[self.file_of[name]]
        tensor = file.tensors[name]
        if tensor.shape != shape:
            raise ValueError(f"{where} has shape {tensor.shape}, and the config makes it {shape}")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{where} has dtype {tensor.dtype}: supported are {', '.join(DTYPES)}")
        return np.ndarray(shape, DTYPES[tensor.dtype], file.mapped, tensor.offset)

    def integers(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Returns a tensor of integers, i64. Raises ValueError if it is missing, or has another shape or dtype."""
        file = self.files[self.file_of[name]] if name in self.file_of else None
        tensor = None if file is None else file.tensors[name]
        if file is None or tensor is None or tensor.shape != shape or tensor.dtype not in INTEGERS:
            found = "none" if tensor is None else f"{tensor.dtype} {tensor.shape}"
            raise ValueError(f"{self.directory} must have the integers {name} of shape {shape}, and has {found}")
        return np.ndarray(shape, INTEGERS[tensor.dtype], file.mapped, tensor.offset).astype(np.int64)


def open_weights(directory: Path, other: str | None = None) -> WeightFiles:
    """Opens all weight files of a directory. Raises ValueError when one is missing, broken or inconsistent.

    Where neither `SINGLE` nor `INDEX` is there, the only file may have the name `other`.
    """
    names, file_of = _find(directory, other)
    files = {name: WeightFile.open(directory / name) for name in names}
    if file_of is None:
        [name] = names
        file_of = dict.fromkeys(files[name].tensors, name)
    for name, file in file_of.items():
        if name not in files[file].tensors:
            raise ValueError(f"{directory / INDEX} says that {file} holds {name}, and it does not")
    return WeightFiles(directory, file_of, files)


def _find(directory: Path, other: str | None) -> tuple[list[str], dict[str, str] | None]:
    """Returns the files and, if there is an index, the file of each tensor."""
    if (directory / SINGLE).is_file():
        return [SINGLE], None
    index = directory / INDEX
    if not index.is_file() and other is not None and (directory / other).is_file():
        return [other], None
    if not index.is_file():
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern))
        found = f" It has {', '.join(pickled)}: such files can run code and are never opened." if pickled else ""
        raise ValueError(f"{directory} has neither {SINGLE} nor {INDEX}: convert the model to safetensors.{found}")
    try:
        file_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(file_of.values()))
        if not all(isinstance(file, str) for file in files):
            raise TypeError("a file's name must be a string")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of safetensors files: it needs a weight_map") from error
    for file in files:
        if Path(file).name != file:
            raise ValueError(f"{index} names {file!r}: shards must lie beside their index")
        if not (directory / file).is_file():
            raise ValueError(f"{index} names the shard {file}, which is not there: download it again")
    return files, file_of


class Tensors(Protocol):
    """The tensors of a checkpoint, by their names, wherever they are."""

    @property
    def names(self) -> set[str]: ...

    def where(self, name: str) -> str:
        """Returns the place of a tensor, for errors."""

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ValueError if the tensor is missing, or another one. Nothing of it is read."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Returns the tensor, which is read when it is copied. Raises ValueError if it is missing or another one."""


@dataclass(frozen=True)
class StoredWeights:
    """Every array that a model needs, with the tensors that its parts come from."""

    tensors: Tensors
    outer: Mapping[str, tuple[Source, ...]]
    layers: tuple[Mapping[str, tuple[Source, ...]], ...]

    @classmethod
    def open(cls, directory: Path, family: Family, spec: ModelSpec) -> "StoredWeights":
        """Opens the weights of a directory and checks every tensor.

        Raises ValueError that names the file and the tensor which is missing, unexpected, or of another shape or dtype.
        """
        return cls.of(open_weights(directory), family, spec)

    @classmethod
    def of(cls, tensors: Tensors, family: Family, spec: ModelSpec) -> "StoredWeights":
        """Checks every tensor, as `open` does."""
        prefix = _prefix(family, tensors)
        weights = cls(
            tensors,
            outer_sources(spec, prefix, _names(family, tensors)),
            tuple(
                family.layer_sources(spec, layer, family.names.layer_prefix(prefix, layer))
                for layer in range(spec.num_layers)
            ),
        )
        weights._check_names(family, spec)
        return weights

    def fill(self, name: str, layer: int | None) -> Fill:
        """Returns the function that fills the array of that name, of a layer or, with None, outside the layers."""
        sources = self.outer[name] if layer is None else self.layers[layer][name]
        tiles = []
        for source in sources:
            view = source.part_of(self.tensors.tensor(source.name, source.shape))
            tiles.append(Tile(Box(source.at, source.view), copied(view), (0,) * view.ndim))
        return tiled(tiles)

    def _check_names(self, family: Family, spec: ModelSpec) -> None:
        """Checks that every needed tensor is there with its shape, and that there is no unknown one."""
        tensors = self.tensors
        groups = (group for part in (self.outer, *self.layers) for group in part.values())
        used = {source.name: source.shape for group in groups for source in group}
        for name, shape in used.items():
            tensors.check(name, shape)
        # Old Llamas store their RoPE frequencies; some tied models store the embedding twice.
        known = ("rotary_emb.inv_freq", *family.redundant, *(("lm_head.weight",) if spec.tie_embeddings else ()))
        # Layers after the last one that predict further tokens are draft heads: see `models.heads.mtp`.
        ends = "eh_proj.weight"
        starts = tuple(name.removesuffix(ends) for name in tensors.names if name.endswith(f".{ends}"))
        foreign = (*family.foreign, *(start for start in starts if not any(name.startswith(start) for name in used)))
        unexpected = sorted(
            name for name in tensors.names - set(used) if not name.endswith(known) and not name.startswith(foreign)
        )
        if unexpected:
            name = unexpected[0]
            raise ValueError(
                f"{tensors.where(name)}: unexpected tensor {name}"
                f"{f' and {len(unexpected) - 1} more' if unexpected[1:] else ''}: {family.architecture} has none "
                "of that name with this config, and ignoring it would change the model"
            )


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
