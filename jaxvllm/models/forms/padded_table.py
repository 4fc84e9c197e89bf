"""A table for TPUs, or an LM head, whose rows are filled up to whole tiles so that each of them lies in one place."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms.form import Arrays, Form
from jaxvllm.models.forms.plain import xla_product

LANES = 128
ROWS = "rows"


@dataclass(frozen=True)
class PaddedTable(Form):
    """A table [V, width] is [V, padded], with zeros after each row, up to a multiple of 128 numbers.

    Unless 128 divides their width, XLA:TPU keeps a table with its columns side by side, which needs no padding, and
    copies it to look up rows: 1.1 GiB in each step of gpt-oss (201,088 rows of 2,880). So padded, it takes 2% more. The
    LM head was copied as well, where prompts have log-probabilities.
    """

    width: int

    def declare(self, matrix: ParamDecl) -> dict[str, ParamDecl]:
        return {ROWS: replace(matrix, shape=(*matrix.shape[:-1], self.width + self._missing))}

    def keep(self, matrix: jax.Array, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        return {ROWS: jax.jit(self._filled_up, out_shardings=shardings[ROWS])(matrix)}

    def plain(self, arrays: Arrays) -> jax.Array:
        return arrays[ROWS][..., : self.width]

    def product(self, x: jax.Array, arrays: Arrays, dtype: DTypeLike | None, is_slice: bool = False) -> jax.Array:
        return xla_product(self._filled_up(x), arrays[ROWS], dtype, is_slice)

    def look_up(self, arrays: Arrays, numbers: jax.Array) -> jax.Array:
        return jnp.take(arrays[ROWS], numbers, axis=0, mode="clip")[..., : self.width]

    @property
    def _missing(self) -> int:
        return -self.width % LANES

    def _filled_up(self, rows: jax.Array) -> jax.Array:
        return jnp.pad(rows, ((0, 0), (0, self._missing)))
