"""The pace of bursts: one program takes as many decode steps as fit into the time that an arrival may wait for it."""

import math
from dataclasses import dataclass, field

# The time that a burst may take where requests arrive at any moment. Two bursts may be under way, so an arrival waits
# for them at most 8 ms, or for two steps where one takes longer than 4 ms.
SERVING_SECONDS = 0.004
# Where all requests are there from the start, a burst delays only Ctrl-C.
OFFLINE_SECONDS = 0.05
# Weight of the newest measurement: a step that the machine delayed is forgotten after a few others.
_NEWEST = 0.25
# After so many bursts of the same length one is a step longer, if it takes at most twice the time by what is known. A
# call costs something beside its steps: 20 rows took 2.6 ms for one step and 3.2 for two, so that by the time of one
# there seemed to be no room for two in 4 ms, and requests got single steps for ever (5.1 ms a token and not 0.6).
_SAME = 16
# What a burst took is forgotten after so many others: the machine may have been slow then.
_KEPT = 64


@dataclass
class _Bursts:
    """The times of bursts of some number of rows, by their steps."""

    seconds: dict[int, float] = field(default_factory=dict)
    measured_at: dict[int, int] = field(default_factory=dict)  # by their steps, as a number of bursts
    num_bursts: int = 0
    num_same: int = 0  # bursts that were as long as possible since a longer one was measured

    def longest(self, max_seconds: float) -> int:
        """Returns the most steps that fit into `max_seconds`: on a line between two known bursts, or in proportion."""
        steps, seconds = 0, 0.0
        for more_steps, known in sorted(self.seconds.items()):
            more_seconds = max(known, seconds)  # a longer burst takes no less
            if more_seconds > max_seconds:
                return max(1, steps + int((max_seconds - seconds) / (more_seconds - seconds) * (more_steps - steps)))
            steps, seconds = more_steps, more_seconds
        return max(1, int(max_seconds / seconds * steps))

    def measured(self, num_steps: int, seconds: float, max_seconds: float) -> None:
        longest = self.longest(max_seconds) if self.seconds else 0
        self.num_same = 0 if num_steps > longest else self.num_same + (num_steps == longest)
        known = self.seconds.setdefault(num_steps, seconds)
        self.seconds[num_steps] = known + _NEWEST * (seconds - known)
        self.num_bursts += 1
        self.measured_at[num_steps] = self.num_bursts
        for old in [steps for steps, number in self.measured_at.items() if number <= self.num_bursts - _KEPT]:
            del self.seconds[old], self.measured_at[old]


class BurstPace:
    """Measures decode steps, and says how many of them fit into `max_seconds`."""

    def __init__(self, max_seconds: float):
        self._max_seconds = max_seconds
        self._bursts: dict[int, _Bursts] = {}  # by the bit length of the number of rows

    def is_known(self, num_rows: int) -> bool:
        """Returns whether steps of so many rows were measured."""
        return num_rows.bit_length() in self._bursts

    def width(self, num_rows: int, most: int) -> int:
        """Returns how many decode steps of `num_rows` rows one program may take, from 1 to `most`."""
        bursts = self._bursts.get(num_rows.bit_length())
        if bursts is None:
            return 1  # to measure
        longest = bursts.longest(self._max_seconds)
        return min(most, longest + (bursts.num_same >= _SAME and self._may_try(bursts, longest + 1)))

    def num_alike(self, num_rows: int, most: int) -> float:
        """Returns how many bursts of `num_rows` rows may follow before a longer one is tried to measure it.

        Bursts of `most` steps are never longer.
        """
        bursts = self._bursts.get(num_rows.bit_length(), _Bursts())
        longest = bursts.longest(self._max_seconds) if bursts.seconds else most
        if longest >= most or not self._may_try(bursts, longest + 1):
            return math.inf
        return max(_SAME - bursts.num_same, 1)

    def _may_try(self, bursts: _Bursts, num_steps: int) -> bool:
        seconds = bursts.seconds.get(num_steps - 1, self._max_seconds)
        return seconds * num_steps / (num_steps - 1) <= 2 * self._max_seconds

    def measured(self, num_rows: int, num_steps: int, seconds: float) -> None:
        """Takes in that `num_steps` decode steps of `num_rows` rows took `seconds`."""
        bursts = self._bursts.setdefault(num_rows.bit_length(), _Bursts())
        bursts.measured(num_steps, seconds, self._max_seconds)
