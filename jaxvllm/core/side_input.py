"""Side inputs: values that stand in a prompt where a token's embedding would stand, such as features of an image.

A prompt has token ids for all of its positions. A side input covers some of them: there the ids are placeholders, and
the model computes with the side input's rows. So whatever counts tokens need not know of it. What tells prompts apart
does: the hash of a page has the keys of the side inputs that reach into it.
"""

from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.errors import ParameterError

# The id at a position that has no token. It is in every vocabulary, and outputs show it, as in vLLM.
PLACEHOLDER = 0
_FLOAT = np.dtype("<f4")
_ROW_DIGEST = 16  # bytes
_DIGEST = 32  # bytes, also of keys
# Extra keys of pages may come from elsewhere one day. What they hash begins with what they are.
_KEY_KIND = b"side input"


@dataclass(frozen=True)
class SideInput:
    """Rows of values for the positions of a prompt from `first` on.

    `data` is float32, little-endian, row after row. Bytes cannot change, and they travel between processes as they are.
    """

    first: int
    hidden_size: int  # values in a row
    data: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if self.first < 0 or self.hidden_size < 1 or not self.data or len(self.data) % self._row_bytes:
            raise ValueError(
                f"a side input is one row or more of {self.hidden_size} values from position {self.first} on, not "
                f"{len(self.data)} bytes"
            )
        if not np.isfinite(self.values).all():
            row, column = np.argwhere(~np.isfinite(self.values))[0].tolist()
            raise ValueError(f"value {column} of row {row} is {self.values[row, column]}, and all must be finite")

    @classmethod
    def of(cls, first: int, values: NDArray[Any]) -> Self:
        """Makes one of an array [N, hidden_size], of any float dtype."""
        with np.errstate(over="ignore"):  # a float64 that is too large is told as infinite
            return cls(first, values.shape[1], values.astype(_FLOAT).tobytes())

    def __len__(self) -> int:
        return len(self.data) // self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return self.hidden_size * _FLOAT.itemsize

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.first + len(self)

    @property
    def values(self) -> NDArray[np.float32]:
        """The rows, f32[N, hidden_size], which are read-only."""
        return np.frombuffer(self.data, _FLOAT).reshape(-1, self.hidden_size)

    @cached_property
    def digest(self) -> bytes:
        """A hash of all rows, whatever their positions. It is computed once, on first use."""
        return blake2b(self.hidden_size.to_bytes(8, "big") + self._row_digests, digest_size=_DIGEST).digest()

    @cached_property
    def _row_digests(self) -> bytes:
        size, rows = self._row_bytes, memoryview(self.data)
        return b"".join(
            blake2b(rows[at : at + size], digest_size=_ROW_DIGEST).digest() for at in range(0, len(rows), size)
        )

    def key(self, start: int, end: int) -> bytes | None:
        """Returns a hash of the rows for the positions from `start` to `end` and of where they begin there, or None.

        None: it has no rows there. Rows elsewhere do not count, so that prompts with an equal beginning share pages.
        """
        first, last = max(start, self.first), min(end, self.end)
        if first >= last:
            return None
        rows = self._row_digests[(first - self.first) * _ROW_DIGEST : (last - self.first) * _ROW_DIGEST]
        place = (first - start).to_bytes(8, "big")
        return blake2b(place + rows, digest_size=_DIGEST, person=_KEY_KIND).digest()


@dataclass(frozen=True)
class SideInputRules:
    """The side inputs that an engine takes as prompts."""

    hidden_size: int
    largest: float  # that the dtype of the activations can hold

    def check(self, side: SideInput) -> None:
        """Raises ValueError for rows that the model cannot compute with."""
        if side.hidden_size != self.hidden_size:
            raise ParameterError(
                f"prompt_embeds has {side.hidden_size} values in a row, and the hidden state of this model has "
                f"{self.hidden_size}: give rows of its embedding table, or rows made for it",
                "prompt_embeds",
            )
        most = float(np.abs(side.values).max())
        if most > self.largest:
            raise ParameterError(
                f"prompt_embeds has a value of size {most:g}, and the model computes with {self.largest:g} at most: "
                "scale the values, or start the engine with dtype float32",
                "prompt_embeds",
            )
