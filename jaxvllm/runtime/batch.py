"""The batch: a plan, padded to its bucket and packed into ONE int32 array, which is all that a step sends."""

from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.plan import NOT_SCORED, StepPlan
from jaxvllm.runtime.buckets import Bucket

_NUM_COLUMNS = 7  # slots, starts, lengths, new_pages, samples, decodes, next_tokens


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["slots", "starts", "lengths", "new_pages", "samples", "decodes", "token_ids", "next_tokens"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Batch:
    """A `StepPlan` on the device, R rows and T tokens of a bucket. Padding rows: trash slot, length 0."""

    slots: jax.Array  # i32[R]
    starts: jax.Array  # i32[R]
    lengths: jax.Array  # i32[R]
    new_pages: jax.Array  # i32[R]
    samples: jax.Array  # bool[R]
    decodes: jax.Array  # bool[R]: the input token is the slot's last one
    token_ids: jax.Array  # i32[T]; 0 where a decode row reads the state
    next_tokens: jax.Array  # i32[R]: behind a row whose tokens are scored, else NOT_SCORED


def packed_size(bucket: Bucket) -> int:
    """int32 words of a packed batch. A decode bucket sends no token ids."""
    return _NUM_COLUMNS * bucket.num_rows + (0 if bucket.is_decode else bucket.num_tokens)


def pack(plan: StepPlan, bucket: Bucket, trash_slot: int) -> NDArray[np.int32]:
    """i32[packed_size(bucket)] of `plan`."""
    count = plan.num_rows
    packed = np.zeros(packed_size(bucket), np.int32)
    columns = packed[: _NUM_COLUMNS * bucket.num_rows].reshape(_NUM_COLUMNS, bucket.num_rows)
    columns[0, count:] = trash_slot
    columns[0, :count] = plan.slots
    columns[1, :count] = plan.starts
    columns[2, :count] = plan.lengths
    columns[3, :count] = plan.new_pages
    columns[4, :count] = plan.samples
    columns[5, : plan.num_decode] = 1
    columns[6, count:] = NOT_SCORED
    columns[6, :count] = plan.next_tokens
    if not bucket.is_decode:
        first = columns.size + plan.num_decode
        packed[first : first + len(plan.token_ids)] = plan.token_ids
    return packed


def unpack(packed: jax.Array, bucket: Bucket) -> Batch:
    """The inverse of `pack`, traced."""
    size = _NUM_COLUMNS * bucket.num_rows
    columns = packed[:size].reshape(_NUM_COLUMNS, bucket.num_rows)
    slots, starts, lengths, new_pages, samples, decodes, next_tokens = columns
    token_ids = jax.numpy.zeros(bucket.num_tokens, jax.numpy.int32) if bucket.is_decode else packed[size:]
    return Batch(slots, starts, lengths, new_pages, samples != 0, decodes != 0, token_ids, next_tokens)
