"""Forks on the device: a slot becomes a copy of another, with a page of its own where that one's is partly filled."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from jaxvllm.core.page_pool import TRASH_PAGE
from jaxvllm.core.step_plan import Fork
from jaxvllm.runtime.cache_shape import KVCachePages, array_groups
from jaxvllm.runtime.slot_fields import ASKED, HISTORY, LENGTH, PAGE_TABLES, DeviceState, SlotSizes
from jaxvllm.runtime.state import slot_fields

# Forks that one `fork_slots` call does.
FORK_BATCH = 16
_HEAD = 3  # source, slot, token
_PER_GROUP = 3  # column, page to copy from, page to copy to


def pack_forks(forks: Sequence[Fork], sizes: SlotSizes) -> NDArray[np.int32]:
    """Returns i32[FORK_BATCH, words] for `fork_slots`.

    Unused rows go to no slot, and copy the trash page onto itself.
    """
    assert len(forks) <= FORK_BATCH
    packed = np.zeros((FORK_BATCH, _HEAD + _PER_GROUP * sizes.num_groups), np.int32)
    packed[:, 0] = sizes.trash_slot
    packed[:, 1] = sizes.trash_slot + 1  # past the trash slot, so dropped
    of_groups = packed[:, _HEAD:].reshape(FORK_BATCH, sizes.num_groups, _PER_GROUP)
    of_groups[:] = sizes.max_pages, TRASH_PAGE, TRASH_PAGE  # past the last column, so dropped
    for row, fork in enumerate(forks):
        packed[row, :_HEAD] = fork.source, fork.slot, fork.token_id
        for group, copy in enumerate(fork.copies):
            if copy is not None:
                of_groups[row, group] = copy.column, copy.source, copy.page
    return packed


def fork_slots(
    kv_pages: KVCachePages, state: DeviceState, packed: jax.Array, sizes: SlotSizes
) -> tuple[KVCachePages, DeviceState]:
    """Does the forks of `pack_forks`. `kv_pages` and `state` are donated.

    All of them read the slots as they were before, and their slots are distinct.
    """
    sources, slots, tokens = packed[:, 0], packed[:, 1], packed[:, 2]
    of_groups = packed[:, _HEAD:].reshape(len(packed), sizes.num_groups, _PER_GROUP)
    columns, old_pages, new_pages = jnp.moveaxis(of_groups, 2, 0)
    names = (*(field.name for field in slot_fields(sizes) if not field.is_asked), ASKED)
    of_slots: DeviceState = {name: state[name] for name in names}
    forked = jax.tree.map(lambda values: values.at[slots].set(values[sources], mode="drop"), of_slots)
    last = state[LENGTH.name][sources] - 1
    forked[HISTORY.name] = forked[HISTORY.name].at[slots, last].set(tokens, mode="drop")
    tables = forked[PAGE_TABLES.name]
    for group in range(sizes.num_groups):
        tables = tables.at[slots, group, columns[:, group]].set(new_pages[:, group], mode="drop")
    forked[PAGE_TABLES.name] = tables

    group_of = array_groups(kv_pages, sizes.num_groups)

    def copy_page(row: jax.Array, arrays: list[jax.Array]) -> list[jax.Array]:
        return [
            lax.dynamic_update_index_in_dim(
                pages,
                lax.dynamic_index_in_dim(pages, old_pages[row, group], axis=1, keepdims=False),
                new_pages[row, group],
                axis=1,
            )
            for group, pages in zip(group_of, arrays, strict=True)
        ]

    arrays, tree = jax.tree.flatten(kv_pages)
    return jax.tree.unflatten(tree, lax.fori_loop(0, len(packed), copy_page, arrays)), state | forked
