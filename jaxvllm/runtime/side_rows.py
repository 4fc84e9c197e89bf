"""The side store on the device: rows that take the place of embeddings at positions that have no token.

It lies in the state, as the suffix index does: it belongs to no slot, and engines that take no side inputs do not have
it. `core/side_store.py` says which row has what.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.side_input import PLACEHOLDER
from jaxvllm.core.side_store import SideRows

SIDE_ROWS = "side_rows"
# Rows that one `store_side_rows` call brings in: 4 MiB for a hidden state of 4096.
SIDE_BATCH = 256


@dataclass(frozen=True)
class SideShape:
    """The size of the store."""

    num_rows: int
    hidden_size: int
    dtype: jnp.dtype  # of the activations

    def new(self) -> dict[str, jax.Array]:
        """Returns the part of the state that is the store."""
        return {SIDE_ROWS: jnp.zeros((self.num_rows, self.hidden_size), self.dtype)}

    def pack(self, filled: SideRows) -> list[NDArray[np.int32]]:
        """Returns the arguments of `store_side_rows`, i32[SIDE_BATCH, 1 + E] each: a row's number and its bits."""
        packed = []
        for first in range(0, len(filled.rows), SIDE_BATCH):
            rows = filled.rows[first : first + SIDE_BATCH]
            packed.append(self.nothing())
            packed[-1][: len(rows), 0] = rows
            packed[-1][: len(rows), 1:] = filled.side.values[first : first + SIDE_BATCH].view(np.int32)
        return packed

    def nothing(self) -> NDArray[np.int32]:
        """Returns an argument of `store_side_rows` that changes no row."""
        packed = np.zeros((SIDE_BATCH, 1 + self.hidden_size), np.int32)
        packed[:, 0] = self.num_rows  # past all, so dropped
        return packed


def store_side_rows(state: dict[str, jax.Array], packed: jax.Array) -> dict[str, jax.Array]:
    """Stores rows that `SideShape.pack` has packed, in the dtype of the store. `state` is donated."""
    store = state[SIDE_ROWS]
    values = jax.lax.bitcast_convert_type(packed[:, 1:], jnp.float32).astype(store.dtype)
    return state | {SIDE_ROWS: store.at[packed[:, 0]].set(values, mode="drop")}


def known_tokens(state: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
    """Returns the token ids of a step's `inputs`, i32[T]: placeholders where they are rows of the store."""
    return jnp.where(inputs < 0, PLACEHOLDER, inputs) if SIDE_ROWS in state else inputs
