"""`Panels`: the order in which a packed matrix lies in memory."""

from dataclasses import dataclass
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import NDArray

from pallas_kernels.chips import CpuChip

WORD = 4  # bytes of the inputs of an output that lie together


@dataclass(frozen=True)
class Panels:
    """A matrix [.., out, in] lies in panels of some outputs: [.., panels, in / depth, columns, depth].

    A kernel that goes through the inputs of a panel reads memory from its beginning to its end. What the last panel and
    the last inputs lack is zeros.

    columns: the outputs of a panel, `CpuChip.panel_columns`
    depth: how many inputs of an output lie together, because one instruction multiplies them: a word of 1 float32, of 2
        bfloat16 or of 4 numbers of eight bits
    """

    columns: int
    depth: int

    @classmethod
    def of(cls, chip: CpuChip, dtype: DTypeLike) -> Self:
        """Returns the order in which a chip reads matrices of `dtype`."""
        return cls(chip.panel_columns, WORD // jnp.dtype(dtype).itemsize)

    def shape(self, *matrix: int) -> tuple[int, ...]:
        """Returns the shape in which a matrix of that shape lies."""
        *others, outs, ins = matrix
        return (*others, -(-outs // self.columns), -(-ins // self.depth), self.columns, self.depth)

    def packed(self, matrix: NDArray[Any]) -> NDArray[Any]:
        """Returns a matrix [.., out, in] in panels. It is a new array."""
        *others, outs, ins = matrix.shape
        panels, blocks, columns, depth = self.shape(outs, ins)
        whole = np.zeros((*others, panels * columns, blocks * depth), matrix.dtype)
        whole[..., :outs, :ins] = matrix
        parts = whole.reshape(*others, panels, columns, blocks, depth)
        return np.ascontiguousarray(np.swapaxes(parts, -3, -2))

    def unpacked(self, panels: NDArray[Any], outs: int, ins: int) -> NDArray[Any]:
        """Returns the matrix [.., outs, ins] of these panels."""
        *others, count, blocks, columns, depth = panels.shape
        whole = np.swapaxes(panels, -3, -2).reshape(*others, count * columns, blocks * depth)
        return np.ascontiguousarray(whole[..., :outs, :ins])
