"""Programs compile behind the engine's back: plans run at once in what is ready, and nothing is left running."""

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxvllm.core.step_plan import StepPlan, StepRoom
from jaxvllm.runtime.buckets import Bucket, BucketLadder, DraftRoom
from jaxvllm.runtime.programs import COMPILE_NICENESS, Programs
from tests.runtime.plans import make_plan
from tests.waiting import PATIENCE

LADDER = BucketLadder.build([1, 4], [8, 32])
PLAIN, FIRST, LARGEST = LADDER.plain, LADDER.first, LADDER.largest


class Compiler:
    """Compiles when it is told to, one bucket at a time. A program is a function that returns its bucket."""

    def __init__(self, failing: tuple[Bucket, ...] = ()) -> None:
        self.failing = failing
        self.asked: list[Bucket] = []
        self.permits = threading.Semaphore(1)  # the first bucket compiles in the constructor
        self.started = threading.Semaphore(0)

    def __call__(self, bucket: Bucket) -> Callable[[], Bucket]:
        self.asked.append(bucket)
        self.started.release()
        assert self.permits.acquire(timeout=PATIENCE)
        if bucket in self.failing:
            raise RuntimeError(f"no {bucket} on this chip")
        return lambda: bucket

    def compile(self, count: int) -> None:
        """Lets `count` more buckets compile."""
        for _ in range(count):
            self.permits.release()

    def wait_until_asked(self, count: int) -> None:
        for _ in range(count):
            assert self.started.acquire(timeout=PATIENCE)


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    compiler = Compiler()
    yield compiler
    compiler.compile(100)  # whatever a failed test has left waiting


def test_serves_from_a_plain_one_and_then_the_largest_while_the_rest_compiles(compiler: Compiler) -> None:
    programs = Programs(LADDER, compiler)
    assert compiler.asked[0] == PLAIN == Bucket(8, 4, is_plain=True)
    assert programs.room == StepRoom(8, 4) and programs.largest is None
    for plan in (make_plan(1), make_plan(4), make_plan(1, [5]), make_plan(3, [5])):
        assert programs.choose(plan) == PLAIN == programs.wait_for(PLAIN)()
    compiler.wait_until_asked(2)
    assert programs.num_compiled == 1
    assert programs.mixed_sizes == ((8, 4),), "a step is cut to no size that is not ready"
    compiler.compile(2)
    compiler.wait_until_asked(2)
    assert compiler.asked[1:3] == [FIRST, LARGEST]
    assert programs.room is None and programs.largest is not None
    assert programs.choose(make_plan(3, [29])) == LARGEST and programs.choose(make_plan(3, [5])) == PLAIN
    compiler.compile(len(LADDER.buckets))
    programs.wait()
    assert programs.num_compiled == 1 + len(LADDER.buckets)
    mixed = [(bucket.num_tokens, bucket.num_rows) for bucket in LADDER.buckets if not bucket.is_decode]
    assert sorted(programs.mixed_sizes) == sorted(mixed)
    for plan, expected in [
        (make_plan(1), Bucket(1, 1)),
        (make_plan(2), Bucket(4, 4)),
        (make_plan(1, [5]), PLAIN),
        (replace(make_plan(1, [5]), has_logit_rules=True), FIRST),
        (make_plan(3, [29]), Bucket(32, 4)),
    ]:
        assert programs.choose(plan) == expected == programs.wait_for(expected)()


@pytest.mark.parametrize(
    "asks",
    [
        Programs.compile_more,
        lambda programs: programs.choose(replace(make_plan(1, [5]), has_logit_rules=True)),
        lambda programs: programs.wait_for(LARGEST),
        Programs.wait,
        Programs.close,
    ],
    ids=["a step is over", "a plan waits", "a bucket is waited for", "all are waited for", "the end"],
)
def test_nothing_compiles_beside_the_first_step(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, asks: Callable[[Programs[Any]], object]
) -> None:
    monkeypatch.setattr("jaxvllm.runtime.programs.FIRST_STEP_SECONDS", PATIENCE)
    compiler.compile(100)
    programs = Programs(LADDER, compiler)
    compiler.wait_until_asked(1)
    assert programs.choose(make_plan(1, [5])) == PLAIN == programs.wait_for(PLAIN)()
    assert not compiler.started.acquire(timeout=0.05), "a step would have to share the cores"
    asks(programs)
    assert not programs._thread.is_alive() or programs._needs_more.is_set()
    programs.wait()


def assert_waits(compiler: Compiler, plan: StepPlan, count: int, expected: Bucket) -> None:
    """Asserts that `plan` waits until `count` more buckets are compiled, and then runs in `expected`."""
    programs = Programs(LADDER, compiler)
    chosen: list[Bucket] = []
    waiting = threading.Thread(target=lambda: chosen.append(programs.choose(plan)))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    compiler.compile(count)
    waiting.join(PATIENCE)
    assert chosen == [expected]
    compiler.compile(100)
    programs.wait()


def test_a_plan_that_no_bucket_holds_yet_waits_for_the_largest(compiler: Compiler) -> None:
    assert_waits(compiler, make_plan(3, [29]), 2, LARGEST)


@pytest.mark.parametrize(
    "asks", [{"has_logit_rules": True}, {"wants_logprobs": True}, {"masked": np.ones(2, np.bool_)}]
)
def test_a_plan_that_is_not_plain_waits_for_the_first_with_all_rules(compiler: Compiler, asks: dict[str, Any]) -> None:
    assert_waits(compiler, replace(make_plan(1, [5]), **asks), 1, FIRST)


def test_where_requests_have_rules_the_first_comes_before_all(compiler: Compiler) -> None:
    compiler.compile(100)
    programs = Programs(replace(LADDER, begins_plain=False), compiler)
    assert compiler.asked[0] == FIRST and programs.num_missing < len(LADDER.buckets)
    programs.wait()
    assert sorted(compiler.asked) == sorted(LADDER.buckets) and programs.num_missing == 0
    assert programs.choose(make_plan(1, [5])) == FIRST


def test_a_plan_of_several_decode_steps_runs_in_a_decode_bucket(compiler: Compiler) -> None:
    ladder = BucketLadder.build([1, 4], [8, 32], width=5)
    compiler.compile(100)
    programs = Programs(ladder, compiler)
    programs.wait()
    assert programs.burst_width == 5
    assert programs.choose(make_plan(3, row_tokens=5)) == Bucket(4, 4, width=5)


def test_a_bucket_serves_as_soon_as_it_is_ready(compiler: Compiler) -> None:
    programs = Programs(LADDER, compiler)
    compiler.compile(3)
    compiler.wait_until_asked(5)  # the plain one, the first, the largest, the widest, and the one after it
    assert programs.num_compiled == 4
    assert programs.choose(make_plan(1)) == Bucket(4, 4)
    assert programs.choose(make_plan(1, [2])) == PLAIN
    compiler.compile(100)
    programs.wait()


def test_who_needs_a_bucket_that_is_not_ready_waits_for_it(compiler: Compiler) -> None:
    programs = Programs(LADDER, compiler)
    waiting = threading.Thread(target=programs.wait_for, args=[Bucket(4, 4)])
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    compiler.compile(3)
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    compiler.compile(100)
    programs.wait()


def test_split_buckets_compile_when_the_first_plan_could_use_one(compiler: Compiler) -> None:
    compiler.compile(100)
    programs = Programs(LADDER, compiler)
    programs.wait()
    masked = replace(make_plan(1), masked=np.ones(1, np.bool_))
    with_prompt = replace(make_plan(1, [5]), masked=np.ones(2, np.bool_))
    assert programs.choose(with_prompt) == Bucket(8, 4)
    programs.wait()
    assert programs.num_compiled == 1 + len(LADDER.buckets)
    assert programs.choose(masked) in (Bucket(8, 4), Bucket(1, 1, is_split=True), Bucket(4, 4, is_split=True))
    programs.wait()
    assert sorted(compiler.asked) == sorted((PLAIN, *LADDER.buckets, *LADDER.split))
    assert programs.choose(masked) == Bucket(1, 1, is_split=True)
    assert programs.choose(make_plan(1)) == Bucket(1, 1)


def test_a_process_that_follows_compiles_a_split_bucket_for_the_first_step_with_one(compiler: Compiler) -> None:
    compiler.compile(100)
    programs = Programs(LADDER, compiler)
    assert programs.wait_for(Bucket(1, 1, is_split=True))() == Bucket(1, 1, is_split=True)


def test_each_bucket_compiles_once(compiler: Compiler) -> None:
    compiler.compile(100)
    programs = Programs(LADDER, compiler)
    programs.wait()
    assert sorted(compiler.asked) == sorted((PLAIN, *LADDER.buckets))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no niceness of its own")
@pytest.mark.parametrize("yields", [True, False])
def test_compiling_yields_to_steps_where_there_are_any(compiler: Compiler, yields: bool) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def compile_step(bucket: Bucket) -> Callable[[], Bucket]:
        nicenesses[bucket] = niceness()
        return compiler(bucket)

    nicenesses: dict[Bucket, int] = {}
    compiler.compile(100)
    Programs(LADDER, compile_step, yields).wait()
    early = {nicenesses.pop(bucket) for bucket in (PLAIN, FIRST, LARGEST)}  # plans may wait for them
    rest = set(nicenesses.values())
    assert early == {niceness()}
    assert rest == {COMPILE_NICENESS if yields else niceness()}


def test_close_stops_after_the_bucket_at_hand(compiler: Compiler) -> None:
    programs = Programs(LADDER, compiler)
    compiler.wait_until_asked(2)
    closer = threading.Thread(target=programs.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()  # XLA cannot be interrupted
    compiler.compile(100)
    closer.join(PATIENCE)
    assert not closer.is_alive()
    assert len(compiler.asked) == 2
    programs.close()  # again does no harm


def test_a_bucket_that_fails_is_logged_and_the_others_serve(caplog: pytest.LogCaptureFixture) -> None:
    compiler = Compiler(failing=(Bucket(4, 4),))
    compiler.compile(100)
    with caplog.at_level(logging.ERROR):
        programs = Programs(LADDER, compiler)
        programs.wait()
    [record] = caplog.records
    assert "bucket decode 4 did not compile" in record.getMessage()
    assert "no decode 4 on this chip" in caplog.text
    assert programs.num_compiled == len(LADDER.buckets)
    # After it all others compiled; its plans run padded in the next larger one.
    assert programs.choose(make_plan(4)) == PLAIN
    with pytest.raises(RuntimeError, match="bucket decode 4 did not compile here, and process 0 uses it"):
        programs.wait_for(Bucket(4, 4))


def test_without_the_plain_one_there_is_no_engine() -> None:
    compiler = Compiler(failing=(PLAIN,))
    running = threading.active_count()
    with pytest.raises(RuntimeError, match="no 8 tokens x 4 rows, plain on this chip"):
        Programs(LADDER, compiler)
    assert threading.active_count() == running


def test_what_breaks_off_because_the_engine_ends_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A script that ended while programs compiled left a traceback for each of its engines."""
    compiler = Compiler(failing=(FIRST,))
    programs = Programs(LADDER, compiler)
    compiler.wait_until_asked(2)
    closing = threading.Thread(target=programs.close)
    closing.start()
    while not programs._closed.is_set():
        pass
    compiler.compile(1)
    closing.join(PATIENCE)
    assert not closing.is_alive() and not caplog.records and programs.num_compiled == 1


def test_without_the_largest_plans_stay_small(caplog: pytest.LogCaptureFixture) -> None:
    compiler = Compiler(failing=(LARGEST,))
    compiler.compile(100)
    with caplog.at_level(logging.ERROR):
        programs = Programs(LADDER, compiler)
        programs.wait()
    assert "no 32 tokens x 4 rows on this chip" in caplog.text
    assert programs.room == StepRoom(8, 4)
    assert programs.choose(make_plan(3, [5])) == PLAIN
    with pytest.raises(RuntimeError, match="no bucket that holds 32 tokens compiled: see the log above"):
        programs.choose(make_plan(3, [29]))


def test_a_plan_beyond_the_ladder_is_our_bug(compiler: Compiler) -> None:
    compiler.compile(100)
    programs = Programs(LADDER, compiler)
    with pytest.raises(AssertionError, match="no bucket holds 33 tokens in 4 rows"):
        programs.choose(make_plan(3, [30]))
    programs.wait()


def test_buckets_with_drafts_that_nobody_chose_compile_when_they_are_asked_for(compiler: Compiler) -> None:
    ladder = BucketLadder.build([1, 4], [8, 32], drafts=DraftRoom(3, max_rows=1, on_demand=True))
    programs = Programs(ladder, compiler)
    compiler.compile(len(ladder.buckets))
    programs.wait()
    assert set(compiler.asked) == {ladder.plain, *ladder.buckets} and not programs.drafted(1)
    assert programs.may_compile_drafts
    compiler.compile(2)
    programs.compile_drafts()
    assert not programs.may_compile_drafts
    programs.compile_drafts()  # it has begun
    programs.wait()
    assert compiler.asked[1 + len(ladder.buckets) :] == [Bucket(4, 1, num_drafts=3), Bucket(3, 1, num_drafts=2)]
    assert programs.drafted(1) == {
        3: Bucket(4, 1, num_drafts=3),
        2: Bucket(3, 1, num_drafts=2),
    } and not programs.drafted(2)


def test_a_step_with_prompts_is_cut_to_no_size_that_only_drafts_have(compiler: Compiler) -> None:
    """It would be padded to the next size. With an EAGLE head 16 prompts took two steps and 19 ms, and not 13."""
    drafts = DraftRoom(3, sees_prompts=True, sees_decoding=True)
    ladder = BucketLadder.build([1, 4], [8, 32], drafts=drafts)
    compiler.compile(100)
    programs = Programs(ladder, compiler)
    programs.wait()
    assert programs.drafted(4)
    mixed = [(bucket.num_tokens, bucket.num_rows) for bucket in ladder.buckets if not bucket.is_decode]
    assert sorted(programs.mixed_sizes) == sorted(mixed)


def test_a_process_that_follows_compiles_drafts_when_process_0_uses_them(compiler: Compiler) -> None:
    ladder = BucketLadder.build([1, 4], [8, 32], drafts=DraftRoom(3, on_demand=True))
    programs = Programs(ladder, compiler)
    compiler.compile(100)
    drafted = Bucket(4, 1, num_drafts=3)
    assert programs.wait_for(drafted)() == drafted
    programs.close()
