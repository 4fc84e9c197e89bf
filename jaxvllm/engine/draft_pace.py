"""Whether decode steps should have drafts: what they bring and cost is measured while the engine serves."""

from dataclasses import dataclass

# Weight of the newest measurement: a step that the machine delayed is forgotten after a few others.
_NEWEST = 0.25
# Where drafts do not pay, every so many steps have some all the same, since what the rows write changes. Each such try
# that does not pay makes the pause twice as long.
FIRST_PAUSE = 16
LONGEST_PAUSE = 256


@dataclass
class _Measured:
    """What decode steps of some number of rows took and brought."""

    plain_seconds: float | None = None
    drafted_seconds: float | None = None
    tokens: float = 1.0  # of a row in a step with drafts
    pause: int = FIRST_PAUSE
    steps_left: int = 0  # without drafts before the next try

    @property
    def pays(self) -> bool:
        """Whether a row gets its tokens sooner by steps with drafts."""
        if self.plain_seconds is None:
            return False
        return self.drafted_seconds is None or self.tokens * self.plain_seconds > self.drafted_seconds


class DraftPace:
    """Decides by the time that a token of a row takes with drafts and without them, for each number of rows."""

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}  # by the bit length of the number of rows

    def wants_drafts(self, num_rows: int) -> bool:
        """Whether the next step of `num_rows` rows should have drafts."""
        of = self._of(num_rows)
        if of.pays:
            return True
        of.steps_left -= 1
        return of.plain_seconds is not None and of.steps_left < 0

    def plain(self, num_rows: int, seconds: float) -> None:
        """Takes in that a decode step without drafts took `seconds`."""
        of = self._of(num_rows)
        of.plain_seconds = _mean(of.plain_seconds, seconds)

    def drafted(self, num_rows: int, seconds: float, tokens: float) -> None:
        """Takes in that a step with drafts took `seconds`, and brought each row `tokens` on average."""
        of = self._of(num_rows)
        of.tokens = tokens if of.drafted_seconds is None else _mean(of.tokens, tokens)
        of.drafted_seconds = _mean(of.drafted_seconds, seconds)
        if of.pays:
            of.pause = FIRST_PAUSE
        elif of.steps_left <= 0:
            of.steps_left, of.pause = of.pause, min(2 * of.pause, LONGEST_PAUSE)

    def _of(self, num_rows: int) -> _Measured:
        return self._measured.setdefault(num_rows.bit_length(), _Measured())


def _mean(known: float | None, newest: float) -> float:
    return newest if known is None else known + _NEWEST * (newest - known)
