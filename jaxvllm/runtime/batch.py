"""The batch: a plan, padded to its bucket and packed into ONE int32 array, which is all that a step sends."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.page_pool import pages_for
from jaxvllm.core.step_plan import NOT_SCORED, StepPlan
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.slot_fields import SlotSizes

_NUM_COLUMNS = 6  # slots, starts, lengths, max_new, decodes, is_scored


@partial(jax.tree_util.register_dataclass, data_fields=["pages", "at"], meta_fields=[])
@dataclass(frozen=True)
class OpenedPages:
    """Entries of the page tables of one group, N at most."""

    pages: jax.Array  # i32[N]; 0: no entry
    at: jax.Array  # i32[N], indices into the flattened tables of all slots and groups


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "num_steps",
        "slots",
        "starts",
        "lengths",
        "max_new",
        "decodes",
        "is_scored",
        "new_pages",
        "token_ids",
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class Batch:
    """A `StepPlan` on the device, R rows and T tokens of a bucket. Padding rows have the trash slot and length 0."""

    num_steps: jax.Array  # i32: decode steps to take, at most the bucket's width
    slots: jax.Array  # i32[R]
    starts: jax.Array  # i32[R]; of decode rows, which the state has, only a bound
    lengths: jax.Array  # i32[R]
    max_new: jax.Array  # i32[R]: tokens that the row may yield
    decodes: jax.Array  # bool[R]: the input token is the slot's last one
    is_scored: jax.Array  # bool[R]: each of its tokens is read, and not the last one alone
    new_pages: tuple[OpenedPages, ...]  # one a group
    token_ids: jax.Array  # i32[T]; 0 where a decode row reads the state; -1 - r is row r of the side store


def max_new_pages(bucket: Bucket, sizes: SlotSizes) -> tuple[int, ...]:
    """Returns the most pages of each group that the rows of `bucket` open.

    A row whose last page has no room opens `pages_for` what it computes. So do tokens that a constraint forced, and
    prompts where there is a window; elsewhere these have all their pages from their admission on.
    """
    by_rows = bucket.num_rows * pages_for(bucket.row_tokens, sizes.page_size)
    by_chunks = 0 if bucket.is_decode else bucket.num_tokens // sizes.page_size
    return (by_rows + by_chunks,) * len(sizes.windows)


def packed_size(bucket: Bucket, sizes: SlotSizes) -> int:
    """Returns the number of int32 words of a packed batch. A decode bucket sends no token ids."""
    num_entries = sum(max_new_pages(bucket, sizes))
    return 1 + _NUM_COLUMNS * bucket.num_rows + 2 * num_entries + (0 if bucket.is_decode else bucket.num_tokens)


def pack(plan: StepPlan, bucket: Bucket, sizes: SlotSizes) -> NDArray[np.int32]:
    """Returns `plan` as i32[packed_size(bucket, sizes)]."""
    count = plan.num_rows
    packed = np.zeros(packed_size(bucket, sizes), np.int32)
    packed[0] = plan.num_steps
    first = 1 + _NUM_COLUMNS * bucket.num_rows
    columns = packed[1:first].reshape(_NUM_COLUMNS, bucket.num_rows)
    columns[0, count:] = sizes.trash_slot
    columns[0, :count] = plan.slots
    columns[1, :count] = plan.starts
    columns[2, :count] = plan.lengths
    columns[3, :count] = plan.max_new
    columns[4, : plan.num_decode] = 1
    columns[5, :count] = plan.next_tokens != NOT_SCORED
    for group, (entries, most) in enumerate(zip(plan.new_pages, max_new_pages(bucket, sizes), strict=True)):
        if count := len(entries):
            pages, at = packed[first : first + 2 * most].reshape(2, most)
            pages[:count] = entries.pages
            at[:count] = (entries.slots * sizes.num_groups + group) * sizes.max_pages + entries.columns
        first += 2 * most
    if not bucket.is_decode:
        first += plan.num_decode
        packed[first : first + len(plan.token_ids)] = plan.token_ids
    return packed


def unpack(packed: jax.Array, bucket: Bucket, sizes: SlotSizes) -> Batch:
    """Returns what was packed: the inverse of `pack`, as a traced function."""
    first = 1 + _NUM_COLUMNS * bucket.num_rows
    columns = packed[1:first].reshape(_NUM_COLUMNS, bucket.num_rows)
    slots, starts, lengths, max_new, decodes, is_scored = columns
    new_pages = []
    for most in max_new_pages(bucket, sizes):
        new_pages.append(OpenedPages(packed[first : first + most], packed[first + most : first + 2 * most]))
        first += 2 * most
    token_ids = jnp.zeros(bucket.num_tokens, jnp.int32) if bucket.is_decode else packed[first:]
    flags = decodes != 0, is_scored != 0
    return Batch(packed[0], slots, starts, lengths, max_new, *flags, tuple(new_pages), token_ids)
