"""The layout of KV pages in memory: one array for all layers, with keys beside values."""

import jax
import jax.numpy as jnp

from pallas_kernels.backend import REFERENCE, Backend

# f[L, P, K, S, 2 * D]: a token's keys, then its values, on the last axis. A page of one head is contiguous, so one copy
# fetches its keys and values; heads of 64 fill a TPU's 128 lanes exactly, which [.., S, 64] would leave half empty.
type KVPages = jax.Array

PAGE_SIZES = (16, 32, 64, 128)
# Heads are padded to a multiple of this: 64 keys and 64 values are the TPU's 128 lanes, and 64 two-byte elements the
# 128 bytes that a GPU's copy engine swizzles. A CPU's largest vector has 16 elements.
HEAD_ALIGNMENT = {"reference": 1, "tpu": 64, "gpu": 64, "cpu": 16}
# The GPU's kernels keep a tile of queries of one head in registers, and larger ones do not fit.
LARGEST_GPU_HEAD = 256


def backend_for(head_size: int, backend: Backend) -> Backend:
    """Returns `backend`, or the reference where its kernels have no heads of that size (Gemma 4 has heads of 512)."""
    return REFERENCE if backend.kind == "gpu" and head_size > LARGEST_GPU_HEAD else backend


def padded_head_size(head_size: int, backend: Backend) -> int:
    """Returns the head size D of the pages that `backend` reads, for a model's `head_size`."""
    alignment = HEAD_ALIGNMENT[backend.kind]
    return -(-head_size // alignment) * alignment


def kv_pages_struct(
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: jnp.dtype,
    backend: Backend,
) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of the pages of a whole model. Page 0 is the trash page, to which padding writes."""
    width = 2 * padded_head_size(head_size, backend)
    return jax.ShapeDtypeStruct((num_layers, num_pages, num_kv_heads, page_size, width), dtype)
