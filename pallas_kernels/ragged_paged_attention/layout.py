"""The layout of KV pages in memory: one array for all layers, with values beside keys or within them."""

from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp

from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.ragged_paged_attention.quantize import KVQuantization

# f[L, P, K, S, W]: a token's key, then its value, on the last axis. A page of one head is contiguous, so one copy
# fetches its keys and values; heads of 64 fill a TPU's 128 lanes exactly, which [.., S, 64] would leave half empty.
# In latent attention (arXiv 2405.04434) the end of a key is its value, and is stored once. Where a token has scales of
# its own, they stand between its key and its value, so that both begin and end where they would without.
type KVPages = jax.Array

PAGE_SIZES = (16, 32, 64, 128)
# Heads are padded to a multiple of this: 64 keys and 64 values are the TPU's 128 lanes, and 64 two-byte elements the
# 128 bytes that a GPU's copy engine swizzles. A CPU's largest vector has 16 elements.
HEAD_ALIGNMENT = {"reference": 1, "tpu": 64, "gpu": 64, "cpu": 16}
# Values of latents begin and end at multiples of this: a whole register on a TPU, as they do where keys lie beside
# values, and on a GPU the widest swizzle for each of the two warpgroups that share them.
LATENT_ALIGNMENT = {"reference": 1, "tpu": 128, "gpu": 128, "cpu": 16}
# The GPU's kernels keep the sums of a tile of queries in registers, and larger heads do not fit. Beside the queries of
# latents, and keys of 576 (DeepSeek V3), shared memory has room for two blocks of the latter, but not of wider ones.
LARGEST_GPU_HEAD, LARGEST_GPU_KEY = 256, 576


def backend_for(head_size: int, backend: Backend, latent_size: int | None = None) -> Backend:
    """Returns `backend`, or the reference where its kernels have no such heads: of 512 (Gemma 4), or latents with keys
    of an index (DeepSeek V3.2)."""
    largest = LARGEST_GPU_HEAD if latent_size is None else LARGEST_GPU_KEY
    is_missing = backend.kind == "gpu" and RowLayout.of(head_size, latent_size, backend).key_size > largest
    return REFERENCE if is_missing else backend


def padded_head_size(head_size: int, backend: Backend) -> int:
    """Returns the head size D of the pages that `backend` reads, for a model's `head_size`."""
    return _up_to(head_size, HEAD_ALIGNMENT[backend.kind])


@dataclass(frozen=True)
class RowLayout:
    """A row of a page has `width` elements of a token, of which the first are its key, and the last its value."""

    key_size: int
    value_size: int
    width: int

    @classmethod
    def of(
        cls, head_size: int, latent_size: int | None, backend: Backend, quantization: KVQuantization | None = None
    ) -> Self:
        """Returns how `backend` lays out keys of `head_size` and as large values, or values that are the last
        `latent_size` elements of their keys.

        Raises NotImplementedError where it has no scales of single tokens.
        """
        by_token = quantization is not None and quantization.by_token
        if by_token and (latent_size is not None or backend.kind not in ("reference", "cpu")):
            what = f"the {backend.kind} kernels read" if latent_size is None else "latent attention has"
            raise NotImplementedError(
                f"{what} no scales of single tokens (kv_cache_dtype int8_per_token_head, fp8_per_token_head): take "
                "kv_cache_dtype fp8"
            )
        if latent_size is None:
            padded = padded_head_size(head_size, backend)
            return cls(padded, padded, 2 * padded + (0 if quantization is None else quantization.scale_bytes))
        value_size = _up_to(latent_size, LATENT_ALIGNMENT[backend.kind])
        # Where rows are copied by whole registers, keys begin at one, too.
        alignment = 128 if backend.kind == "tpu" else HEAD_ALIGNMENT[backend.kind]
        width = max(_up_to(head_size, alignment), value_size)
        return cls(width, value_size, width)

    @property
    def is_latent(self) -> bool:
        """Whether the value is a part of the key."""
        return self.width == self.key_size

    def key(self, x: jax.Array) -> jax.Array:
        """Returns queries or keys f[.., head size] with zeros up to `key_size`: before those of latents, so that their
        ends meet."""
        return _padded(x, self.key_size, in_front=self.is_latent)

    def row(self, k: jax.Array, v: jax.Array | None, between: jax.Array | None = None) -> jax.Array:
        """Returns keys and values, and what is between them, as rows [.., width] of pages."""
        parts = [self.key(k), between, None if v is None else self.key(v)]
        return jnp.concatenate([part for part in parts if part is not None], axis=-1)

    def value(self, out: jax.Array, size: int) -> jax.Array:
        """Returns the `size` elements that a value has before it is padded, of values f[.., D]."""
        return out[..., out.shape[-1] - size :] if self.is_latent else out[..., :size]


def _up_to(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _padded(x: jax.Array, size: int, *, in_front: bool) -> jax.Array:
    missing = size - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(missing, 0) if in_front else (0, missing)])


def kv_pages_struct(
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: jnp.dtype,
    backend: Backend,
    latent_size: int | None = None,
    quantization: KVQuantization | None = None,
) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of the pages of a whole model. Page 0 is the trash page, to which padding writes.

    With `latent_size`, the last so many elements of a key are its value. `dtype` is that of keys and values which have
    no `quantization`.
    """
    width = RowLayout.of(head_size, latent_size, backend, quantization).width
    held = dtype if quantization is None else quantization.held_in(backend)
    return jax.ShapeDtypeStruct((num_layers, num_pages, num_kv_heads, page_size, width), held)
