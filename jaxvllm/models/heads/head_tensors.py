"""`HeadTensors`: the tensors of draft heads in their files, of which none may be ignored."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import numpy as np

from jaxvllm.models.heads.head import Declarations
from jaxvllm.models.heads.kinds import open_draft
from jaxvllm.models.kv_scales import KV_SCALE_ENDS
from jaxvllm.models.params import Params
from jaxvllm.models.safetensors_files import WeightFiles
from jaxvllm.models.weight_names import Source

# Tensors that say again what others say.
_REDUNDANT = ("t2d",)


class HeadTensors:
    """The tensors of heads, among those of `files`. Each of the `own` must be used."""

    def __init__(self, files: WeightFiles, own: Iterable[str]):
        # Heads are not calibrated: what their pages hold has no scales here.
        self._files, self._left = files, {name for name in own if not name.endswith(KV_SCALE_ENDS)}

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Opens a directory that has nothing but heads."""
        files = open_draft(directory)
        return cls(files, files.names - set(_REDUNDANT))

    def __contains__(self, name: str) -> bool:
        return name in self._files.names

    def take(self, name: str, *shape: int) -> np.ndarray:
        self._left.discard(name)
        return self._files.tensor(name, shape)

    def those(self, names: Mapping[str, str]) -> frozenset[str]:
        """Returns the keys of the tensors in `names` that are there."""
        return frozenset(key for key, name in names.items() if name in self)

    def named(self, decls: Declarations, names: Mapping[str, str]) -> Params:
        """Returns the arrays that are declared and have a tensor in `names`."""
        return {key: self.take(name, *decls[key].shape) for key, name in names.items() if key in decls}

    def layer(self, decls: Declarations, sources: Mapping[str, tuple[Source, ...]]) -> Params:
        """Returns the arrays of a layer, of which `sources` tells the parts. The rest of an array is zeros."""
        layer: Params = {}
        for name, parts in sources.items():
            taken = [part.part_of(self.take(part.name, *part.shape)) for part in parts]
            layer[name] = np.zeros(decls[name].shape, taken[0].dtype)
            for part, array in zip(parts, taken, strict=True):
                layer[name][tuple(slice(at, at + size) for at, size in zip(part.at, part.view, strict=True))] = array
        return layer

    def num_rows(self, name: str) -> int:
        """Returns how many rows the tensor has, or 0 if it is missing."""
        file = self._files.file_of.get(name)
        return 0 if file is None else (*self._files.files[file].tensors[name].shape, 1)[0]

    def integers(self, name: str, *shape: int) -> np.ndarray:
        self._left.discard(name)
        return self._files.integers(name, shape)

    def end(self) -> None:
        if self._left:
            name = min(self._left)
            raise ValueError(
                f"{self._files.directory}: unexpected tensor {name}: a head of this kind has none of that name, and "
                "ignoring it would change what it guesses"
            )


@contextmanager
def told_of(directory: Path) -> Iterator[None]:
    """Lets an error about a config say which it is."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error
