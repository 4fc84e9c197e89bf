"""A name for the weights of a directory, so that engines can tell whether they have the same model."""

import hashlib
from pathlib import Path

from jaxvllm.models.orbax_tree import TREE

# Bytes that are read of each file: its beginning, where safetensors lists all tensors, and some places after it.
_BEGINNING = 1 << 16
_SAMPLE = 1 << 12
_NUM_SAMPLES = 16


def weights_name(directory: Path) -> str:
    """Returns 16 hexadecimal digits that differ, very probably, between models and between versions of their weights.

    It reads some 128 kB of each file, wherever the directory is: copies of a model on two machines have the same name.
    """
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    tree = directory / TREE
    for file in sorted((*directory.glob("*.safetensors"), *(path for path in tree.rglob("*") if path.is_file()))):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(directory)} {size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_BEGINNING))
            for number in range(_NUM_SAMPLES):
                stream.seek(size * number // _NUM_SAMPLES)
                digest.update(stream.read(_SAMPLE))
    return digest.hexdigest()[:16]
