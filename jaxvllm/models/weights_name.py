"""A name for the weights of a directory, so that engines can tell whether they have the same model."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from jaxvllm.gguf_file import is_gguf, split_files
from jaxvllm.models.orbax_tree import TREE

# Files are read in pieces of so many bytes, which threads may hash beside each other.
PIECE_BYTES = 256 << 20
_BUFFER_BYTES = 1 << 20


def weight_files(directory: Path) -> Iterator[Path]:
    """Yields all files of weights of a model or a head: safetensors, an orbax tree, and what torch has pickled."""
    for pattern in ("*.safetensors", "*.bin", "*.pt", "*.pth"):
        yield from sorted(directory.glob(pattern))
    yield from sorted(path for path in (directory / TREE).rglob("*") if path.is_file())


def weights_name(directory: Path, files: Iterable[Path], file_digest: Callable[[Path], bytes]) -> str:
    """Returns 32 hexadecimal digits that differ between models and between versions of their weights.

    Every byte counts, through `file_digest`, and the directory does not: copies of a model on two machines have one
    name.
    """
    if is_gguf(directory):  # its files have the config, so that they count in any case
        digest, root, files = hashlib.sha256(), directory.parent, split_files(directory)
    else:
        digest, root = hashlib.sha256((directory / "config.json").read_bytes()), directory
    for file in files:
        digest.update(f"{file.relative_to(root)}".encode() + b"\0" + file_digest(file))
    return digest.hexdigest()[:32]


def file_digest(path: Path, run_all: Callable[[Callable[[int], bytes], Iterable[int]], Iterable[bytes]]) -> bytes:
    """Returns 32 bytes that differ for other contents: SHA-256 of the SHA-256 of all pieces.

    `run_all` is `map`, or that of an executor, whose threads read pieces beside each other. Raises OSError for a file
    that cannot be read, or that changes meanwhile.
    """
    before = os.stat(path)
    digest = hashlib.sha256(before.st_size.to_bytes(8, "big"))
    for piece in run_all(lambda start: _piece_digest(path, start), range(0, before.st_size, PIECE_BYTES)):
        digest.update(piece)
    if identity(os.stat(path)) != identity(before):
        raise OSError(f"{path} has changed while it was read")
    return digest.digest()


def identity(found: os.stat_result) -> tuple[int, ...]:
    """Returns numbers that change when a file does."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _piece_digest(path: Path, start: int) -> bytes:
    digest, buffer, left = hashlib.sha256(), bytearray(_BUFFER_BYTES), PIECE_BYTES
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as stream:
        stream.seek(start)
        while left and (count := stream.readinto(view[: min(left, _BUFFER_BYTES)])):
            digest.update(view[:count])
            left -= count
    return digest.digest()
