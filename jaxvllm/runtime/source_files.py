"""Source files, and a digest that changes whenever one of them does."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path


def source_files(directory: Path) -> list[Path]:
    """Returns every file in a directory of sources, in order, without what Python keeps beside them."""
    files = []
    for folder, folders, names in os.walk(directory):  # pathlib's own walk takes twice as long
        folders[:] = [name for name in folders if name != "__pycache__"]
        files += [f"{folder}{os.sep}{name}" for name in names]
    return [Path(file) for file in sorted(files)]  # to compare paths took 4 ms, a sixth of the digest


def digest_of(files: Iterable[Path], root: Path) -> str:
    """Returns a digest of the contents of files and of their paths below `root`, in hexadecimal digits."""
    digest, before = hashlib.sha256(), f"{root}{os.sep}"
    for path in files:
        content = path.read_bytes()
        digest.update(f"{str(path).removeprefix(before)} {len(content)}\n".encode() + content)
    return digest.hexdigest()
