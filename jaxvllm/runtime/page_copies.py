"""Copies of KV pages: out of the pool into arrays of their own, and from such arrays into pages of a pool."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import batched

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from numpy.typing import NDArray

from jaxvllm.core.page_pool import TRASH_PAGE
from jaxvllm.core.step_plan import Ints
from jaxvllm.models.layer_memory import PAGE_AXES
from jaxvllm.runtime.cache_shape import (
    DRAFT_PAGE_AXES,
    AbstractCachePages,
    KVCachePages,
    array_groups,
    array_owners,
)
from jaxvllm.runtime.recipe import Recipe
from sharding.placement import of_replicas, place, replica_meshes
from sharding.rules import DATA

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
    ids = (packed[group] for group in array_groups(kv_pages, len(packed)))
    arrays = zip(jax.tree.leaves(kv_pages), ids, strict=True)
    return tuple(jnp.moveaxis(jnp.take(pages, at, axis=1), 1, 0) for pages, at in arrays)


def put_pages(kv_pages: KVCachePages, packed: jax.Array, contents: PageContents) -> KVCachePages:
    """Writes `contents` into the pages `packed` i32[groups, COPY_BATCH]. `kv_pages` are donated."""
    groups = array_groups(kv_pages, len(packed))

    def put_page(at: jax.Array, arrays: list[jax.Array]) -> list[jax.Array]:
        return [
            lax.dynamic_update_index_in_dim(pages, new[at], packed[group, at], axis=1)
            for group, pages, new in zip(groups, arrays, contents, strict=True)
        ]

    arrays, tree = jax.tree.flatten(kv_pages)
    filled: KVCachePages = jax.tree.unflatten(tree, lax.fori_loop(0, COPY_BATCH, put_page, arrays))
    return filled


def contents_like(pages: AbstractCachePages, num_groups: int, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the abstract `PageContents` of each replica of `mesh`, one after the other in each array.

    The arrays of their cache are like `pages`, of which codes are [L, P, K, S, W].
    """
    spread, of_drafts = (
        place(mesh)((pages, layers, *others)) for layers, pages, *others in (PAGE_AXES, DRAFT_PAGE_AXES)
    )
    count = mesh.shape[DATA] * COPY_BATCH
    return tuple(
        jax.ShapeDtypeStruct(
            (count, x.shape[0], *x.shape[2:]), x.dtype, sharding=spread if owner < num_groups else of_drafts
        )
        for owner, x in zip(array_owners(pages), jax.tree.leaves(pages), strict=True)
    )


class PageCopier:
    """Copies pages of one of the replicas of a mesh: out of its pool, and into it.

    The programs are for all replicas together, as their cache is. The others copy their trash pages meanwhile.
    """

    def __init__(
        self,
        pages: AbstractCachePages,
        num_groups: int,
        mesh: Mesh,
        make: Callable[[Recipe], jax.stages.Compiled],
    ):
        """Compiles nothing before the first copy. The arrays of the cache are like `pages`."""
        self._num_groups = num_groups
        self._num_replicas = mesh.shape[DATA]
        self._of_all = contents_like(pages, num_groups, mesh)
        # The `PageContents` of each replica, on its devices.
        self.contents_like = [contents_like(pages, num_groups, own) for own in replica_meshes(mesh)]
        packed = of_replicas(mesh, (num_groups, COPY_BATCH), jnp.int32)
        specs = jax.tree.map(lambda x: x.sharding.spec, self._of_all) if mesh.size > 1 else None
        take = Recipe(take_pages, (pages, packed), mesh, out_specs=specs)
        put = Recipe.changing(put_pages, (pages, packed, self._of_all), mesh)
        self._take = cache(lambda: make(take))
        self._put = cache(lambda: make(put))
        # What replicas write into their trash pages while another one's pages are filled.
        self._nothing = cache(lambda: [jax.device_put(np.zeros(x.shape, x.dtype), x.sharding) for x in self._of_all])

    def take(self, kv_pages: KVCachePages, pages: Sequence[Ints], replica: int) -> list[PageContents]:
        """Copies pages of `replica`, i32[N] of each group, after all steps that were dispatched.

        It returns at once. Each entry has the next `COPY_BATCH` pages; what is after the last one means nothing.
        """
        taken = []
        for packed in pack_pages(pages, self._num_groups):
            of_all = self._take()(kv_pages, self._for_all(packed, replica))
            arrays = zip(self.contents_like[replica], of_all, strict=True)
            taken.append(tuple(_joined(like, [array]) for like, array in arrays))
        return taken

    def put(self, kv_pages: KVCachePages, pages: Sequence[Ints], contents: PageContents, replica: int) -> KVCachePages:
        """Returns the cache with at most `COPY_BATCH` pages of `replica` filled. `kv_pages` are donated.

        `contents` are on the devices of the replica.
        """
        [packed] = pack_pages(pages, self._num_groups)
        if self._num_replicas > 1:
            arrays = zip(self._of_all, contents, self._nothing(), strict=True)
            contents = tuple(_joined(like, [own, nothing]) for like, own, nothing in arrays)
        result: KVCachePages = self._put()(kv_pages, self._for_all(packed, replica), contents)
        return result

    def _for_all(self, packed: NDArray[np.int32], replica: int) -> NDArray[np.int32]:
        """Returns `packed` for `replica`, and trash pages for the others."""
        of_all = np.full((self._num_replicas, *packed.shape), TRASH_PAGE, np.int32)
        of_all[replica] = packed
        return of_all.reshape(-1, COPY_BATCH)


def _joined(like: jax.ShapeDtypeStruct, arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns an array like `like` of the parts of `arrays` that are on its devices already, the first ones' first."""
    parts = {shard.device: shard.data for array in reversed(arrays) for shard in array.addressable_shards}
    own = [parts[device] for device in like.sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, own)
