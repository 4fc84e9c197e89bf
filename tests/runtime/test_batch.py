"""A plan survives the way to the device: packed into one array, unpacked in a compiled program."""

from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxvllm.core.plan import NOT_SCORED, StepPlan
from jaxvllm.runtime.batch import Batch, pack, packed_size, unpack
from jaxvllm.runtime.buckets import Bucket
from tests.runtime.plans import make_plan

TRASH = 77
BUCKETS = (Bucket(1, 1), Bucket(6, 6), Bucket(7, 6), Bucket(40, 6))


@cache
def unpack_in(bucket: Bucket) -> Any:
    return jax.jit(partial(unpack, bucket=bucket))


@st.composite
def buckets_and_plans(draw: st.DrawFn) -> tuple[Bucket, StepPlan]:
    bucket = draw(st.sampled_from(BUCKETS))
    num_decode = draw(st.integers(1 if bucket.is_decode else 0, bucket.num_rows))
    left = bucket.num_tokens - num_decode
    chunks = [] if bucket.is_decode else draw(st.lists(st.integers(1, 9), max_size=bucket.num_rows - num_decode))
    while sum(chunks) > left:
        chunks.pop()
    return bucket, make_plan(num_decode, chunks, first_slot=draw(st.integers(0, 50)))


@settings(max_examples=60)
@given(buckets_and_plans())
def test_round_trip(drawn: tuple[Bucket, StepPlan]) -> None:
    bucket, plan = drawn
    packed = pack(plan, bucket, TRASH)
    assert packed.shape == (packed_size(bucket),) and packed.dtype == np.int32
    batch: Batch = jax.tree.map(np.asarray, unpack_in(bucket)(packed))
    count, padding = plan.num_rows, bucket.num_rows - plan.num_rows
    for name in ("slots", "starts", "lengths", "new_pages", "samples", "next_tokens"):
        column = getattr(batch, name)
        assert column.shape == (bucket.num_rows,)
        np.testing.assert_array_equal(column[:count], getattr(plan, name), name)
    np.testing.assert_array_equal(batch.slots[count:], [TRASH] * padding)
    assert (batch.next_tokens[count:] == NOT_SCORED).all()
    # A padding row is empty, opens no page and keeps no token.
    for column in (batch.starts, batch.lengths, batch.new_pages, batch.samples):
        assert not column[count:].any()
    assert batch.decodes.tolist() == [True] * plan.num_decode + [False] * (bucket.num_rows - plan.num_decode)
    tokens = np.zeros(bucket.num_tokens, np.int32)
    tokens[plan.num_decode : plan.num_tokens] = plan.token_ids
    np.testing.assert_array_equal(batch.token_ids, tokens)
    assert (batch.samples.dtype, batch.decodes.dtype, batch.token_ids.dtype) == (np.bool_, np.bool_, np.int32)


def test_a_decode_step_sends_no_tokens() -> None:
    assert packed_size(Bucket(64, 64)) == 64 * packed_size(Bucket(1, 1)) == 64 * 7
    assert packed_size(Bucket(512, 64)) == 64 * 7 + 512


def test_a_plan_too_large_for_its_bucket_is_our_bug() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        pack(make_plan(7), Bucket(6, 6), TRASH)
