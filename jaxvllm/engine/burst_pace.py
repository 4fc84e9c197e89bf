"""How many decode steps one program takes: as many as fit into the time that an arrival may wait for it."""

# The time that a burst may take where requests arrive at any moment. Two bursts may be under way, so an arrival waits
# for them at most 8 ms, or for two steps where one takes longer than 4 ms.
SERVING_SECONDS = 0.004
# Where all requests are there from the start, a burst delays only Ctrl-C.
OFFLINE_SECONDS = 0.05
# Weight of the newest measurement: a step that the machine delayed is forgotten after a few others.
_NEWEST = 0.25


class BurstPace:
    """Measures decode steps, and says how many of them fit into `max_seconds`."""

    def __init__(self, max_seconds: float):
        self._max_seconds = max_seconds
        self._step_seconds: dict[int, float] = {}  # by the bit length of the number of rows

    def width(self, num_rows: int, most: int) -> int:
        """How many decode steps of `num_rows` rows one program may take, from 1 to `most`."""
        seconds = self._step_seconds.get(num_rows.bit_length())
        if seconds is None:
            return 1  # to measure
        return max(1, min(most, int(self._max_seconds / seconds)))

    def measured(self, num_rows: int, num_steps: int, seconds: float) -> None:
        """Takes in that `num_steps` decode steps of `num_rows` rows took `seconds`."""
        step = seconds / num_steps
        known = self._step_seconds.setdefault(num_rows.bit_length(), step)
        self._step_seconds[num_rows.bit_length()] = known + _NEWEST * (step - known)
