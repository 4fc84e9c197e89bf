"""The time of a step: what it depends on, and what tells it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxvllm.core.step_plan import Ints, StepPlan
from jaxvllm.runtime.buckets import Bucket


@dataclass(frozen=True)
class StepWork:
    """One call of a step's program, as far as its time depends on it.

    Row r computes `lengths[r]` tokens from position `starts[r]` on. The first `num_decode` rows decode, `num_steps`
    steps in one call, and their positions are those of the first step.
    """

    bucket: Bucket
    starts: Ints  # i32[R]
    lengths: Ints  # i32[R]
    num_decode: int
    num_steps: int = 1
    num_admissions: int = 0  # requests that get a slot with it, whose parameters the host sends
    is_behind: bool = False  # another step is under way when it is launched, and one of the two has prompts

    @classmethod
    def of(cls, plan: StepPlan, bucket: Bucket, num_steps: int) -> "StepWork":
        return cls(bucket, plan.starts, plan.lengths, plan.num_decode, num_steps, len(plan.admissions))

    def later(self, steps: int) -> "StepWork":
        """Returns the work of the same rows, all of which decode, so many steps later."""
        return StepWork(self.bucket, self.starts + steps, self.lengths, self.num_decode, self.num_steps)

    @property
    def num_tokens(self) -> int:
        """Tokens of one step, without padding."""
        return self.num_decode + int(sum(self.lengths[self.num_decode :].tolist()))

    @property
    def num_prompts(self) -> int:
        """Rows that compute a part of a prompt."""
        return len(self.starts) - self.num_decode

    def positions(self, window: int | None = None) -> float:
        """Returns how many positions one step reads in a layer with that window, as the mean of the steps."""
        if window is None:
            return float(self.starts.sum()) + self.num_tokens + len(self.starts) * (self.num_steps - 1) / 2
        seen = self.starts + self.lengths + (self.num_steps - 1) / 2
        return float(np.minimum(seen, window - 1 + self.lengths).sum())

    def decode_positions(self) -> float:
        """Returns how many positions rows that decode see in one step without windows, as the mean of the steps."""
        return float(self.starts[: self.num_decode].sum()) + self.num_decode * (self.num_steps + 1) / 2

    def pairs(self, window: int | None = None) -> float:
        """Returns how many pairs of a query and a position that it sees a layer with that window has, as the mean."""
        if window is None:
            return self.decode_positions() + self.prompt_pairs()
        first = self.starts + 1 + (self.num_steps - 1) / 2  # seen by the first query of each row
        # The queries that see fewer positions than the window has come first.
        below = np.clip(window - first, 0, self.lengths)
        return float((below * (2 * first + below - 1) / 2 + (self.lengths - below) * window).sum())

    def prompt_pairs(self) -> float:
        """Returns how many pairs of a query of a prompt and a position that it sees there are, without windows."""
        starts, lengths = self.starts[self.num_decode :].tolist(), self.lengths[self.num_decode :].tolist()
        doubled: int = sum(length * (2 * start + length + 1) for start, length in zip(starts, lengths, strict=True))
        return doubled / 2


class StepCost(Protocol):
    """Tells how long steps take on average, and how much they vary."""

    @property
    def request_seconds(self) -> float:
        """The time in which the host makes and queues a request."""

    @property
    def jitter(self) -> Sequence[float]:
        """Factors of the device's time, 1 on average: calls of the same work take each of them equally often."""

    def device_seconds(self, work: StepWork) -> float:
        """Returns the time of the whole call on the device, all of its steps together."""

    def launch_seconds(self, work: StepWork) -> float:
        """Returns the time in which the host plans and launches the call. The device can begin afterwards."""

    def read_seconds(self, work: StepWork) -> float:
        """Returns the time in which the host turns the tokens of the call into outputs. Callers see them afterwards."""
