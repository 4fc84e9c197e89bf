"""Opens GGUF files: their metadata and the list of their tensors. No tensor is read, and nothing is executed.

Every length is compared with what is left of the file before anything of that length is made. Source: ggml,
`docs/gguf.md`, versions 2 and 3, whose numbers are little-endian.
"""

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

SUFFIX = ".gguf"
MAGIC, VERSIONS = b"GGUF", (2, 3)
# The types of values by their numbers, as `struct` names them.
_SCALARS: Mapping[int, str] = {number: f"<{letter}" for number, letter in enumerate("BbHhIif?")} | {
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
# Numbers of an array, each of which becomes 8 to 48 bytes. The longest have one for each token of a vocabulary.
_MOST_NUMBERS = 1 << 24
# A model may be split into files, of which the first has the metadata.
_SPLIT = re.compile(r"(?P<start>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor as the list of its file describes it."""

    path: Path
    kind: int  # the number of its type in ggml
    shape: tuple[int, ...]  # rows before columns, which the file lists the other way round
    offset: int  # of its first byte in the file


@dataclass(frozen=True)
class GgufFile:
    """The metadata of a model, and its tensors, by name."""

    path: Path  # of the first file, if the model is split
    metadata: Mapping[str, Any]  # arrays are lists
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def open(cls, path: Path, has_texts: bool = True) -> "GgufFile":
        """Opens the file, and the others if it is one of several. Raises ValueError that names a damaged file.

        Without `has_texts`, lists of strings are empty: a vocabulary and its merges are only for the tokenizer.
        """
        paths = split_files(path)
        first, *others = (_read(one, has_texts) for one in paths)
        tensors = dict(first.tensors)
        for other in others:
            if twice := sorted(tensors.keys() & other.tensors.keys()):
                raise ValueError(f"{other.path} has the tensor {twice[0]}, which an earlier file has too")
            tensors |= other.tensors
        count = first.metadata.get("split.tensors.count", len(tensors))
        if count != len(tensors):
            raise ValueError(f"{path} says that its files have {count} tensors, and they have {len(tensors)}")
        return replace(first, tensors=tensors)


def is_gguf(path: Path) -> bool:
    """Returns whether a path is that of a GGUF file, by its name."""
    return path.suffix == SUFFIX and path.is_file()


def is_later_part(path: Path) -> bool:
    """Returns whether a file is one of several of a model, and not the first one."""
    match = _SPLIT.fullmatch(path.name)
    return match is not None and int(match["number"]) != 1


def split_files(path: Path) -> list[Path]:
    """Returns the files of the model that `path` is a part of, in order. Raises ValueError if one is missing."""
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count:
        raise ValueError(f"{path} has a number of a file that is not one of {count}: rename it")
    paths = [path.with_name(f"{match['start']}-{number:05d}-of-{count:05d}{SUFFIX}") for number in range(1, count + 1)]
    for one in paths:
        if not one.is_file():
            raise ValueError(f"{path} is one of {count} files, of which {one.name} is not there: download it too")
    return paths


def _read(path: Path, has_texts: bool) -> GgufFile:
    with path.open("rb") as stream:
        if not stream.seek(0, 2):
            raise ValueError(f"{path} is empty: download it again")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _GgufCursor(path, data, has_texts)
            metadata = cursor.metadata()
            return GgufFile(path, metadata, cursor.tensors(metadata))


class _GgufCursor:
    """A place in a file, which moves on with everything that is read: the metadata first, and then the tensors."""

    def __init__(self, path: Path, data: mmap.mmap, has_texts: bool):
        self._path, self._data, self._at, self._end = path, data, 0, len(data)
        self._has_texts = has_texts
        if self._take(4, "its first word") != MAGIC:
            raise ValueError(f"{path} is not a GGUF file: it begins with {data[:4]!r}")
        version = self._number("<I", "its version")
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            raise ValueError(f"{path} has version {version} of GGUF: known are {known}. Convert it again")
        self._num_tensors, self._num_pairs = (self._number("<Q", "its counts") for _ in range(2))

    def metadata(self) -> dict[str, Any]:
        self._check_room(self._num_pairs, 8 + 4 + 1, "pairs of metadata")
        found: dict[str, Any] = {}
        for _ in range(self._num_pairs):
            key = self._text("a key")
            if key in found:
                self._damaged(f"it has {key} twice")
            found[key] = self._value(self._number("<I", key), key)
        return found

    def tensors(self, metadata: Mapping[str, Any]) -> dict[str, GgufTensor]:
        """Reads the list of tensors, whose offsets count from the first byte after it, which is aligned."""
        self._check_room(self._num_tensors, 8 + 4 + 4 + 8, "tensors")
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self._damaged(f"general.alignment is {alignment!r}, and no power of two")
        found: dict[str, GgufTensor] = {}
        for _ in range(self._num_tensors):
            name = self._text("the name of a tensor")
            where = f"tensor {name}"
            count = self._number("<I", where)
            if name in found or not 1 <= count <= _MOST_DIMENSIONS:
                self._damaged(f"{where} is there twice, or has {count} dimensions")
            shape = tuple(self._number("<Q", where) for _ in range(count))[::-1]
            kind, offset = self._number("<I", where), self._number("<Q", where)
            found[name] = GgufTensor(self._path, kind, shape, offset)
        start = -(-self._at // alignment) * alignment
        return {name: replace(tensor, offset=start + tensor.offset) for name, tensor in found.items()}

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind], key)
        if kind == _STRING:
            return self._text(key)
        if kind != _ARRAY:
            self._damaged(f"{key} has the type {kind}, which does not exist")
        of, count = self._number("<I", key), self._number("<Q", key)
        if of == _STRING:
            self._check_room(count, 8, f"strings of {key}")
            return self._texts(count, key) if self._has_texts else self._skipped_texts(count, key)
        if of not in _SCALARS:
            self._damaged(f"{key} is an array of the type {of}, which no array has")
        letter = _SCALARS[of][1:]
        size = struct.calcsize(f"<{letter}")
        self._check_room(count, size, f"numbers of {key}")
        if count > _MOST_NUMBERS:
            raise ValueError(f"{self._path}: {key} has {count} numbers: arrays have {_MOST_NUMBERS} at most")
        return list(struct.unpack(f"<{count}{letter}", self._take(count * size, key)))

    def _text(self, what: str) -> str:
        [text] = self._texts(1, what)
        return text

    def _texts(self, count: int, what: str) -> list[str]:
        """Reads strings. The 300,000 of a large vocabulary and its merges take 0.1 s (one thread of an AMD EPYC)."""
        data, at, end, found = self._data, self._at, self._end, []
        length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            size = length(data, at)[0] if end - at >= 8 else end
            at += 8
            if size > end - at:
                self._damaged(f"{what} goes beyond the end of the file")
            found.append(data[at : at + size])
            at += size
        self._at = at
        try:
            return [text.decode() for text in found]
        except UnicodeDecodeError as error:
            self._damaged(f"{what} is not UTF-8 ({error})")

    def _skipped_texts(self, count: int, what: str) -> list[str]:
        """Passes by strings, which takes a third of the time."""
        data, at, end = self._data, self._at, self._end
        length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + (length(data, at)[0] if end - at >= 8 else end)
            if at > end:
                self._damaged(f"{what} goes beyond the end of the file")
        self._at = at
        return []

    def _number(self, form: str, what: str) -> Any:
        [value] = struct.unpack(form, self._take(struct.calcsize(form), what))
        return value

    def _take(self, size: int, what: str) -> bytes:
        if size > self._end - self._at:
            self._damaged(f"{what} takes {size} bytes, and {self._end - self._at} are left")
        self._at += size
        return self._data[self._at - size : self._at]

    def _check_room(self, count: int, least: int, what: str) -> None:
        if count * least > self._end - self._at:
            self._damaged(f"it says that it has {count} {what}, for which {self._end - self._at} bytes are too few")

    def _damaged(self, reason: str) -> NoReturn:
        raise ValueError(f"{self._path} is damaged or cut, at byte {self._at}: {reason}. Download it again")
