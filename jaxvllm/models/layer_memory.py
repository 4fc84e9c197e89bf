"""`LayerMemory`: what a layer keeps of the tokens before the ones that a step computes, and how that is laid out.

The host asks a memory for the bytes and the arrays of its pages, and knows no layout. Layers whose memories are equal
share their pages. There are two kinds: keys and values, in pages that grow with a request or slide with a window
(`KeysAndValues`), and states, of which each page holds one (`state_memory.py`).
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.backend import Backend
from pallas_kernels.ragged_paged_attention import (
    NO_WINDOW,
    AbstractPages,
    ChosenPositions,
    IndexQueries,
    KVPages,
    KVQuantization,
    RaggedRows,
    backend_for,
    choose_positions,
    kv_pages_struct,
    plan_rows,
    ragged_paged_attention,
)

# The logical axes of the pages of several layers, [L, P, K, S, W]: each page has S rows of W numbers for each of K
# heads, whatever they mean.
PAGE_AXES: tuple[str | None, ...] = ("layers", "pages", "kv_heads", None, None)


class LayerMemory(Protocol):
    """The memory of a layer. It is frozen and hashable."""

    @property
    def num_kv_heads(self) -> int:
        """The heads over which devices divide a page, K."""

    @property
    def window(self) -> int | None:
        """The last positions that are seen; None: all, so that the pages of a request never get free."""

    @property
    def keeps_state(self) -> bool:
        """Whether a page holds the state after its last token, instead of something of each of its tokens."""

    def backend(self, backend: Backend) -> Backend:
        """Returns the backend that reads and writes these pages where the engine has that one."""

    def pages(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        dtype: DTypeLike,
        backend: Backend,
        quantization: KVQuantization | None = None,
    ) -> AbstractPages:
        """Returns the abstract pages of layers with this memory, as `backend` lays them out.

        Keys are in `dtype`, or have a `quantization`, which no state has.
        """

    def page_bytes(self, page_size: int, dtype: DTypeLike, quantization: KVQuantization | None = None) -> int:
        """Returns the bytes of a page of one layer, without what pads it, where keys are stored as `pages` says."""

    def seeing(self, window: int | None) -> Self:
        """Returns this memory with another window."""


@dataclass(frozen=True)
class KeysAndValues:
    """Keys and values of the tokens that a layer sees, side by side in a row of a page for each token.

    With `latent_size`, the last so many elements of a key are its value, and are kept once (latent attention).
    """

    num_kv_heads: int
    head_size: int  # of a key
    window: int | None
    latent_size: int | None = None
    # A token sees nothing before its chunk, which begins at a multiple of this (Llama 4); None: all in the window.
    chunk: int | None = None

    keeps_state: ClassVar[bool] = False

    def backend(self, backend: Backend) -> Backend:
        return backend_for(self.head_size, backend, self.latent_size)

    def attention_backend(self, num_heads: int, backend: Backend) -> Backend:
        """Returns the backend that attends with `num_heads` query heads: plain XLA where kernels take no such groups.

        It reads the pages of kernels, so `backend` tells nothing of it.
        """
        return backend_for(self.head_size, backend, self.latent_size, num_heads // self.num_kv_heads)

    def pages(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        dtype: DTypeLike,
        backend: Backend,
        quantization: KVQuantization | None = None,
    ) -> AbstractPages:
        if self.chunk is not None and self.chunk % page_size:
            raise ValueError(
                f"page_size {page_size} must divide the {self.chunk} positions of a chunk of attention: take a smaller "
                "one"
            )
        sizes = (num_layers, num_pages, page_size, self.num_kv_heads, self.head_size)
        return kv_pages_struct(*sizes, jnp.dtype(dtype), self.backend(backend), self.latent_size, quantization)

    def page_bytes(self, page_size: int, dtype: DTypeLike, quantization: KVQuantization | None = None) -> int:
        parts = 2 if self.latent_size is None else 1
        itemsize, of_scale = jnp.dtype(dtype).itemsize, 0
        if quantization is not None:
            itemsize, of_scale = 1, quantization.scale_bytes
        token = parts * (self.head_size * itemsize + of_scale)
        return self.num_kv_heads * token * page_size

    def seeing(self, window: int | None) -> Self:
        return replace(self, window=window)

    def seen_by(self, rows: RaggedRows, page_size: int) -> RaggedRows:
        """Returns the rows as `plan` and `attend` take them, which is made once a step."""
        return rows if self.chunk is None else rows.in_chunks(self.chunk, page_size)

    def plan(self, rows: RaggedRows, pages: KVPages, num_heads: int, dtype: DTypeLike, backend: Backend) -> Any:
        """Makes what the backend knows once a step about queries of `num_heads` heads in these rows."""
        options: dict[str, Any] = {"num_heads": num_heads, "dtype": dtype, "latent_size": self.latent_size}
        return plan_rows(rows, pages, backend=self.backend(backend), **options)

    def choose(
        self,
        pages: KVPages,
        place: jax.Array | int,
        rows: RaggedRows,
        k: jax.Array,
        index: IndexQueries,
        backend: Backend,
        **options: Any,
    ) -> tuple[ChosenPositions, KVPages]:
        """Writes the keys of latents into the pages of layer `place`, and returns what `index` chooses.

        `options` say how the pages hold keys, as in the kernels' API.
        """
        assert self.latent_size is not None, "an index chooses among latents"
        size, own = self.latent_size, self.backend(backend)
        return choose_positions(k, pages, place, rows, index, latent_size=size, backend=own, **options)

    def attend(
        self,
        pages: KVPages,
        place: jax.Array | int,
        rows: RaggedRows,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        window: jax.Array | int,
        backend: Backend,
        **options: Any,
    ) -> tuple[jax.Array, KVPages]:
        """Writes k and v, if they are given, into the pages of layer `place`, and attends as the kernels' API says."""
        num_tokens, more = len(q), len(rows.token_rows) - len(q)
        if more:  # padding that the rows of chunks have
            padding = ((0, more), (0, 0), (0, 0))
            q = jnp.pad(q, padding)
            k, v = (x if x is None else jnp.pad(x, padding) for x in (k, v))
        out, pages = ragged_paged_attention(
            q,
            k,
            v,
            pages,
            place,
            rows,
            window=window if self.chunk is None else NO_WINDOW,
            latent_size=self.latent_size,
            backend=self.backend(backend),
            **options,
        )
        return out[:num_tokens], pages
