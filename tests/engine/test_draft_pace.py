"""Steps have drafts where tokens come sooner that way, and now and then one of the other kind is measured again."""

from dataclasses import dataclass
from itertools import groupby

import pytest

from jaxvllm.engine.draft_pace import FIRST_PAUSE, LONGEST_PAUSE, DraftPace


@dataclass(frozen=True)
class Machine:
    """How long a step takes, without drafts and with them, and how many tokens the latter brings each row."""

    plain_seconds: float
    drafted_seconds: float
    tokens: float


PAYS, LOSES = Machine(0.010, 0.012, 1.5), Machine(0.010, 0.020, 1.5)


def serve(pace: DraftPace, machine: Machine, num_steps: int, num_rows: int = 4) -> list[bool]:
    """Which of `num_steps` steps had drafts. Each is measured before the next is planned."""
    had_drafts = []
    for _ in range(num_steps):
        had_drafts.append(pace.wants_drafts(num_rows))
        if had_drafts[-1]:
            pace.drafted(num_rows, machine.drafted_seconds, machine.tokens)
        else:
            pace.plain(num_rows, machine.plain_seconds)
    return had_drafts


def runs(had_drafts: list[bool]) -> list[tuple[bool, int]]:
    """How many steps of each kind there were in a row."""
    return [(kind, len(list(steps))) for kind, steps in groupby(had_drafts)]


@pytest.mark.parametrize(("machine", "pays"), [(PAYS, True), (LOSES, False)])
def test_the_quicker_kind_is_used_and_the_other_tried_ever_more_rarely(machine: Machine, pays: bool) -> None:
    pace = DraftPace()
    assert serve(pace, machine, 2) == [False, True], "both are measured first"
    got = runs(serve(pace, machine, 3000))
    assert {kind for kind, _ in got[::2]} == {pays} and {count for _, count in got[1::2]} == {1}
    pauses = [count for _, count in got[::2]]
    assert pauses[:6] == [16, 32, 64, 128, 256, 256] and (FIRST_PAUSE, LONGEST_PAUSE) == (16, 256)
    assert set(pauses[5:-1]) == {LONGEST_PAUSE} and len(pauses) > 10


@pytest.mark.parametrize(("before", "after", "pays"), [(LOSES, PAYS, True), (PAYS, LOSES, False)])
def test_what_changes_is_noticed(before: Machine, after: Machine, pays: bool) -> None:
    """The longest pause, and a few tries: what was measured before counts less and less."""
    pace = DraftPace()
    serve(pace, before, 2000)
    serve(pace, after, 5 * LONGEST_PAUSE)
    got = serve(pace, after, 500)
    assert got.count(pays) > 480
    assert runs(got)[0][0] is pays


@pytest.mark.parametrize("delayed", ["plain", "drafted"])
def test_one_step_that_the_machine_delayed_decides_nothing(delayed: str) -> None:
    pace = DraftPace()
    if delayed == "plain":
        pace.plain(4, 1.0)
        machine, pays = LOSES, False
    else:
        pace.plain(4, PAYS.plain_seconds)
        pace.drafted(4, 1.0, PAYS.tokens)
        machine, pays = PAYS, True
    serve(pace, machine, 10 * LONGEST_PAUSE)
    assert serve(pace, machine, 500).count(pays) > 480


def test_while_a_try_is_under_way_another_may_start_and_counts_once() -> None:
    """Two steps are under way at once, so the second is planned before the first is measured."""
    pace = DraftPace()
    serve(pace, LOSES, 2 + FIRST_PAUSE)
    assert [pace.wants_drafts(4), pace.wants_drafts(4)] == [True, True]
    for _ in range(2):
        pace.drafted(4, LOSES.drafted_seconds, LOSES.tokens)
    assert runs(serve(pace, LOSES, 100))[:2] == [(False, 2 * FIRST_PAUSE), (True, 1)]


def test_each_number_of_rows_has_times_of_its_own_to_the_next_power_of_two() -> None:
    pace = DraftPace()
    serve(pace, LOSES, 10, num_rows=32)
    serve(pace, PAYS, 10, num_rows=2)
    assert pace.wants_drafts(3) and not pace.wants_drafts(63)
    assert not pace.wants_drafts(64), "nothing was measured yet"


def test_drafts_that_are_never_right_cost_more_than_nothing() -> None:
    pace = DraftPace()
    serve(pace, Machine(0.010, 0.010, 1.0), 10)
    assert not pace.wants_drafts(4)


def test_a_step_that_catches_up_with_plain_ones_is_not_measured() -> None:
    pace = DraftPace(catches_up=True)
    pace.plain(4, PAYS.plain_seconds)
    pace.drafted(4, 1.0, PAYS.tokens)
    assert pace.wants_drafts(4), "there is no measurement yet"
    pace.drafted(4, PAYS.drafted_seconds, PAYS.tokens)
    assert serve(pace, PAYS, 10) == [True] * 10
    pace = DraftPace(catches_up=True)
    assert runs(serve(pace, LOSES, 100))[:3] == [(False, 1), (True, 2), (False, FIRST_PAUSE)]
