"""`benchmarks.buckets` plays a workload through the real scheduler, and counts what a ladder pads."""

from dataclasses import replace

import pytest

from benchmarks.buckets import DEVICES, Replayer, Workload, between, ladders, workloads
from jaxvllm.runtime.buckets import BucketLadder

CPU = replace(DEVICES[0], rows=8, tokens=64)
MIXED = Workload("mixed", 12, (5, 60), (1, 20))
WHOLE = BucketLadder.build(range(1, 9), range(9, 65), width=1)


@pytest.mark.parametrize("rate", [None, 20.0])
def test_what_is_not_padding_is_what_was_asked_for(rate: float | None) -> None:
    workload = replace(MIXED, rate=rate)
    wanted = sum(prompt + answer - 1 for prompt, answer in workload.lengths(3))
    for cuts in (False, True):
        for ladder in (*ladders(CPU).values(), WHOLE):
            replay = Replayer(CPU, workload, ladder, cuts, seed=3).run()
            padding = replay.padding
            assert padding.tokens - padding.padding_tokens - padding.ended_tokens == wanted
            assert 0 < replay.ttft < replay.seconds
    assert Replayer(CPU, workload, WHOLE, cuts=False, seed=3).run().padding.padding_tokens < 0.1 * wanted


def test_rows_that_end_unforeseen_are_computed_on() -> None:
    chat = replace(MIXED, ends_by_token=True)
    assert Replayer(CPU, chat, WHOLE, cuts=False, seed=1).run().padding.ended_tokens > 0


def test_the_arrivals_of_a_rate() -> None:
    assert MIXED.arrivals(0) == [0.0] * 12
    arrivals = replace(MIXED, requests=1000, rate=50.0).arrivals(0)
    assert arrivals == sorted(arrivals) and arrivals[-1] == pytest.approx(20, rel=0.2)


def test_counts_between_powers() -> None:
    assert between(2, (8, 16, 32, 64)) == (8, 16, 24, 32, 48, 64)
    assert between(4, (16, 32)) == (16, 20, 24, 28, 32)
    assert {workload.name for workload in workloads(CPU)} >= {"mixed, at once", "chat"}
