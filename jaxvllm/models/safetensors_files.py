"""Opens the safetensors files of a directory, and maps their tensors. No other file is read, nothing is executed."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import SEEK_END, BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Self

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, deserialize, safe_open

from jaxvllm.models.tiling import Fill, copied
from jaxvllm.models.weight_names import Source

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}

_NAMES: Mapping[np.dtype, str] = {
    **{dtype: name for name, dtype in DTYPES.items()},
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int32): "I32",
    np.dtype(np.uint32): "U32",
    np.dtype(np.int64): "I64",
}
_LONGEST_HEADER = 100_000_000  # bytes that the library takes
_MOST_AXES = 64  # that an array of NumPy has
INTEGERS: Mapping[str, np.dtype] = {"I64": np.dtype(np.int64), "I32": np.dtype(np.int32)}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the header of its file describes it."""

    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file


@dataclass(frozen=True)
class WeightFile:
    """A safetensors file that is mapped into memory, of which only the parts that are used are read, or whole in it."""

    tensors: Mapping[str, StoredTensor]
    mapped: np.ndarray  # u8[bytes of the file]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens the file. Raises ValueError when it is not a complete safetensors file."""
        try:
            with safe_open(path, framework="numpy"):
                pass  # opening it checks the header, and the length of the file against it
        except OSError as error:
            raise _incomplete(path, error) from error
        except SafetensorError as error:
            with path.open("rb") as file:
                raise _incomplete(path, error, _damaged_tensor(file)) from error
        return cls._of(np.memmap(path, np.uint8, mode="r"))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads the whole file, which others may replace or cut short meanwhile: a mapped one would end the process.

        It takes its size twice for a moment. Raises ValueError as `open` does.
        """
        content = path.read_bytes()
        try:
            deserialize(content)  # it makes the checks of `open`, of these very bytes
        except SafetensorError as error:
            raise _incomplete(path, error, _damaged_tensor(BytesIO(content))) from error
        return cls._of(np.frombuffer(content, np.uint8))

    @classmethod
    def _of(cls, mapped: np.ndarray) -> Self:
        # The format is a u64 (the length of the header), the header in JSON, and the data.
        data = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
        header = json.loads(mapped[8:data].tobytes())
        tensors = {
            name: StoredTensor(entry["dtype"], tuple(entry["shape"]), data + entry["data_offsets"][0])
            for name, entry in header.items()
            if name != "__metadata__"
        }
        return cls(tensors, mapped)


def _incomplete(path: Path, error: Exception, tensor: str | None = None) -> ValueError:
    damaged = "" if tensor is None else f", tensor {tensor}"
    return ValueError(f"{path} is not a complete safetensors file ({error}){damaged}: download it again")


def _damaged_tensor(file: BinaryIO) -> str | None:
    """Returns the first tensor beyond the end of a file, or with other bytes than its shape, and what is wrong.

    None: there is no such tensor, or no header. Only the header is read.
    """
    size = file.seek(0, SEEK_END)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if length > min(size, _LONGEST_HEADER):
        return None
    try:
        for name, entry in json.loads(file.read(length)).items():
            if name == "__metadata__":
                continue
            start, end = (int(offset) for offset in entry["data_offsets"])
            if 8 + length + end > size:
                return f"{name} ends at byte {8 + length + end:,} of {size:,}"
            shape = tuple(int(size) for size in entry["shape"][:_MOST_AXES])
            itemsize = next((dtype.itemsize for dtype, one in _NAMES.items() if one == entry["dtype"]), None)
            if itemsize is not None and math.prod(shape) * itemsize != end - start:
                return f"{name} has {end - start:,} bytes, which are no {entry['dtype']} {shape}"
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        pass  # a header that is none
    return None


@dataclass(frozen=True)
class WeightFiles:
    """Open checkpoint files. A tensor's bytes are read when they are copied out of it, straight from the file."""

    directory: Path
    file_of: Mapping[str, str]  # file name by tensor name
    files: Mapping[str, WeightFile]  # by file name

    @property
    def names(self) -> set[str]:
        return set(self.file_of)

    def __contains__(self, name: str) -> bool:
        return name in self.file_of

    def where(self, name: str) -> str:
        """Returns the file of a tensor."""
        return str(self.directory / self.file_of[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor that is there."""
        return self.files[self.file_of[name]].tensors[name].shape

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ValueError as `tensor` does, which reads nothing yet."""
        self.tensor(name, shape)

    def fill(self, source: Source) -> Fill:
        """Returns the function that fills a part of our array. Raises ValueError as `tensor` does."""
        return copied(source.part_of(self.tensor(source.name, source.shape)))

    def header(self, name: str) -> StoredTensor | None:
        """Returns what the header of its file says about a tensor, or None if no file has it."""
        return self.files[self.file_of[name]].tensors[name] if name in self else None

    def tensor(self, name: str, shape: tuple[int, ...], dtypes: Mapping[str, np.dtype] = DTYPES) -> np.ndarray:
        """Returns the tensor, still in its file. Raises ValueError if it is missing, or has another shape or dtype."""
        if name not in self.file_of:
            raise ValueError(f"{self.directory} lacks the tensor {name}, which should have shape {shape}")
        where = f"{self.where(name)}: tensor {name}"
        file = self.files[self.file_of[name]]
        tensor = file.tensors[name]
        if tensor.shape != shape:
            raise ValueError(f"{where} has shape {tensor.shape}, and the config makes it {shape}")
        if tensor.dtype not in dtypes:
            raise ValueError(f"{where} has dtype {tensor.dtype}: supported are {', '.join(dtypes)}")
        return np.ndarray(shape, dtypes[tensor.dtype], file.mapped, tensor.offset)

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


def create_file(path: Path, declared: Mapping[str, np.ndarray | jax.ShapeDtypeStruct]) -> dict[str, np.ndarray]:
    """Creates a safetensors file with tensors like these, and returns them, still empty: what they hold is written.

    Tensors of large elements come first, so that each begins at a multiple of the size of its elements. Raises OSError
    where the disk has no room for all of them.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    end = 0
    for name, one in sorted(declared.items(), key=lambda item: -item[1].dtype.itemsize):
        size = math.prod(one.shape) * one.dtype.itemsize
        header[name] = {"dtype": _NAMES[one.dtype], "shape": one.shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        # A file that only has its length would end the process by SIGBUS when a mapped page finds the disk full.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, 8 + len(text) + end)
        else:  # macOS
            file.truncate(8 + len(text) + end)
    mapped = np.memmap(path, np.uint8, mode="r+").view(np.ndarray)
    offsets = {name: 8 + len(text) + header[name]["data_offsets"][0] for name in declared}
    return {name: np.ndarray(one.shape, one.dtype, mapped, offsets[name]) for name, one in declared.items()}
