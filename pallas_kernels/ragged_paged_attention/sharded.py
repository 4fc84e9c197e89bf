"""Ragged paged attention with the heads spread over a mesh axis: each device attends with its own, nothing is sent."""

from functools import partial

import jax
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.ragged_paged_attention.api import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.layout import KVPages
from pallas_kernels.ragged_paged_attention.rows import RaggedRows


def sharded_ragged_paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_pages: KVPages,
    layer: jax.Array | int,
    rows: RaggedRows,
    *,
    mesh: Mesh,
    axis: str,
    scale: float,
    soft_cap: float | None = None,
    window: jax.Array | int,
    sinks: jax.Array | None = None,
    kv_scales: jax.Array | None = None,
    backend: Backend = REFERENCE,
) -> tuple[jax.Array, KVPages]:
    """`ragged_paged_attention` on arrays whose heads are sharded over `axis` of `mesh`; everything else is replicated.

    A query head lives where its KV head does, so there are no collectives. Raises ValueError when the KV heads do not
    divide by the size of the axis (replicate them first), and what `ragged_paged_attention` raises for a shard.
    """
    num_kv_heads, size = kv_pages.shape[2], mesh.shape[axis]
    if num_kv_heads % size:
        raise ValueError(
            f"{num_kv_heads} KV heads do not divide over the {size} devices of mesh axis {axis!r}: replicate them, "
            "or use a mesh that divides them"
        )
    heads, everywhere = PartitionSpec(None, axis), PartitionSpec()
    pages = PartitionSpec(None, None, axis)

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(heads, heads, heads, pages, everywhere, everywhere, everywhere, PartitionSpec(axis), heads),
        out_specs=(heads, pages),
        check_vma=False,  # a Pallas call does not say over which axes its output varies
    )
    def shard(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        kv_pages: KVPages,
        layer: jax.Array,
        rows: RaggedRows,
        window: jax.Array | int,
        sinks: jax.Array | None,
        kv_scales: jax.Array | None,
    ) -> tuple[jax.Array, KVPages]:
        return ragged_paged_attention(
            q, k, v, kv_pages, layer, rows, scale=scale, soft_cap=soft_cap, window=window, sinks=sinks,
            kv_scales=kv_scales, backend=backend,
        )  # fmt: skip

    return shard(q, k, v, kv_pages, layer, rows, window, sinks, kv_scales)
