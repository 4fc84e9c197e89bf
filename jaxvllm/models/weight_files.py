"""The tensors of a checkpoint, in one safetensors file or many. Nothing else is read, nothing is executed."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class WeightFiles:
    """Open checkpoint files. Tensors are read when asked for, straight from the mapped file."""

    directory: Path
    file_of: Mapping[str, str]  # file name by tensor name
    handles: Mapping[str, Any]  # safe_open by file name

    @property
    def names(self) -> set[str]:
        return set(self.file_of)

    def reader(self, name: str, shape: tuple[int, ...]) -> Callable[[slice], np.ndarray]:
        """Reads rows of the tensor; ValueError now if it is missing, or has another shape or dtype."""
        if name not in self.file_of:
            raise ValueError(f"{self.directory} lacks the tensor {name}, which should have shape {shape}")
        where = f"{self.directory / self.file_of[name]}: tensor {name}"
        part = self.handles[self.file_of[name]].get_slice(name)
        if tuple(part.get_shape()) != shape:
            raise ValueError(f"{where} has shape {tuple(part.get_shape())}, and the config makes it {shape}")
        if part.get_dtype() not in DTYPES:
            raise ValueError(f"{where} has dtype {part.get_dtype()}: supported are {', '.join(DTYPES)}")
        return lambda rows: np.asarray(part[rows])


@contextmanager
def open_weights(directory: Path) -> Iterator[WeightFiles]:
    """The weight files of a directory, all open; ValueError when one is missing, broken or inconsistent."""
    files, file_of = _find(directory)
    with ExitStack() as stack:
        handles = {}
        for file in files:
            try:
                handles[file] = stack.enter_context(safe_open(directory / file, framework="numpy"))
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{directory / file} is not a complete safetensors file ({error}): download it again"
                ) from error
        held = {file: set(handle.keys()) for file, handle in handles.items()}
        if file_of is None:
            file_of = dict.fromkeys(held[SINGLE], SINGLE)
        for name, file in file_of.items():
            if name not in held[file]:
                raise ValueError(f"{directory / INDEX} says that {file} holds {name}, and it does not")
        yield WeightFiles(directory, file_of, handles)


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
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of safetensors files: it needs a weight_map") from error
    for file in files:
        if Path(file).name != file:
            raise ValueError(f"{index} names {file!r}: shards must lie beside their index")
        if not (directory / file).is_file():
            raise ValueError(f"{index} names the shard {file}, which is not there: download it again")
    return files, file_of
