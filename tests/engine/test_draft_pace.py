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


# By little, so that tries cost little. Drafts must be a tenth quicker, or nobody could tell them from the noise.
PAYS, LOSES = Machine(0.010, 0.0134, 1.5), Machine(0.010, 0.0152, 1.5)


DRAFTS = 3
ROWS = (1, 3, 7, 15, 31, 63, 127)


def wants_drafts(pace: DraftPace, num_rows: int) -> bool:
    """Where there is one kind of steps with drafts."""
    return pace.choose(num_rows, {DRAFTS: 8.0}) == DRAFTS


def without_drafts(pace: DraftPace, num_rows: int, seconds: float) -> None:
    pace.measured(num_rows, 0, seconds, 1.0)


def with_drafts(pace: DraftPace, num_rows: int, seconds: float, tokens: float) -> None:
    pace.measured(num_rows, DRAFTS, seconds, tokens)


def serve(pace: DraftPace, machine: Machine, num_steps: int, num_rows: int = 4) -> list[bool]:
    """Which of `num_steps` steps had drafts. Each is measured before the next is planned."""
    had_drafts = []
    for _ in range(num_steps):
        had_drafts.append(wants_drafts(pace, num_rows))
        if had_drafts[-1]:
            with_drafts(pace, num_rows, machine.drafted_seconds, machine.tokens)
        else:
            without_drafts(pace, num_rows, machine.plain_seconds)
    return had_drafts


def runs(had_drafts: list[bool]) -> list[tuple[bool, int]]:
    """How many steps of each kind there were in a row."""
    return [(kind, len(list(steps))) for kind, steps in groupby(had_drafts)]


@pytest.mark.parametrize(("machine", "pays"), [(PAYS, True), (LOSES, False)])
def test_the_quicker_kind_is_used_and_the_other_tried_ever_more_rarely(machine: Machine, pays: bool) -> None:
    pace = DraftPace(ROWS)
    assert runs(serve(pace, machine, 2 * TRY)) == [(False, TRY), (True, TRY)], "both are measured first"
    got = runs(serve(pace, machine, 6000))
    assert {kind for kind, _ in got[::2]} == {pays} and {count for _, count in got[1:-1:2]} == {TRY}
    pauses = [count for _, count in got[::2]]
    assert pauses[:7] == [16, 32, 64, 128, 256, 512, 512] and (FIRST_PAUSE, LONGEST_PAUSE) == (16, 512)
    assert set(pauses[6:-1]) == {LONGEST_PAUSE} and len(pauses) > 10


@pytest.mark.parametrize(("before", "after", "pays"), [(LOSES, PAYS, True), (PAYS, LOSES, False)])
def test_what_changes_is_noticed(before: Machine, after: Machine, pays: bool) -> None:
    """After the longest pause and as many calls as are remembered."""
    pace = DraftPace(ROWS)
    serve(pace, before, 2000)
    serve(pace, after, 3 * LONGEST_PAUSE)
    got = serve(pace, after, 500)
    assert got.count(pays) > 480
    assert runs(got)[0][0] is pays


@pytest.mark.parametrize("delayed", ["plain", "drafted"])
def test_one_step_that_the_machine_delayed_decides_nothing(delayed: str) -> None:
    pace = DraftPace(ROWS)
    if delayed == "plain":
        without_drafts(pace, 4, 1.0)
        machine, pays = LOSES, False
    else:
        serve(pace, PAYS, TRY)
        with_drafts(pace, 4, 1.0, PAYS.tokens)
        machine, pays = PAYS, True
    serve(pace, machine, 2 * WINDOW)
    assert serve(pace, machine, 500).count(pays) > 460


@pytest.mark.parametrize(("machine", "pays"), [(PAYS, True), (LOSES, False)])
def test_a_host_that_reads_late_decides_nothing(machine: Machine, pays: bool) -> None:
    """Then one call seems to take long and the next one to be over at once. Together they take what they take."""
    pace, share = DraftPace(ROWS), [1.0, 1.9, 0.1, 1.0, 1.6, 0.4, 1.0, 1.0]
    plain, drafted, chosen = cycle(share), cycle(share), []
    for _ in range(2000):
        chosen.append(wants_drafts(pace, 4))
        if chosen[-1]:
            with_drafts(pace, 4, machine.drafted_seconds * next(drafted), machine.tokens)
        else:
            without_drafts(pace, 4, machine.plain_seconds * next(plain))
    assert chosen.count(pays) > 1800


def test_calls_that_are_planned_before_a_try_is_measured_are_part_of_it() -> None:
    """Two calls are under way at once, so one more is planned before the last of a try is measured."""
    pace = DraftPace(ROWS)
    serve(pace, LOSES, 2 * TRY)
    while not wants_drafts(pace, 4):
        without_drafts(pace, 4, LOSES.plain_seconds)
    assert wants_drafts(pace, 4)
    for _ in range(TRY - 1):
        with_drafts(pace, 4, LOSES.drafted_seconds, LOSES.tokens)
        assert wants_drafts(pace, 4)
    for _ in range(2):
        with_drafts(pace, 4, LOSES.drafted_seconds, LOSES.tokens)
    assert runs(serve(pace, LOSES, 200))[1] == (True, TRY)


def test_each_size_of_steps_has_times_of_its_own() -> None:
    pace = DraftPace(ROWS)
    serve(pace, LOSES, 20, num_rows=32)
    serve(pace, PAYS, 20, num_rows=2)
    assert wants_drafts(pace, 3) and not wants_drafts(pace, 63)
    assert not wants_drafts(pace, 64), "nothing was measured yet"


@pytest.mark.parametrize(
    "machine", [Machine(0.010, 0.060, 3.0), Machine(0.010, 0.012, 4.0), Machine(0.010, 0.050, 1.0)]
)
def test_tries_cost_little_of_the_time(machine: Machine) -> None:
    """Time for as many tokens as there were, by the quicker kind alone, and as it was."""
    pace = DraftPace(ROWS)
    serve(pace, machine, 2 * TRY)
    had_drafts = serve(pace, machine, 3000)
    seconds = sum(machine.drafted_seconds if drafted else machine.plain_seconds for drafted in had_drafts)
    tokens = sum(machine.tokens if drafted else 1 for drafted in had_drafts)
    best = tokens * min(machine.plain_seconds, machine.drafted_seconds / machine.tokens)
    assert seconds < 1.025 * best
    assert len(set(had_drafts)) == 2, "there were tries"


def test_what_guesses_must_see_steps_while_nobody_knows_whether_drafts_pay_and_for_tries() -> None:
    pace = DraftPace(ROWS)
    assert not pace.may_be_blind(4)
    serve(pace, LOSES, 2 * TRY)
    for _ in range(FIRST_PAUSE - 1):
        wants_drafts(pace, 4)
        assert pace.may_be_blind(4) and not pace.may_be_blind(64)
    for _ in range(3):  # no row that was seen is there yet
        wants_drafts(pace, 4)
        assert not pace.may_be_blind(4)
    serve(pace, LOSES, 2 * TRY)
    assert pace.may_be_blind(4)
    serve(pace, PAYS, 2 * WINDOW, num_rows=1)
    assert not pace.may_be_blind(1)


def test_what_is_computed_behind_plain_steps_is_a_part_of_a_try() -> None:
    """A draft model that has seen no prompt computes all of them then."""
    pace, had_drafts, catching_up = DraftPace(ROWS, catches_up=True), list[bool](), 0.5
    for _ in range(8000):
        had_drafts.append(wants_drafts(pace, 4))
        if not had_drafts[-1]:
            without_drafts(pace, 4, LOSES.plain_seconds)
        else:
            with_drafts(pace, 4, LOSES.drafted_seconds if had_drafts[-2] else catching_up, LOSES.tokens)
    num_tries = len(runs(had_drafts)) // 2
    assert 2 < num_tries and num_tries * catching_up < 1.5 * MOST_FOR_TRIES * 8000 * LOSES.plain_seconds


def test_drafts_that_are_never_right_cost_more_than_nothing() -> None:
    pace = DraftPace(ROWS)
    serve(pace, Machine(0.010, 0.010, 1.0), 20)
    assert not wants_drafts(pace, 4)


def test_a_step_that_catches_up_with_plain_ones_is_not_measured() -> None:
    pace = DraftPace(ROWS, catches_up=True)
    serve(pace, PAYS, TRY)
    with_drafts(pace, 4, 1.0, PAYS.tokens)
    assert runs(serve(pace, PAYS, 10)) == [(True, 10)]
    pace = DraftPace(ROWS, catches_up=True)
    assert runs(serve(pace, LOSES, 100))[:2] == [(False, TRY), (True, TRY + 1)]


# Of 4 rows the fewer drafts pay more, of 1 row all pay most, and of 16 rows none pays.
KINDS: dict[int, dict[int, tuple[float, float]]] = {  # seconds of a step and tokens of a row, by rows and drafts
    4: {0: (0.010, 1.0), 5: (0.045, 5.0), 3: (0.016, 2.8)},
    1: {0: (0.010, 1.0), 5: (0.020, 4.8), 3: (0.016, 2.8)},
    16: {0: (0.010, 1.0), 5: (0.050, 4.0), 3: (0.032, 2.8)},
}
MOST = {5: 6.0, 3: 4.0}  # tokens of a row in a step


def serve_kinds(pace: DraftPace, num_rows: int, num_calls: int) -> list[int]:
    """How many drafts rows may have had in each of the calls."""
    chosen = []
    for _ in range(num_calls):
        chosen.append(pace.choose(num_rows, MOST))
        pace.measured(num_rows, chosen[-1], *KINDS[num_rows][chosen[-1]])
    return chosen


@pytest.mark.parametrize(("num_rows", "best"), [(4, 3), (1, 5), (16, 0)])
def test_of_several_numbers_of_drafts_the_quickest_is_used_and_tries_of_all_others_cost_little(
    num_rows: int, best: int
) -> None:
    pace = DraftPace(ROWS)
    assert serve_kinds(pace, num_rows, 3 * TRY) == [0] * TRY + [5] * TRY + [3] * TRY, "each is measured first"
    chosen = serve_kinds(pace, num_rows, 4000)
    assert chosen[0] == best and {*chosen} == {0, 3, 5}, "there were tries of each"
    kinds = KINDS[num_rows]
    seconds, tokens = (sum(kinds[number][place] for number in chosen) for place in (0, 1))
    assert seconds < (1 + 1.25 * MOST_FOR_TRIES) * tokens * kinds[best][0] / kinds[best][1]


def test_a_number_of_drafts_that_is_possible_only_later_is_measured_then() -> None:
    pace = DraftPace(ROWS)
    for _ in range(50):
        number = pace.choose(4, {5: 6.0})
        assert number != 3
        pace.measured(4, number, *KINDS[4][number])
    assert serve_kinds(pace, 4, 20) == [3] * 20


def test_what_guesses_must_see_steps_until_every_number_of_drafts_was_measured() -> None:
    pace = DraftPace(ROWS)
    serve_kinds(pace, 16, 3 * TRY - 1)
    assert not pace.may_be_blind(16)
    serve_kinds(pace, 16, 2)
    assert pace.may_be_blind(16)
    while pace.choose(16, MOST) == 0:
        pace.measured(16, 0, *KINDS[16][0])
    assert not pace.may_be_blind(16)


def test_steps_that_a_head_would_follow_are_blind_while_they_are_measured() -> None:
    """An EAGLE head may take as long as the model, so that plain steps look slow wherever it sees them."""
    pace = DraftPace(ROWS, sees_plain=True)
    assert pace.may_be_blind(1), "nothing was measured"
    for _ in range(TRY):
        assert pace.choose(1, MOST) == 0 and pace.may_be_blind(1)
        pace.measured(1, 0, *KINDS[1][0])
    assert pace.choose(1, MOST) == 5 and not pace.may_be_blind(1)
    serve_kinds(pace, 1, 2 * TRY)
    assert not pace.may_be_blind(1), "drafts pay"
    while pace.choose(1, MOST) != 0:
        pace.measured(1, 5, *KINDS[1][5])
    assert pace.may_be_blind(1), "a try of steps without drafts is due"
    assert DraftPace(ROWS).may_be_blind(1) is False


def test_steps_that_had_to_be_of_the_slower_kind_delay_its_next_try() -> None:
    """Rows of which a head has missed a step have no drafts until they end."""
    pace = DraftPace(ROWS, sees_plain=True)
    serve_kinds(pace, 1, 3 * TRY)
    for _ in range(100):
        assert pace.choose(1, {5: 6.0}) == 5
        pace.measured(1, 0, *KINDS[1][0])
    num_calls = 0
    while pace.choose(1, {5: 6.0}):
        pace.measured(1, 5, *KINDS[1][5])
        num_calls += 1
    lost = 100 * (KINDS[1][0][0] - KINDS[1][5][0] / KINDS[1][5][1])  # seconds, of so many tokens
    assert lost < 1.1 * MOST_FOR_TRIES * num_calls * KINDS[1][5][0]


def test_what_could_not_pay_if_all_drafts_were_right_is_not_tried() -> None:
    """Then a try can teach nothing of the text. Half as many drafts are judged by the line between none and all."""
    pace = DraftPace(ROWS)
    chosen = []
    for _ in range(3000):
        chosen.append(pace.choose(16, MOST))
        pace.measured(16, chosen[-1], *{0: (0.010, 1.0), 5: (0.080, 5.0)}[chosen[-1]])
    assert chosen == [0] * TRY + [5] * TRY + [0] * (3000 - 2 * TRY)
    assert pace.may_be_blind(16)
    for _ in range(2 * WINDOW):  # the machine's time for steps without drafts is another now
        pace.measured(16, 0, 0.040, 1.0)
    assert pace.choose(16, MOST) == 3


def test_more_drafts_than_those_that_lose_are_not_tried_while_these_are_mostly_wrong() -> None:
    """Five drafts of each request are right no more often than three of those that are mostly right."""
    pace, tokens = DraftPace(ROWS), 1.5
    chosen = []
    for _ in range(400):
        chosen.append(pace.choose(16, {3: 4.0, 5: 6.0}))
        pace.measured(16, chosen[-1], *{0: (0.010, 1.0), 3: (0.025, tokens)}[chosen[-1]])
    assert chosen.count(3) < 40
    tokens = 3.5  # the text is another now
    while (number := pace.choose(16, {3: 4.0, 5: 6.0})) != 5:
        pace.measured(16, number, *{0: (0.010, 1.0), 3: (0.025, tokens)}[number])


def test_more_drafts_are_tried_where_guessing_itself_is_what_costs() -> None:
    """Then more of them take hardly longer: on accelerators, whose steps wait for the weights."""
    pace = DraftPace(ROWS)
    for _ in range(100):
        number = pace.choose(16, {2: 2.0, 3: 4.0})
        pace.measured(16, number, *{0: (0.010, 1.0), 2: (0.014, 1.45), 3: (0.015, 2.2)}[number])
    assert number == 3


def test_drafts_that_gain_less_than_the_noise_are_not_used() -> None:
    pace = DraftPace(ROWS)
    chosen = serve(pace, Machine(0.010, 0.0145, 1.5), 2000)
    assert chosen.count(True) < 100


def test_drafts_are_measured_where_steps_without_any_were_not() -> None:
    """A step may have fewer rows than were decoding when it was decided to have drafts, since some wait for masks."""
    pace = DraftPace(ROWS)
    for number in [5, 3] * 20:
        pace.measured(4, number, *KINDS[4][number])
    assert pace.choose(4, MOST) == 0
    serve_kinds(pace, 4, TRY)
    assert serve_kinds(pace, 4, 1) == [3]
