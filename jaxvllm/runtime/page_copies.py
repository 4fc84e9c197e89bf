"""Copies of KV pages: out of the pool into arrays of their own, and from such arrays into pages of a pool."""

from collections.abc import Sequence
from itertools import batched

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from jaxvllm.core.page_pool import TRASH_PAGE
from jaxvllm.core.step_plan import Ints
from jaxvllm.models.layer_memory import PAGE_AXES
from jaxvllm.runtime.cache_shape import KVCachePages
from jaxvllm.runtime.recipe import Recipe
from sharding.placement import place

# Pages of a group that one program copies. Sixteen of an 8B model's are 32 MiB in bfloat16.
COPY_BATCH = 16

# What some pages hold, of each array of the cache: [COPY_BATCH, L, K, S, W].
type PageContents = tuple[jax.Array, ...]


def pack_pages(pages: Sequence[Ints], num_groups: int) -> list[NDArray[np.int32]]:
    """Returns i32[groups, COPY_BATCH] for each call that copies `pages`, i32[N] of each group, in their order.

    The trash page fills the last one up.
    """
    columns = np.stack([np.asarray(of_group, np.int32) for of_group in pages], axis=1)
    packed = []
    for some in batched(columns, COPY_BATCH):
        packed.append(np.full((num_groups, COPY_BATCH), TRASH_PAGE, np.int32))
        packed[-1][:, : len(some)] = np.stack(some, axis=1)
    return packed


def take_pages(kv_pages: KVCachePages, packed: jax.Array) -> PageContents:
    """Copies the pages `packed` i32[groups, COPY_BATCH] out of `kv_pages`, which stay as they are."""
    ids = (packed[group] for group in _groups(len(kv_pages), len(packed)))
    return tuple(jnp.moveaxis(jnp.take(pages, at, axis=1), 1, 0) for pages, at in zip(kv_pages, ids, strict=True))


def put_pages(kv_pages: KVCachePages, packed: jax.Array, contents: PageContents) -> KVCachePages:
    """Writes `contents` into the pages `packed` i32[groups, COPY_BATCH]. `kv_pages` are donated."""
    groups = _groups(len(kv_pages), len(packed))

    def put_page(at: jax.Array, kv_pages: KVCachePages) -> KVCachePages:
        return tuple(
            lax.dynamic_update_index_in_dim(pages, new[at], packed[group, at], axis=1)
            for group, pages, new in zip(groups, kv_pages, contents, strict=True)
        )

    kv_pages = lax.fori_loop(0, COPY_BATCH, put_page, kv_pages)
    return kv_pages


def _groups(num_arrays: int, num_groups: int) -> list[int]:
    """Returns the group of each array. A proposer's arrays, the last ones, have the first group's page numbers."""
    return [at if at < num_groups else 0 for at in range(num_arrays)]


def contents_like(
    pages: tuple[jax.ShapeDtypeStruct, ...], num_groups: int, mesh: Mesh
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the abstract `PageContents` of a cache whose arrays are like `pages`, which are [L, P, K, S, W]."""
    layers, _, *others = PAGE_AXES
    spread, everywhere = place(mesh)((None, layers, *others)), NamedSharding(mesh, PartitionSpec())
    return tuple(
        jax.ShapeDtypeStruct(
            (COPY_BATCH, x.shape[0], *x.shape[2:]), x.dtype, sharding=spread if at < num_groups else everywhere
        )
        for at, x in enumerate(pages)
    )


def copy_recipes(pages: tuple[jax.ShapeDtypeStruct, ...], num_groups: int, mesh: Mesh) -> tuple[Recipe, Recipe]:
    """Returns the recipes of `take_pages` and `put_pages` for a cache whose arrays are like `pages`."""
    packed = jax.ShapeDtypeStruct((num_groups, COPY_BATCH), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    contents = contents_like(pages, num_groups, mesh)
    take = Recipe(take_pages, (pages, packed), mesh, out_shardings=jax.tree.map(lambda x: x.sharding, contents))
    where = jax.tree.map(lambda x: x.sharding, pages)
    put = Recipe(put_pages, (pages, packed, contents), mesh, donates=(0,), out_shardings=where)
    return take, put
