"""Machine code of our kernels for CPUs on disk, which all models share: a start with another model compiles none again.

A file is code, so it is found in a directory that belongs to this user and that nobody else can write to.
"""

import hashlib
import logging
from functools import cache
from importlib.metadata import version
from pathlib import Path

from jaxvllm.runtime.entry_files import EntryFiles

logger = logging.getLogger(__name__)

# A kernel is an object file of 10 to 60 KB, and a model has five or so.
MAX_BYTES = 2**26
_DIGEST_BYTES = 32
_SOURCES = Path(__file__).parents[2] / "pallas_kernels"


class StoredKernels:
    """Object files by the names of their handlers, for the sources and the compiler of this process."""

    def __init__(self, directory: Path):
        """Opens those in `directory`, which must be private (`entry_files.make_private`), and cleans it up."""
        self._files = EntryFiles(directory, "-kernel", is_private=True)
        self._files.clean_up(MAX_BYTES)

    def load(self, target: str) -> bytes | None:
        """Returns the object file of the handler `target`, or None if there is none that is whole."""
        content = self._files.read(_name(target))
        if content is None:
            return None
        digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(code).digest() != digest:
            self._files.discard(_name(target), ValueError("it is not what was written"))
            return None
        return code

    def store(self, target: str, code: bytes) -> None:
        """Writes the object file of the handler `target` for later starts."""
        self._files.write(_name(target), hashlib.sha256(code).digest() + code)


def _name(target: str) -> str:
    return hashlib.sha256(f"{target}\n{_surroundings()}".encode()).hexdigest()


@cache
def _surroundings() -> str:
    """Returns all that a kernel is compiled from, but for its name, which tells its options and the CPU's features."""
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(_SOURCES)} {len(content)}\n".encode() + content)
    return f"{digest.hexdigest()} llvmlite {version('llvmlite')}"
