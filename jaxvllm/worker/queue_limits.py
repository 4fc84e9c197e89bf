"""Limits to the requests that may wait for an engine before it takes no more."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxvllm.core.errors import OverloadedError
from jaxvllm.core.scheduler import Scheduler


@dataclass(frozen=True)
class QueueLimits:
    """Limits to the requests that wait, in addition to those that can run at once. None means any number."""

    num_requests: int | None = None
    num_tokens: int | None = None  # tokens of their prompts

    def share(self, count: int) -> "QueueLimits":
        """Returns the limits of each of `count` engines that share these evenly, rounded up."""

        def part(limit: int | None) -> int | None:
            return None if limit is None else -(-limit // count)

        return QueueLimits(part(self.num_requests), part(self.num_tokens))

    def most(self, num_slots: int) -> int | None:
        """Returns how many requests may run, in `num_slots` slots, and wait together. None means any number."""
        return None if self.num_requests is None else num_slots + self.num_requests

    def check(self, schedulers: Sequence[Scheduler], num_requests: int, num_tokens: int) -> None:
        """Raises OverloadedError when `num_requests` more, with `num_tokens` in all, would exceed the limits now.

        Raises ValueError when there are so many that they could never all run or wait. A request that finds a free
        slot does not wait: the next step takes it, if there are pages.
        """
        most = self.most(sum(scheduler.slots.num_slots for scheduler in schedulers))
        if most is not None and num_requests > most:
            raise ValueError(f"n is {num_requests}, and {most} requests are the most that may run and wait: lower it")
        waiting = sum(scheduler.num_waiting for scheduler in schedulers) + num_requests
        free = sum(scheduler.slots.num_slots - scheduler.num_running for scheduler in schedulers)
        if waiting <= free:
            return
        if self.num_requests is not None and waiting - free > self.num_requests:
            raise OverloadedError(f"{self.num_requests} requests wait already, which is the limit: try again later")
        if self.num_tokens is not None:
            tokens = sum(scheduler.num_waiting_tokens for scheduler in schedulers) + num_tokens
            if tokens > self.num_tokens:
                raise OverloadedError(
                    f"prompts of {tokens} tokens would wait, and the most is {self.num_tokens}: try again later"
                )
