"""How far a scheduler is paused, and what of an engine sleeps. The modes, states and tags are vLLM's."""

from enum import Enum, auto
from typing import Literal

# abort: all requests end now. wait: requests that have begun end first. keep: they stay where they are.
type PauseMode = Literal["abort", "wait", "keep"]
PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")

# What may sleep. `scheduling` is a pause alone.
type SleepTag = Literal["weights", "kv_cache", "scheduling"]
SLEEP_TAGS: tuple[SleepTag, ...] = ("weights", "kv_cache", "scheduling")
SLEEP_LEVELS = (0, 1, 2)


class PauseState(Enum):
    """The requests that a scheduler computes."""

    UNPAUSED = auto()  # all
    PAUSED_NEW = auto()  # those that have begun; the others wait
    PAUSED_ALL = auto()  # none

    @staticmethod
    def of(mode: PauseMode) -> "PauseState":
        """Returns the state of a pause. Raises ValueError for a mode that does not exist."""
        if mode not in PAUSE_MODES:
            raise ValueError(f"mode must be one of {', '.join(PAUSE_MODES)}, not {mode!r}")
        return PauseState.PAUSED_NEW if mode == "wait" else PauseState.PAUSED_ALL
