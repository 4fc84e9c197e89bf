"""`EncodedFiles`: the tensors of a checkpoint as if none were quantized. Parts are decoded when they are read.

What is stored of a tensor can be read as well, for forms that keep it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxvllm.models.kv_scales import KV_SCALE_ENDS
from jaxvllm.models.published.encoding import Encoding
from jaxvllm.models.published.parts import Part, ScaledCodes
from jaxvllm.models.safetensors_files import DTYPES, WeightFiles
from jaxvllm.models.tiling import Box, Fill
from jaxvllm.models.weight_names import Source

# So many elements are decoded at a time. For 15 million integers of four bits this takes 41 ms, and pieces of a quarter
# of this size take 60, of four times this size 82.
_MOST = 1 << 20


@dataclass(frozen=True)
class EncodedFiles:
    """The tensors of `files`, of which an encoding stores some in several parts: `parts` has the names of these."""

    files: WeightFiles
    encoding: Encoding
    parts: Mapping[str, tuple[str, ...]]  # by the name that a tensor would have if it were not quantized

    @classmethod
    def of(cls, files: WeightFiles, encoding: Encoding) -> "EncodedFiles":
        parts: dict[str, tuple[str, ...]] = defaultdict(tuple)
        for name in sorted(files.names):
            # Scales of keys and values are parts of no matrix.
            own = {} if name.endswith(KV_SCALE_ENDS) else encoding.ends
            ends = ((end, whole) for end, whole in own.items() if name.endswith(end))
            end, whole = next(ends, ("", ""))
            parts[name.removesuffix(end) + whole] += (name,)
        return cls(files, encoding, dict(parts))

    @property
    def names(self) -> set[str]:
        return set(self.parts)

    def where(self, name: str) -> str:
        """Returns the file of a tensor, or of the first of its parts."""
        return self.files.where(self.parts[name][0])

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor that is not quantized."""
        header = self.files.header(name)
        assert header is not None, name
        return header.shape

    def is_bias_of_zeros(self, name: str) -> bool:
        """Returns whether a tensor is a bias that adds nothing, such as AutoGPTQ wrote where a matrix has none."""
        header = self.files.header(name)
        if header is None or header.dtype not in DTYPES or not name.endswith(".bias"):
            return False
        return not self.files.tensor(name, header.shape).any()

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ValueError if the tensor or a part of it is missing, or another one. Nothing of it is read."""
        self._part(name, shape)

    def fill(self, source: Source) -> Fill:
        """Returns the function that fills a part of our array. Raises ValueError as `check` does."""
        part = self._part(source.name, source.shape)
        return self.files.fill(source) if part is None else decoded(part, source)

    def codes(self, source: Source) -> ScaledCodes | None:
        """Returns what is stored of the tensor of `source`, if that is codes and scales. Raises as `check` does."""
        part = self._part(source.name, source.shape)
        return part if isinstance(part, ScaledCodes) else None

    def _part(self, name: str, shape: tuple[int, ...]) -> Part | None:
        part = self.encoding.part(self.files, name, shape)
        if part is None:
            self.files.check(name, shape)
            for other in self.parts[name]:
                if other != name:
                    raise ValueError(f"{self.files.where(other)} has {other}, and the tensor {name} is not quantized")
        return part


def decoded(part: Part, source: Source) -> Fill:
    """Returns the function that fills with the values of `part`, which has the whole tensor of `source`."""
    start, steps = source.steps()

    def fill(out: np.ndarray, first: tuple[int, ...]) -> None:
        for box in Box(first, out.shape).pieces(_MOST):
            # The smallest box of the tensor that has all of these elements, and our way through it.
            corner = tuple(s + _dot(step, box.start) for s, step in zip(start, steps, strict=True))
            shape = tuple(1 + _dot(step, (size - 1 for size in box.shape)) for step in steps)
            values = part(Box(corner, shape))
            strides = [_dot(axis, values.strides) for axis in zip(*steps, strict=True)]
            out[box.index(first)] = np.lib.stride_tricks.as_strided(values, box.shape, strides, writeable=False)

    return fill


def _dot(a: Iterable[int], b: Iterable[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))
