"""Machine code of our kernels for CPUs on disk, which all models share: a start with another model compiles none again.

A file is code, so it is found in a directory that belongs to this user and that nobody else can write to.
"""

import hashlib
import logging
from functools import cache
from importlib.metadata import version
from pathlib import Path

from jaxvllm.runtime.entry_files import EntryFiles
from jaxvllm.runtime.source_files import digest_of, source_files

logger = logging.getLogger(__name__)

# A kernel is an object file of 10 to 60 KB, and a model has five or so.
MAX_BYTES = 2**26
_DIGEST_BYTES = 32
_SOURCES = Path(__file__).parents[2] / "pallas_kernels"


class StoredKernels:
    """Object files by the names of their handlers, for the sources and the compiler of this process.

    It keeps nothing where the sources are not files, as in a zip, because no name could tell versions apart.
    """

    def __init__(self, directory: Path):
        """Opens those in `directory`, which must be private (`entry_files.make_private`), and cleans it up."""
        self._files = EntryFiles(directory, "-kernel", is_private=True)
        self._files.clean_up(MAX_BYTES)

    def load(self, target: str) -> bytes | None:
        """Returns the object file of the handler `target`, or None if there is none that is whole."""
        name = _name(target)
        if name is None or (content := self._files.read(name)) is None:
            return None
        digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if _digest(target, code) != digest:
            self._files.discard(name, ValueError("it is not what was written"))
            return None
        return code

    def store(self, target: str, code: bytes) -> None:
        """Writes the object file of the handler `target` for later starts."""
        if (name := _name(target)) is not None:
            self._files.write(name, _digest(target, code) + code)


def _digest(target: str, code: bytes) -> bytes:
    """Returns what tells that a file is whole and has the code of this handler, and not of one that was renamed."""
    return hashlib.sha256(f"{target}\n".encode() + code).digest()


def _name(target: str) -> str | None:
    surroundings = _surroundings()
    return None if surroundings is None else hashlib.sha256(f"{target}\n{surroundings}".encode()).hexdigest()


@cache
def _surroundings() -> str | None:
    """Returns all that a kernel is compiled from, but for its name, which tells its options and the CPU's features.

    None: the sources are not here as files.
    """
    files = source_files(_SOURCES)
    return f"{digest_of(files, _SOURCES)} llvmlite {version('llvmlite')}" if files else None
