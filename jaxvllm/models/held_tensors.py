"""`HeldTensors`: the tensors of a checkpoint that are in memory, by the names that they would have in its files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxvllm.models.tiling import Fill, copied
from jaxvllm.models.weight_names import Source


@dataclass(frozen=True)
class HeldTensors:
    """Arrays of NumPy or jax, such as those of a trainer. One on a device is copied to the host when it is read."""

    arrays: Mapping[str, Any]

    @property
    def names(self) -> set[str]:
        return set(self.arrays)

    def where(self, name: str) -> str:
        """Returns the place of a tensor, for errors."""
        return "the given weights"

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor that is there."""
        return tuple(np.shape(self.arrays[name]))

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ValueError if the tensor is missing, or has another shape or no floating-point numbers."""
        if name not in self.arrays:
            raise ValueError(f"the given weights lack the tensor {name}, which should have shape {shape}")
        array = self.arrays[name]
        if getattr(array, "shape", None) != shape:
            found = getattr(array, "shape", type(array).__name__)
            raise ValueError(f"the given tensor {name} has shape {found}, and the config makes it {shape}")
        # bfloat16 is no floating-point number to NumPy.
        if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
            raise ValueError(f"the given tensor {name} has dtype {array.dtype}: give floating-point numbers")

    def fill(self, source: Source) -> Fill:
        """Returns the function that fills a part of our array. Raises ValueError as `check` does."""
        self.check(source.name, source.shape)
        return copied(source.part_of(np.asarray(self.arrays[source.name])))
