"""The ladder holds every plan that the scheduler can make, and a plan gets the smallest bucket that holds it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxvllm.core.step_plan import StepPlan
from jaxvllm.runtime.buckets import Bucket, BucketLadder, DraftRoom, powers_of_two, row_counts
from tests.runtime.plans import make_plan

COUNTS = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@st.composite
def ladders(draw: st.DrawFn) -> BucketLadder:
    rows, tokens = draw(COUNTS), draw(COUNTS)
    return BucketLadder.build(rows, [*tokens, max(rows) + draw(st.integers(0, 40))])


@st.composite
def ladders_and_plans(draw: st.DrawFn) -> tuple[BucketLadder, StepPlan]:
    """A ladder, and any plan within its largest rows and tokens."""
    ladder = draw(ladders())
    decode_rows = [bucket.num_rows for bucket in ladder.buckets if bucket.is_decode]
    max_rows = max(decode_rows)
    # With as many rows as tokens the ladder spends one more token; the scheduler's limit is without it.
    max_tokens = ladder.largest.num_tokens
    num_decode = draw(st.integers(0, max_rows))
    chunks: list[int] = []
    for _ in range(draw(st.integers(0 if num_decode else 1, max(max_rows - num_decode, 0 if num_decode else 1)))):
        left = max_tokens - num_decode - sum(chunks)
        if left > 0:
            chunks.append(draw(st.integers(1, left)))
    return ladder, make_plan(num_decode, chunks)


@given(ladders())
def test_smallest_first_and_no_two_alike(ladder: BucketLadder) -> None:
    sizes = [bucket.num_tokens for bucket in ladder.buckets if not bucket.is_decode]
    assert sizes == sorted(sizes)
    assert len(set(ladder.buckets)) == len(ladder.buckets)
    assert all(bucket.num_rows <= ladder.largest.num_rows for bucket in ladder.buckets)
    assert not ladder.largest.is_decode


@given(ladders_and_plans())
def test_the_largest_holds_every_plan_within_the_limits(drawn: tuple[BucketLadder, StepPlan]) -> None:
    ladder, plan = drawn
    assert ladder.largest.holds(plan)


@given(ladders_and_plans())
def test_chooses_the_cheapest_that_holds(drawn: tuple[BucketLadder, StepPlan]) -> None:
    ladder, plan = drawn
    chosen = ladder.choose(plan, ladder.buckets)
    assert chosen is not None
    assert chosen.num_rows >= plan.num_rows and chosen.num_tokens >= plan.num_tokens
    if chosen.is_decode:
        assert plan.num_decode == plan.num_rows == plan.num_tokens
    cheaper = [bucket for bucket in ladder.buckets if bucket < chosen]
    assert not any(bucket.holds(plan) for bucket in cheaper)
    if plan.num_decode == plan.num_rows:
        # A batch of decodes never pays for prefill tokens.
        assert chosen.is_decode


@given(ladders_and_plans())
def test_a_plan_with_masks_gets_as_many_tokens_as_rows_where_it_can(drawn: tuple[BucketLadder, StepPlan]) -> None:
    ladder, plan = drawn
    masked = replace(plan, masked=np.ones(plan.num_rows, np.bool_))
    chosen = ladder.choose(masked, (*ladder.buckets, *ladder.split))
    assert chosen is not None and not chosen.is_decode
    assert ladder.split[0].holds(masked) == chosen.is_split == (plan.num_tokens == plan.num_rows)
    if chosen.is_split:
        assert chosen.num_rows == min(bucket.num_rows for bucket in ladder.split if bucket.holds(masked))


@given(ladders_and_plans(), st.integers(1, 15), st.integers(1, 4))
def test_a_plan_with_drafts_gets_the_fewest_rows_with_as_many_drafts(
    drawn: tuple[BucketLadder, StepPlan], num_drafts: int, num_steps: int
) -> None:
    ladder, plan = drawn
    rows = [bucket.num_rows for bucket in ladder.buckets if bucket.is_decode]
    ladder = BucketLadder.build(rows, [ladder.largest.num_tokens], width=3, drafts=DraftRoom(num_drafts))
    plan = replace(plan, row_tokens=num_steps * (1 + num_drafts), num_drafts=num_drafts)
    assert plan.num_steps == num_steps
    chosen = ladder.choose(plan, (*ladder.buckets, *ladder.split, *ladder.drafted))
    if plan.num_decode < plan.num_rows or num_steps > 3:
        assert chosen is None
    else:
        least = min(count for count in rows if count >= plan.num_rows)
        assert chosen == Bucket(least * (1 + num_drafts), least, width=3, num_drafts=num_drafts)
        assert chosen in ladder.drafted and chosen.is_decode and chosen.row_tokens == 3 * (1 + num_drafts)
    without = replace(plan, row_tokens=1, num_drafts=0)
    assert ladder.choose(without, ladder.drafted) is None


def test_every_decode_bucket_has_one_with_drafts_the_smallest_first() -> None:
    ladder = BucketLadder.build([8, 1, 4], [16], width=2, drafts=DraftRoom(3))
    assert ladder.drafted[:3] == tuple(Bucket(4 * rows, rows, 2, num_drafts=3) for rows in (1, 4, 8))
    assert ladder.drafted[1] != Bucket(16, 4) and str(ladder.drafted[1]) == "decode 4 with 3 drafts each"
    assert BucketLadder.build([8, 1, 4], [16]).drafted == ()
    assert not set(ladder.drafted) & {*ladder.buckets, *ladder.split}


@pytest.mark.parametrize(
    ("num_drafts", "divided"),
    [(1, []), (2, [(2, 1, 1), (8, 4, 1)]), (3, [(3, 1, 2), (8, 4, 2)]), (5, [(4, 1, 3), (12, 4, 3)])],
)
def test_behind_these_come_some_whose_rows_have_half_as_many_on_average(
    num_drafts: int, divided: list[tuple[int, int, int]]
) -> None:
    ladder = BucketLadder.build([1, 4], [8], width=2, drafts=DraftRoom(num_drafts))
    assert ladder.drafted[2:] == tuple(Bucket(tokens, rows, 2, num_drafts=most) for tokens, rows, most in divided)
    for bucket in ladder.drafted:
        row_tokens = bucket.row_tokens
        plan = replace(make_plan(bucket.num_rows), row_tokens=row_tokens, num_drafts=bucket.num_drafts)
        assert ladder.choose(plan, (*ladder.buckets, *ladder.drafted)) == bucket
    if divided:
        text = {2: "4 drafts, up to 1", 3: "4 drafts, up to 2", 5: "8 drafts, up to 3"}[num_drafts]
        assert str(ladder.drafted[-1]) in (f"decode 4 with {text} each", "decode 4 with 1 drafts each")


@pytest.mark.parametrize(("overhead", "rows"), [(5, [1, 4]), (256, [1, 4, 8, 300]), (0, [])])
def test_drafts_that_nobody_asked_for_are_for_rows_that_may_gain_half(overhead: int, rows: list[int]) -> None:
    room = DraftRoom.where_they_pay(3, overhead)
    ladder = BucketLadder.build([8, 1, 4, 300, 330], [512], drafts=room)
    assert [bucket.num_rows for bucket in ladder.drafted] == 2 * rows and room.on_demand
    for count in (1, 4, 8, 300, 330):
        gain = 4 * (overhead + count) / (overhead + 4 * count)
        assert (gain >= 1.5) == (count in rows)


@given(ladders_and_plans())
def test_a_plan_runs_padded_while_smaller_ones_are_not_ready(drawn: tuple[BucketLadder, StepPlan]) -> None:
    ladder, plan = drawn
    assert ladder.choose(plan, [ladder.largest]) == ladder.largest
    assert ladder.choose(plan, []) is None


@pytest.mark.parametrize(
    ("bucket", "num_decode", "chunks", "fits"),
    [
        (Bucket(4, 4), 4, [], True),
        (Bucket(4, 4), 1, [], True),
        (Bucket(4, 4), 5, [], False),
        (Bucket(4, 4), 0, [1], False),  # one prefill token is not a decode: its input comes from the host
        (Bucket(4, 4), 1, [1], False),
        (Bucket(5, 4), 4, [], True),
        (Bucket(5, 4), 3, [2], True),
        (Bucket(5, 4), 3, [3], False),
        (Bucket(16, 2), 1, [1, 1], False),
        (Bucket(4, 4, is_split=True), 2, [1, 1], True),
        (Bucket(4, 4, is_split=True), 1, [2], False),  # its rows own one token each
        (Bucket(4, 4, is_split=True), 5, [], False),
        (Bucket(16, 4, num_drafts=3), 4, [], False),  # the plan has no drafts
    ],
)
def test_what_a_bucket_holds(bucket: Bucket, num_decode: int, chunks: list[int], fits: bool) -> None:
    assert bucket.holds(make_plan(num_decode, chunks)) is fits


def test_the_default_ladder_is_short() -> None:
    # 256 rows and 2048 tokens, as on an accelerator: each bucket is a compilation.
    ladder = BucketLadder.build(powers_of_two(1, 256), powers_of_two(16, 2048))
    assert [bucket.num_rows for bucket in ladder.buckets if bucket.is_decode] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert [str(bucket) for bucket in ladder.buckets if not bucket.is_decode] == [
        "16 tokens x 8 rows",
        *(f"{tokens} tokens x {rows} rows" for tokens in (32, 64, 128, 256) for rows in (8, tokens // 2)),
        *(f"{tokens} tokens x {rows} rows" for tokens in (512, 1024, 2048) for rows in (8, 256)),
    ]
    assert str(ladder.buckets[3]) == "decode 8"


def test_the_smallest_for_prompts_is_compiled_first_then_what_holds_everything_then_decoding() -> None:
    ladder = BucketLadder.build([1, 4], [16, 32])
    assert ladder.compile_order()[:4] == (Bucket(16, 4), Bucket(32, 4), Bucket(4, 4), Bucket(1, 1))
    assert BucketLadder.build([4], [8]).compile_order() == (Bucket(8, 4), Bucket(4, 4))
    assert sorted(ladder.compile_order()) == sorted(ladder.buckets)


def test_as_many_rows_as_tokens_gets_one_token_more() -> None:
    ladder = BucketLadder.build([4], [4])
    assert ladder.largest == Bucket(5, 4)
    assert ladder.choose(make_plan(1, [1, 1, 1]), ladder.buckets) == Bucket(5, 4)


@given(st.integers(1, 100), st.integers(0, 3000))
def test_powers_of_two(smallest: int, more: int) -> None:
    counts = powers_of_two(smallest, smallest + more)
    assert (counts[0], counts[-1]) == (smallest, smallest + more)
    assert all(a < b <= 2 * a for a, b in zip(counts, counts[1:], strict=False))
    assert all(b == 2 * a for a, b in zip(counts[:-1], counts[1:-1], strict=False))


def test_row_counts_are_those_that_a_platform_computes_well() -> None:
    assert row_counts(64, "cpu") == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert row_counts(40, "cpu") == (1, 2, 4, 8, 16, 24, 32, 36, 40)
    assert row_counts(8, "cpu") == (1, 2, 4, 8)
    assert row_counts(64, "gpu") == powers_of_two(1, 64)
    assert row_counts(64, "tpu") == powers_of_two(2, 64)
    assert row_counts(1, "tpu") == (2,)


@pytest.mark.parametrize(("tokens", "rows"), [(0, 0), (4, 0), (3, 4), (-1, -1)])
def test_a_bucket_that_cannot_be(tokens: int, rows: int) -> None:
    with pytest.raises(ValueError, match="a bucket needs 0 < rows <= tokens"):
        Bucket(tokens, rows)


def test_a_split_bucket_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="do not say so"):
        Bucket(8, 4, is_split=True)
    with pytest.raises(ValueError, match="a bucket needs a width of 1"):
        Bucket(4, 4, width=2, is_split=True)


@pytest.mark.parametrize(
    "sizes",
    [
        dict(num_tokens=16, num_rows=4, num_drafts=2),
        dict(num_tokens=4, num_rows=4, num_drafts=1),
        dict(num_tokens=8, num_rows=4, num_drafts=-1),
        dict(num_tokens=5, num_rows=4, num_drafts=2),
    ],
)
def test_a_row_has_one_token_and_its_drafts(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a row has one token and its drafts"):
        Bucket(**sizes)


def test_a_bucket_with_drafts_is_one_program() -> None:
    with pytest.raises(ValueError, match="do not say so"):
        Bucket(16, 4, is_split=True, num_drafts=3)


@pytest.mark.parametrize(("rows", "tokens"), [([], [4]), ([4], []), ([8], [4]), ([4, 8], [7, 4])])
def test_a_ladder_that_cannot_be(rows: list[int], tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="buckets need rows and at least as many tokens"):
        BucketLadder.build(rows, tokens)


def test_what_guesses_may_be_spared_the_steps_that_it_follows() -> None:
    assert not BucketLadder.build([1, 4], [8], drafts=DraftRoom(3)).blind
    prompts = BucketLadder.build([1, 4], [8], drafts=DraftRoom(3, sees_prompts=True))
    assert set(prompts.blind) == {replace(b, is_blind=True) for b in prompts.buckets if not b.is_decode}
    all_ = BucketLadder.build([1, 4], [8], drafts=DraftRoom(3, sees_prompts=True, sees_decoding=True))
    assert set(all_.blind) == {replace(bucket, is_blind=True) for bucket in all_.buckets}


@given(ladders_and_plans())
def test_a_blind_plan_gets_the_blind_twin_of_its_bucket_and_no_other_plan_does(
    drawn: tuple[BucketLadder, StepPlan],
) -> None:
    ladder, plan = drawn
    ladder = replace(ladder, drafts=DraftRoom(2, sees_prompts=True, sees_decoding=True))
    seen = ladder.choose(plan, (*ladder.blind, *ladder.buckets))
    assert seen is not None and not seen.is_blind
    blind = replace(plan, is_blind=True)
    assert ladder.choose(blind, (*ladder.buckets, *ladder.blind)) == replace(seen, is_blind=True)
    assert ladder.choose(blind, ladder.buckets) == seen, "any other will do"


def test_what_guesses_sees_the_steps_that_it_guesses_for() -> None:
    with pytest.raises(ValueError, match="must see the steps"):
        Bucket(16, 4, num_drafts=3, is_blind=True)


@given(ladders_and_plans(), st.booleans())
def test_a_plan_without_adapters_costs_what_it_costs_where_there_are_none(
    drawn: tuple[BucketLadder, StepPlan], has_adapters: bool
) -> None:
    ladder, plan = drawn
    sizes = {(bucket.num_tokens, bucket.num_rows) for bucket in ladder.buckets}
    rows, tokens = zip(*((rows, tokens) for tokens, rows in sizes), strict=True)
    twins = BucketLadder.build(rows, tokens, has_lora=True)
    usual = BucketLadder.build(rows, tokens)
    every = (*twins.buckets, *twins.split, twins.plain)
    found = twins.choose(replace(plan, has_adapters=has_adapters), every)
    without = usual.choose(plan, (*usual.buckets, *usual.split, usual.plain))
    assert found is not None and without is not None and found.is_adapted == has_adapters
    assert (found.num_tokens, found.num_rows) == (without.num_tokens, without.num_rows)
    # Those on which others wait hold every plan.
    assert twins.first.is_adapted and twins.largest.is_adapted and twins.plain.is_adapted
    assert twins.widest is None or twins.widest.is_adapted
    assert not any(bucket.holds(replace(plan, has_adapters=True)) for bucket in usual.buckets)
