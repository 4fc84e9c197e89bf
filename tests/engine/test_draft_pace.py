"""Steps have drafts where tokens come sooner that way, and now and then one of the other kind is measured again."""

from dataclasses import dataclass
from itertools import cycle, groupby

import pytest

from jaxvllm.engine.draft_pace import FIRST_PAUSE, LONGEST_PAUSE, MOST_FOR_TRIES, TRY, WINDOW, DraftPace


@dataclass(frozen=True)
class Machine:
    """How long a step takes, without drafts and with them, and how many tokens the latter brings each row."""

    plain_seconds: float
    drafted_seconds: float
    tokens: float


PAYS, LOSES = Machine(0.010, 0.0148, 1.5), Machine(0.010, 0.0152, 1.5)  # by little, so that tries cost little


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
    assert runs(serve(pace, machine, 2 * TRY)) == [(False, TRY), (True, TRY)], "both are measured first"
    got = runs(serve(pace, machine, 6000))
    assert {kind for kind, _ in got[::2]} == {pays} and {count for _, count in got[1:-1:2]} == {TRY}
    pauses = [count for _, count in got[::2]]
    assert pauses[:7] == [16, 32, 64, 128, 256, 512, 512] and (FIRST_PAUSE, LONGEST_PAUSE) == (16, 512)
    assert set(pauses[6:-1]) == {LONGEST_PAUSE} and len(pauses) > 10


@pytest.mark.parametrize(("before", "after", "pays"), [(LOSES, PAYS, True), (PAYS, LOSES, False)])
def test_what_changes_is_noticed(before: Machine, after: Machine, pays: bool) -> None:
    """After the longest pause and as many calls as are remembered."""
    pace = DraftPace()
    serve(pace, before, 2000)
    serve(pace, after, 3 * LONGEST_PAUSE)
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
        serve(pace, PAYS, TRY)
        pace.drafted(4, 1.0, PAYS.tokens)
        machine, pays = PAYS, True
    serve(pace, machine, 2 * WINDOW)
    assert serve(pace, machine, 500).count(pays) > 460


@pytest.mark.parametrize(("machine", "pays"), [(PAYS, True), (LOSES, False)])
def test_a_host_that_reads_late_decides_nothing(machine: Machine, pays: bool) -> None:
    """Then one call seems to take long and the next one to be over at once. Together they take what they take."""
    pace, share = DraftPace(), [1.0, 1.9, 0.1, 1.0, 1.6, 0.4, 1.0, 1.0]
    plain, drafted, chosen = cycle(share), cycle(share), []
    for _ in range(2000):
        chosen.append(pace.wants_drafts(4))
        if chosen[-1]:
            pace.drafted(4, machine.drafted_seconds * next(drafted), machine.tokens)
        else:
            pace.plain(4, machine.plain_seconds * next(plain))
    assert chosen.count(pays) > 1800


def test_calls_that_are_planned_before_a_try_is_measured_are_part_of_it() -> None:
    """Two calls are under way at once, so one more is planned before the last of a try is measured."""
    pace = DraftPace()
    serve(pace, LOSES, 2 * TRY)
    while not pace.wants_drafts(4):
        pace.plain(4, LOSES.plain_seconds)
    assert pace.wants_drafts(4)
    for _ in range(TRY - 1):
        pace.drafted(4, LOSES.drafted_seconds, LOSES.tokens)
        assert pace.wants_drafts(4)
    for _ in range(2):
        pace.drafted(4, LOSES.drafted_seconds, LOSES.tokens)
    assert runs(serve(pace, LOSES, 200))[1] == (True, TRY)


def test_each_number_of_rows_has_times_of_its_own_to_the_next_power_of_two() -> None:
    pace = DraftPace()
    serve(pace, LOSES, 20, num_rows=32)
    serve(pace, PAYS, 20, num_rows=2)
    assert pace.wants_drafts(3) and not pace.wants_drafts(63)
    assert not pace.wants_drafts(64), "nothing was measured yet"


@pytest.mark.parametrize(
    "machine", [Machine(0.010, 0.060, 3.0), Machine(0.010, 0.012, 4.0), Machine(0.010, 0.050, 1.0)]
)
def test_tries_cost_little_of_the_time(machine: Machine) -> None:
    """Time for as many tokens as there were, by the quicker kind alone, and as it was."""
    pace = DraftPace()
    serve(pace, machine, 2 * TRY)
    had_drafts = serve(pace, machine, 3000)
    seconds = sum(machine.drafted_seconds if drafted else machine.plain_seconds for drafted in had_drafts)
    tokens = sum(machine.tokens if drafted else 1 for drafted in had_drafts)
    best = tokens * min(machine.plain_seconds, machine.drafted_seconds / machine.tokens)
    assert seconds < 1.025 * best
    assert len(set(had_drafts)) == 2, "there were tries"


def test_what_guesses_must_see_steps_while_nobody_knows_whether_drafts_pay_and_for_tries() -> None:
    pace = DraftPace()
    assert not pace.may_be_blind(4)
    serve(pace, LOSES, 2 * TRY)
    for _ in range(FIRST_PAUSE - 1):
        pace.wants_drafts(4)
        assert pace.may_be_blind(4) and not pace.may_be_blind(64)
    for _ in range(3):  # no row that was seen is there yet
        pace.wants_drafts(4)
        assert not pace.may_be_blind(4)
    serve(pace, LOSES, 2 * TRY)
    assert pace.may_be_blind(4)
    serve(pace, PAYS, 2 * WINDOW, num_rows=1)
    assert not pace.may_be_blind(1)


def test_what_is_computed_behind_plain_steps_is_a_part_of_a_try() -> None:
    """A draft model that has seen no prompt computes all of them then."""
    pace, had_drafts, catching_up = DraftPace(catches_up=True), list[bool](), 0.5
    for _ in range(8000):
        had_drafts.append(pace.wants_drafts(4))
        if not had_drafts[-1]:
            pace.plain(4, LOSES.plain_seconds)
        else:
            pace.drafted(4, LOSES.drafted_seconds if had_drafts[-2] else catching_up, LOSES.tokens)
    num_tries = len(runs(had_drafts)) // 2
    assert 2 < num_tries and num_tries * catching_up < 1.5 * MOST_FOR_TRIES * 8000 * LOSES.plain_seconds


def test_drafts_that_are_never_right_cost_more_than_nothing() -> None:
    pace = DraftPace()
    serve(pace, Machine(0.010, 0.010, 1.0), 20)
    assert not pace.wants_drafts(4)


def test_a_step_that_catches_up_with_plain_ones_is_not_measured() -> None:
    pace = DraftPace(catches_up=True)
    serve(pace, PAYS, TRY)
    pace.drafted(4, 1.0, PAYS.tokens)
    assert runs(serve(pace, PAYS, 10)) == [(True, 10)]
    pace = DraftPace(catches_up=True)
    assert runs(serve(pace, LOSES, 100))[:2] == [(False, TRY), (True, TRY + 1)]
