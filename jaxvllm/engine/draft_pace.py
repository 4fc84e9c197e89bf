"""The choice of the number of drafts: their gain and their cost are measured while the engine serves."""

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean

# Calls whose time is known of each kind. Of these the middle half counts: on a busy machine a call seems to take three
# times as long as the one before it, because the host read the output late.
WINDOW = 8
# A kind that is slower is tried so many calls on end, after a pause of other calls, since what the rows write changes,
# and so does the machine's time. Each try that changes nothing makes the pause twice as long, and it is as long as it
# takes for all tries to cost no more than this share of the time.
TRY = 4
FIRST_PAUSE = 16
LONGEST_PAUSE = 512
MOST_FOR_TRIES = 0.02
# So long is the pause of a kind that would not pay if all of its drafts were right: only the machine can change that.
HOPELESS_PAUSE = 8192
# Drafts must be so much quicker than none. Medians of eight calls differ by that much where nothing differs: n-grams in
# text that hardly repeats itself were chosen half of the time, and cost 10%.
LEAST_GAIN = 1.1


@dataclass
class _Window:
    """The newest values of a measurement."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def is_known(self) -> bool:
        return len(self.values) >= TRY

    def forget_all_but(self, count: int) -> None:
        """Keeps the newest `count` values."""
        while len(self.values) > count:
            self.values.popleft()

    @property
    def middle(self) -> float:
        quarter = len(self.values) // 4
        return fmean(sorted(self.values)[quarter : len(self.values) - quarter])


@dataclass
class _Kind:
    """The time and the tokens of decode steps with some number of drafts, or none, and the next try of them."""

    seconds: _Window = field(default_factory=_Window)  # of a step
    tokens: _Window = field(default_factory=_Window)  # of a row in a step
    most: float = 1.0  # tokens of a row in a step, if all drafts are right
    catching_up: float = 0.0  # seconds of a step in the last call that computed what its proposer had missed
    pause: int = FIRST_PAUSE
    calls_left: int = -1  # before it is tried
    tried: int = 0  # calls of the try under way

    @property
    def is_known(self) -> bool:
        return self.seconds.is_known

    @property
    def token_seconds(self) -> float:
        """The time for which a row waits for a token."""
        return self.seconds.middle / self.tokens.middle

    def plan_try(self, least: float) -> None:
        """Plans the next try after as many calls as the pause says, and `least` at least."""
        self.calls_left, self.tried = max(self.pause, int(least)), 0
        self.pause = min(2 * self.pause, LONGEST_PAUSE)


@dataclass
class _RowTimes:
    """The measurements of decode steps of some number of rows."""

    kinds: dict[int, _Kind] = field(default_factory=lambda: {0: _Kind()})  # by the drafts that a row may have
    best: int = 0  # when it was measured last
    # Whether steps without drafts were measured again. The first calls of an engine are slow: such steps took 0.28 ms,
    # and 0.14 later. With drafts they took 0.16, so that drafts stayed for seventy requests and cost a tenth.
    is_confirmed: bool = False

    def best_of(self, kinds: Collection[int]) -> int:
        """Returns the kind by which a row waits least for a token, of those that are known."""
        known = {number: self.kinds[number].token_seconds for number in kinds if self.kinds[number].is_known}
        if 0 in known:
            known[0] /= LEAST_GAIN
        return min(known, key=lambda number: known[number], default=0)

    def may_pay(self, number: int) -> bool:
        """Returns whether steps with so many drafts would be quicker than steps without, if all drafts were right.

        If they were not measured, others tell. More drafts take no less time and are right no more often. The time of
        fewer is taken to lie on a line between none and the others.
        """
        kind, plain = self.kinds[number], self.kinds[0].seconds
        drafted = [one for other, one in self.kinds.items() if other and one.is_known and one.most > 1]
        if not plain.is_known:
            return True
        seconds, tokens = plain.middle, kind.most
        if kind.is_known:
            seconds = kind.seconds.middle
        elif drafted:
            other = drafted[0]
            share = (kind.most - 1) / (other.most - 1)
            if share > 1:
                seconds, tokens = other.seconds.middle, 1 + share * (other.tokens.middle - 1)
            else:
                seconds += share * (other.seconds.middle - seconds)
        return LEAST_GAIN * seconds < tokens * plain.middle

    def next(self, numbers: Collection[int], soon: int) -> int:
        """Returns a kind that was never measured, or whose try is due in less than `soon` calls, or the quickest."""
        for number in numbers:
            if not self.kinds[number].is_known and self.may_pay(number):
                return number
        best = self.best_of(numbers)
        others = [number for number in numbers if number != best and self.kinds[number].is_known]
        return next((number for number in others if self.kinds[number].calls_left < soon), best)

    def measured(self, number: int) -> None:
        """Plans the next try, when one has ended or another kind is the quickest now."""
        before, self.best = self.best, self.best_of(self.kinds)
        if self.best != before:
            for other, kind in self.kinds.items():
                if kind.is_known and other != self.best:
                    kind.pause = FIRST_PAUSE
                    self._plan_try(other)
        elif number != self.best:
            kind = self.kinds[number]
            if kind.calls_left >= 0:  # it was no try, but has cost as much as a call of one
                kind.calls_left += int(self._loss(kind) / TRY / MOST_FOR_TRIES)
                return
            kind.tried += 1
            if kind.is_known and kind.tried >= TRY:
                if not number and not self.is_confirmed:
                    self.is_confirmed = True
                    kind.seconds.forget_all_but(TRY)
                self._plan_try(number)

    def _plan_try(self, number: int) -> None:
        kind = self.kinds[number]
        if not number and not self.is_confirmed:
            kind.plan_try(FIRST_PAUSE)
        elif not number or self.may_pay(number):
            kind.plan_try(self._loss(kind) / MOST_FOR_TRIES)
        else:
            kind.plan_try(HOPELESS_PAUSE)

    def _loss(self, kind: _Kind) -> float:
        """Returns what tries of all kinds lose if they are like `kind`, in calls of the quickest."""
        best = self.kinds[self.best]
        lost = TRY * (kind.seconds.middle - kind.tokens.middle * best.token_seconds)
        if not self.best:
            lost += max(kind.catching_up - kind.seconds.middle, 0.0)
        return lost * (len(self.kinds) - 1) / best.seconds.middle


class DraftPace:
    """Decides by the time that a row waits for a token with each number of drafts, for each size of steps."""

    def __init__(self, row_counts: Iterable[int], catches_up: bool = False, sees_plain: bool = False) -> None:
        """Measures together what runs in the same programs: steps of any rows that pad to the same of `row_counts`.

        `catches_up`: the first step with drafts after plain ones computes what its proposer missed of these.

        `sees_plain`: plain steps take longer where the proposer sees them, so that those which are to be measured
        are blind.
        """
        self._row_counts = sorted(row_counts)
        self._catches_up = catches_up
        self._sees_plain = sees_plain
        self._was_plain = True
        self._measured: dict[int, _RowTimes] = {}  # by the place of the size among `row_counts`

    def choose(self, num_rows: int, most: Mapping[int, float]) -> int:
        """Returns how many drafts a row may have in the next call, which is one step or a few with `num_rows` rows.

        It is 0 or one of `most`, which tells how many tokens a row gets in a step if all of these drafts are right.
        What was never measured comes first: steps without drafts, and then those of `most` in their order.
        """
        of = self._of(num_rows)
        for number, tokens in most.items():
            of.kinds.setdefault(number, _Kind()).most = tokens
        possible = (0, *most)
        for number in possible:
            of.kinds[number].calls_left -= number != of.best
        return of.next(possible, soon=0)

    def may_be_blind(self, num_rows: int) -> bool:
        """Returns whether no proposer need see steps of so many rows: drafts do not pay, and no try is due.

        Steps that are to be measured without a proposer must have none.
        """
        of = self._of(num_rows)
        if of.next(of.kinds, soon=1):
            return False
        return self._sees_plain or (len(of.kinds) > 1 and not of.best and of.kinds[0].is_known)

    def measured(self, num_rows: int, num_drafts: int, seconds: float, tokens: float) -> None:
        """Takes in that decode steps took `seconds` each, and brought each row `tokens` on average."""
        of = self._of(num_rows)
        kind = of.kinds.setdefault(num_drafts, _Kind())
        was_plain, self._was_plain = self._was_plain, not num_drafts
        if self._catches_up and num_drafts and was_plain:
            kind.catching_up = seconds
            return
        kind.seconds.values.append(seconds)
        kind.tokens.values.append(tokens)
        of.measured(num_drafts)

    def _of(self, num_rows: int) -> _RowTimes:
        return self._measured.setdefault(bisect_left(self._row_counts, num_rows), _RowTimes())
