"""Whether decode steps should have drafts: what they bring and cost is measured while the engine serves."""

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean

# Calls whose time is known of each kind. Of these the middle half counts: on a busy machine a call seems to take three
# times as long as the one before it, because the host read the output late.
WINDOW = 8
# A kind that is slower is tried so many calls on end, after a pause of other calls, since what the rows write changes,
# and so does the machine's time. Each try that changes nothing makes the pause twice as long, and it is as long as it
# takes for tries to cost no more than this share of the time.
TRY = 4
FIRST_PAUSE = 16
LONGEST_PAUSE = 512
MOST_FOR_TRIES = 0.02


@dataclass
class _Window:
    """The newest values of a measurement."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def is_known(self) -> bool:
        return len(self.values) >= TRY

    @property
    def middle(self) -> float:
        quarter = len(self.values) // 4
        return fmean(sorted(self.values)[quarter : len(self.values) - quarter])


@dataclass
class _Measured:
    """What decode steps of some number of rows took and brought."""

    plain: _Window = field(default_factory=_Window)  # seconds of a step
    drafted: _Window = field(default_factory=_Window)
    tokens: _Window = field(default_factory=_Window)  # of a row in a step with drafts
    catching_up: float = 0.0  # seconds of a step in the last call that computed what its proposer had missed
    paid: bool | None = None  # what `pays` was when it was measured last; None: never
    pause: int = FIRST_PAUSE
    calls_left: int = 0  # before one of the slower kind is tried
    tried: int = 0  # calls of the try under way

    @property
    def is_known(self) -> bool:
        return self.plain.is_known and self.drafted.is_known

    @property
    def pays(self) -> bool:
        """Whether a row gets its tokens sooner by steps with drafts."""
        return self.is_known and self.tokens.middle * self.plain.middle > self.drafted.middle

    def measured(self, was_drafted: bool) -> None:
        """Plans the next try, when one has ended or the quicker kind is another now."""
        if not self.is_known:
            return
        if self.pays != self.paid:
            self.paid, self.pause = self.pays, FIRST_PAUSE
        else:
            self.tried += self.calls_left < 0 and was_drafted != self.pays
            if self.tried < TRY:
                return
        self.calls_left, self.tried = max(self.pause, int(self._loss / MOST_FOR_TRIES)), 0
        self.pause = min(2 * self.pause, LONGEST_PAUSE)

    @property
    def _loss(self) -> float:
        """What a try loses, in calls of the quicker kind, which would bring its tokens sooner."""
        plain, drafted = self.plain.middle, self.drafted.middle / self.tokens.middle  # for a token of a row
        if self.pays:
            return TRY * (plain / drafted - 1) / self.tokens.middle
        extra = max(self.catching_up - self.drafted.middle, 0.0)
        return TRY * (drafted / plain - 1) * self.tokens.middle + extra / plain


class DraftPace:
    """Decides by the time that a token of a row takes with drafts and without them, for each number of rows."""

    def __init__(self, catches_up: bool = False) -> None:
        """`catches_up`: the first step with drafts behind plain ones computes what its proposer missed of these."""
        self._catches_up = catches_up
        self._was_plain = True
        self._measured: dict[int, _Measured] = {}  # by the bit length of the number of rows

    def wants_drafts(self, num_rows: int) -> bool:
        """Whether the next call, of one step or a few with `num_rows` rows, should have drafts."""
        of = self._of(num_rows)
        if not of.is_known:
            return of.plain.is_known
        of.calls_left -= 1
        return of.pays != (of.calls_left < 0)

    def may_be_blind(self, num_rows: int) -> bool:
        """Whether steps of so many rows need no proposer to follow them: drafts do not pay, and no try is due."""
        of = self._of(num_rows)
        return of.is_known and not of.pays and of.calls_left > 0

    def plain(self, num_rows: int, seconds: float) -> None:
        """Takes in that decode steps without drafts took `seconds` each."""
        self._was_plain = True
        of = self._of(num_rows)
        of.plain.values.append(seconds)
        of.measured(was_drafted=False)

    def drafted(self, num_rows: int, seconds: float, tokens: float) -> None:
        """Takes in that steps with drafts took `seconds` each, and brought each row `tokens` on average."""
        of = self._of(num_rows)
        if self._catches_up and self._was_plain:
            self._was_plain, of.catching_up = False, seconds
            return
        of.drafted.values.append(seconds)
        of.tokens.values.append(tokens)
        of.measured(was_drafted=True)

    def _of(self, num_rows: int) -> _Measured:
        return self._measured.setdefault(num_rows.bit_length(), _Measured())
