"""The layout of KV pages in memory: one array for all layers, with values beside keys or within them."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.chips import GpuChip
from pallas_kernels.ragged_paged_attention.quantize import KVQuantization

# f[L, P, K, S, W]: a token's key, then its value, on the last axis. A page of one head is contiguous, so one copy
# fetches its keys and values; heads of 64 fill a TPU's 128 lanes exactly, which [.., S, 64] would leave half empty.
# In latent attention (arXiv 2405.04434) the end of a key is its value, and is stored once.
type KVPages = jax.Array | ScaledPages
type AbstractPages = jax.ShapeDtypeStruct | ScaledPages  # whose arrays are abstract


class ScaledPages(NamedTuple):
    """Pages of codes, and the scales of their tokens in an array beside them, which has the same page numbers.

    A page has for each head the scales of S keys, and after them those of S values, which latents have not. Tokens
    follow each other, as keys do in the logits that are multiplied. Within a row of codes, scales would fit neither the
    128 lanes of a TPU nor the swizzled copies of a GPU.
    """

    codes: jax.Array  # [L, P, K, S, W]
    scales: jax.Array  # f32[L, P, K, N, S], N of one or two; on TPUs see `scale_shape`


# XLA:TPU keeps arrays whose rows fill 128 lanes in the order of their axes. Of f32[L, P, 8, 2, 64] it makes P the last
# axis, and copies all of it for each call of the kernel.
SCALE_LANES = 128


def scale_shape(page_size: int, num_scales: int, backend: Backend) -> tuple[int, int]:
    """Returns the last two axes of the scales of pages, whose tokens have `num_scales` each."""
    if backend.kind != "tpu":
        return num_scales, page_size
    return -(-num_scales * page_size // SCALE_LANES), SCALE_LANES


def check_scaled_heads(num_kv_heads: int) -> None:
    """Raises NotImplementedError where a TPU's pages of so many KV heads cannot have scales of tokens.

    The rows of a page's scales must be whole registers of eight, or divide one: XLA copies all of them otherwise.
    """
    if num_kv_heads % 8 and num_kv_heads not in (1, 2, 4):
        raise NotImplementedError(
            "the tpu kernel has scales of tokens (kv_cache_dtype int8_per_token_head, fp8_per_token_head) for 1, 2, 4 "
            f"or a multiple of 8 KV heads on each device, not for {num_kv_heads}: take kv_cache_dtype fp8"
        )


def codes_of[A](pages: A | ScaledPages) -> A | jax.Array:
    """Returns the pages without the scales of their tokens."""
    return pages.codes if isinstance(pages, ScaledPages) else pages


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
# The query heads of a KV head are rows of one tile of theirs, which has so many. Those over latents are divided.
LARGEST_GPU_GROUP = 64
# The first numbers of the compute capabilities of GPUs whose matrix units have instructions for a warp alone. Those of
# Hopper (9) and of B200 (10) work for a whole warpgroup.
WARP_GENERATIONS = (7, 8, 12)


def takes_warps(chip: GpuChip) -> bool:
    """Returns whether attention on this GPU is that of the kernels `gpu_mma`, and not that of `gpu`."""
    return chip.compute_capability[0] in WARP_GENERATIONS


def shares_keys_with_few(group: int, latent_size: int | None = None) -> bool:
    """Returns whether the kernels for GPUs take `group` query heads for each KV head."""
    return latent_size is not None or group <= LARGEST_GPU_GROUP


def backend_for(head_size: int, backend: Backend, latent_size: int | None = None, group: int = 1) -> Backend:
    """Returns `backend`, or the reference where its kernels have no such heads: of 512 (Gemma 4), or latents with keys
    of an index (DeepSeek V3.2). GPUs before Hopper, and those of GeForce and RTX PRO, have no kernel for latents, and
    none has one for more query heads with a KV head, `group`, than `shares_keys_with_few` says."""
    if not isinstance(backend.chip, GpuChip):
        return backend
    largest = LARGEST_GPU_HEAD if latent_size is None else LARGEST_GPU_KEY
    has_heads = RowLayout.of(head_size, latent_size, backend).key_size <= largest
    is_missing = latent_size is not None and takes_warps(backend.chip)
    is_taken = has_heads and not is_missing and shares_keys_with_few(group, latent_size)
    return backend if is_taken else REFERENCE


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
    def of(cls, head_size: int, latent_size: int | None, backend: Backend) -> Self:
        """Returns how `backend` lays out keys of `head_size` and as large values, or values that are the last
        `latent_size` elements of their keys."""
        if latent_size is None:
            padded = padded_head_size(head_size, backend)
            return cls(padded, padded, 2 * padded)
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

    @property
    def num_scales(self) -> int:
        """The scales of a token whose key and value have scales of their own."""
        return 1 if self.is_latent else 2

    def row(self, k: jax.Array, v: jax.Array | None) -> jax.Array:
        """Returns keys and values as rows [.., width] of pages."""
        return self.key(k) if v is None else jnp.concatenate([self.key(k), self.key(v)], axis=-1)

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
) -> AbstractPages:
    """Returns shapes and dtypes of the pages of a whole model. Page 0 is the trash page, to which padding writes.

    With `latent_size`, the last so many elements of a key are its value. `dtype` is that of keys and values which have
    no `quantization`. Raises NotImplementedError where the backend has no scales of tokens for so many heads.
    """
    layout = RowLayout.of(head_size, latent_size, backend)
    held = dtype if quantization is None else quantization.held_in(backend)
    heads = num_layers, num_pages, num_kv_heads
    codes = jax.ShapeDtypeStruct((*heads, page_size, layout.width), held)
    if quantization is None or not quantization.by_token:
        return codes
    if backend.kind == "tpu":
        check_scaled_heads(num_kv_heads)
    shape = *heads, *scale_shape(page_size, layout.num_scales, backend)
    abstract: Any = codes, jax.ShapeDtypeStruct(shape, jnp.float32)
    return ScaledPages(*abstract)
