"""Whether decode steps should have drafts: what they bring and cost is measured while the engine serves."""

from dataclasses import dataclass

# Weight of the newest measurement: a step that the machine delayed is forgotten after a few others.
_NEWEST = 0.25
# Every so many steps one is of the kind that is slower, since what the rows write changes, and so does the machine's
# time. Each such try that changes nothing makes the pause twice as long.
FIRST_PAUSE = 16
LONGEST_PAUSE = 256


@dataclass
class _Measured:
    """What decode steps of some number of rows took and brought."""

    plain_seconds: float | None = None
    drafted_seconds: float | None = None
    tokens: float = 1.0  # of a row in a step with drafts
    pause: int = FIRST_PAUSE
    steps_left: int = 0  # before one of the slower kind is tried

    @property
    def pays(self) -> bool:
        """Whether a row gets its tokens sooner by steps with drafts."""
        if self.plain_seconds is None or self.drafted_seconds is None:
            return False
        return self.tokens * self.plain_seconds > self.drafted_seconds

    def plan_try(self, paid: bool, was_drafted: bool) -> None:
        """Plans the next try, after a step was measured. `paid`: what `pays` was before."""
        if self.pays != paid:
            self.pause = FIRST_PAUSE
        elif was_drafted == paid or self.steps_left > 0:  # two tries may be under way
            return
        self.steps_left, self.pause = self.pause, min(2 * self.pause, LONGEST_PAUSE)


class DraftPace:
    """Decides by the time that a token of a row takes with drafts and without them, for each number of rows."""

    def __init__(self, catches_up: bool = False) -> None:
        """`catches_up`: the first step with drafts behind plain ones computes what its proposer missed of these."""
        self._catches_up = catches_up
        self._was_plain = True
        self._measured: dict[int, _Measured] = {}  # by the bit length of the number of rows

    def wants_drafts(self, num_rows: int) -> bool:
        """Whether the next step of `num_rows` rows should have drafts."""
        of = self._of(num_rows)
        if of.plain_seconds is None:
            return False
        of.steps_left -= 1
        return of.pays != (of.steps_left < 0)

    def plain(self, num_rows: int, seconds: float) -> None:
        """Takes in that a decode step without drafts took `seconds`."""
        self._was_plain = True
        of = self._of(num_rows)
        paid = of.pays
        of.plain_seconds = _time(of.plain_seconds, seconds)
        of.plan_try(paid, was_drafted=False)

    def drafted(self, num_rows: int, seconds: float, tokens: float) -> None:
        """Takes in that a step with drafts took `seconds`, and brought each row `tokens` on average."""
        if self._catches_up and self._was_plain:
            self._was_plain = False
            return
        of = self._of(num_rows)
        paid = of.pays
        of.tokens = tokens if of.drafted_seconds is None else _mean(of.tokens, tokens)
        of.drafted_seconds = _time(of.drafted_seconds, seconds)
        of.plan_try(paid, was_drafted=True)

    def _of(self, num_rows: int) -> _Measured:
        return self._measured.setdefault(num_rows.bit_length(), _Measured())


def _time(known: float | None, newest: float) -> float:
    """Believes a shorter time at once: a machine may delay a step, and never hastens one."""
    return newest if known is None or newest < known else _mean(known, newest)


def _mean(known: float, newest: float) -> float:
    return known + _NEWEST * (newest - known)
