"""`LayerMemory`: what a layer keeps of the tokens before the ones that a step computes, and how that is laid out.

The host asks a memory for the bytes and the arrays of its pages, and knows no layout. Layers whose memories are equal
share their pages. Today there is one kind: keys and values in pages that grow with a request or slide with a window.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.backend import Backend
from pallas_kernels.ragged_paged_attention import (
    KVPages,
    RaggedRows,
    kv_pages_struct,
    plan_rows,
    ragged_paged_attention,
)


@dataclass(frozen=True)
class LayerMemory:
    """Keys and values of the tokens that a layer sees. It is frozen and hashable."""

    num_kv_heads: int
    head_size: int
    window: int | None  # the last positions that are seen; None: all, so that the pages of a request never get free

    # The logical axes of the pages of several layers, [L, P, K, S, 2 D].
    AXES: ClassVar[tuple[str | None, ...]] = ("layers", None, "kv_heads", None, None)

    def pages(
        self, num_layers: int, num_pages: int, page_size: int, dtype: DTypeLike, backend: Backend
    ) -> jax.ShapeDtypeStruct:
        """Returns the pages of layers with this memory, as `backend` lays them out."""
        sizes = (num_layers, num_pages, page_size, self.num_kv_heads, self.head_size)
        return kv_pages_struct(*sizes, jnp.dtype(dtype), backend)

    @property
    def token_elements(self) -> int:
        """The numbers that are kept of each token, without what pads them."""
        return 2 * self.num_kv_heads * self.head_size

    def seeing(self, window: int | None) -> Self:
        """Returns this memory with another window."""
        return replace(self, window=window)

    def plan(self, rows: RaggedRows, pages: KVPages, num_heads: int, dtype: DTypeLike, backend: Backend) -> Any:
        """Makes what the backend knows once a step about queries of `num_heads` heads in these rows."""
        return plan_rows(rows, pages, num_heads=num_heads, dtype=dtype, backend=backend)

    def attend(
        self,
        pages: KVPages,
        place: jax.Array | int,
        rows: RaggedRows,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        window: jax.Array | int,
        **options: Any,
    ) -> tuple[jax.Array, KVPages]:
        """Writes k and v, if they are given, into the pages of layer `place`, and attends as the kernels' API says."""
        return ragged_paged_attention(q, k, v, pages, place, rows, window=window, **options)
