"""A plan survives the way to the device: packed into one array, unpacked in a compiled program."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxvllm.core.step_plan import NOT_SCORED, PageEntries, StepPlan
from jaxvllm.runtime.batch import Batch, pack, packed_size, unpack
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.slot_fields import SlotSizes
from tests.runtime.plans import make_plan

TRASH = 77
SIZES = SlotSizes(TRASH, max_pages=800, page_size=4, vocab_size=70, windows=(None,))
BUCKETS = (Bucket(1, 1), Bucket(6, 6), Bucket(6, 6, width=9), Bucket(7, 6), Bucket(40, 6))


@cache
def unpack_in(bucket: Bucket) -> Any:
    return jax.jit(partial(unpack, bucket=bucket, sizes=SIZES))


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
    packed = pack(plan, bucket, SIZES)
    assert packed.shape == (packed_size(bucket, SIZES),) and packed.dtype == np.int32
    batch: Batch = jax.tree.map(np.asarray, unpack_in(bucket)(packed))
    count, padding = plan.num_rows, bucket.num_rows - plan.num_rows
    assert batch.num_steps == plan.row_tokens
    for name in ("slots", "starts", "lengths", "max_new"):
        column = getattr(batch, name)
        assert column.shape == (bucket.num_rows,)
        np.testing.assert_array_equal(column[:count], getattr(plan, name), name)
    # Nine tokens open three pages of four at most, and a plan of one step has one. Chunks open one for four tokens.
    [opened], [entries] = batch.new_pages, plan.new_pages
    by_chunks = 0 if bucket.is_decode else bucket.num_tokens // SIZES.page_size
    assert opened.pages.shape == opened.at.shape == (bucket.num_rows * (3 if bucket.width == 9 else 1) + by_chunks,)
    np.testing.assert_array_equal(opened.pages[: len(entries)], entries.pages)
    np.testing.assert_array_equal(opened.at[: len(entries)] // SIZES.max_pages, entries.slots)
    np.testing.assert_array_equal(opened.at[: len(entries)] % SIZES.max_pages, entries.columns)
    assert not opened.pages[len(entries) :].any()
    np.testing.assert_array_equal(batch.slots[count:], [TRASH] * padding)
    assert batch.is_scored.tolist() == [*(plan.next_tokens != NOT_SCORED), *[False] * padding]
    # A padding row is empty and keeps no token.
    for column in (batch.starts, batch.lengths, batch.max_new):
        assert not column[count:].any()
    assert batch.decodes.tolist() == [True] * plan.num_decode + [False] * (bucket.num_rows - plan.num_decode)
    tokens = np.zeros(bucket.num_tokens, np.int32)
    tokens[plan.num_decode : plan.num_tokens] = plan.token_ids
    np.testing.assert_array_equal(batch.token_ids, tokens)
    assert (batch.max_new.dtype, batch.decodes.dtype, batch.token_ids.dtype) == (np.int32, np.bool_, np.int32)


@pytest.mark.parametrize("bucket", [Bucket(6, 6), Bucket(40, 6)], ids=repr)
def test_each_group_s_pages_go_to_its_own_tables(bucket: Bucket) -> None:
    sizes = replace(SIZES, windows=(None, 5))
    # Chunks open pages: in 40 tokens up to 10, and each row one that it begins.
    most = [6 if bucket.is_decode else 16] * 2
    numbers = [np.arange(count, dtype=np.int32) for count in most]
    entries = tuple(PageEntries(n % 6, 600 + n, 300 + n) for n in numbers)
    packed = pack(replace(make_plan(6), new_pages=entries), bucket, sizes)
    assert packed.shape == (packed_size(bucket, sizes),)
    batch: Batch = jax.tree.map(np.asarray, jax.jit(partial(unpack, bucket=bucket, sizes=sizes))(packed))
    for group, (opened, sent) in enumerate(zip(batch.new_pages, entries, strict=True)):
        np.testing.assert_array_equal(opened.pages, sent.pages)
        places = np.unravel_index(opened.at, (TRASH + 1, 2, SIZES.max_pages))
        np.testing.assert_array_equal(places, [sent.slots, np.full(len(sent), group), sent.columns])
    np.testing.assert_array_equal(batch.slots, make_plan(6).slots)


def test_a_decode_step_sends_no_tokens() -> None:
    assert packed_size(Bucket(64, 64), SIZES) - 1 == 64 * (packed_size(Bucket(1, 1), SIZES) - 1) == 64 * 8
    assert packed_size(Bucket(512, 64), SIZES) == 1 + 64 * 8 + 2 * 512 // 4 + 512


def test_a_plan_too_large_for_its_bucket_is_our_bug() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        pack(make_plan(7), Bucket(6, 6), SIZES)
