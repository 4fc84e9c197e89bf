"""The tensors of a checkpoint, in one safetensors file or many. Nothing else is read, nothing is executed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the header of its file describes it."""

    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file


@dataclass(frozen=True)
class WeightFile:
    """A safetensors file mapped into memory: what is not looked at is not read."""

    tensors: Mapping[str, StoredTensor]
    mapped: np.ndarray  # u8[bytes of the file]

    @classmethod
    def open(cls, path: Path) -> Self:
        """ValueError when it is not a complete safetensors file."""
        try:
            with safe_open(path, framework="numpy"):
                pass  # that checked the header, and the length of the file against it
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not a complete safetensors file ({error}): download it again") from error
        mapped = np.memmap(path, np.uint8, mode="r")
        # Format: u64 length of the header, the header in JSON, the data.
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

    def tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The tensor, still in its file; ValueError if it is missing, or has another shape or dtype."""
        if name not in self.file_of:
            raise ValueError(f"{self.directory} lacks the tensor {name}, which should have shape {shape}")
        where = f"{self.directory / self.file_of[name]}: tensor {name}"
        file = self.files[self.file_of[name]]
        tensor = file.tensors[name]
        if tensor.shape != shape:
            raise ValueError(f"{where} has shape {tensor.shape}, and the config makes it {shape}")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{where} has dtype {tensor.dtype}: supported are {', '.join(DTYPES)}")
        return np.ndarray(shape, DTYPES[tensor.dtype], file.mapped, tensor.offset)


def open_weights(directory: Path) -> WeightFiles:
    """The weight files of a directory, all open; ValueError when one is missing, broken or inconsistent."""
    names, file_of = _find(directory)
    files = {name: WeightFile.open(directory / name) for name in names}
    if file_of is None:
        file_of = dict.fromkeys(files[SINGLE].tensors, SINGLE)
    for name, file in file_of.items():
        if name not in files[file].tensors:
            raise ValueError(f"{directory / INDEX} says that {file} holds {name}, and it does not")
    return WeightFiles(directory, file_of, files)


def _find(directory: Path) -> tuple[list[str], dict[str, str] | None]:
    """The files, and which tensor is in which as far as an index says so."""
    if (directory / SINGLE).is_file():
        return [SINGLE], None
    index = directory / INDEX
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
