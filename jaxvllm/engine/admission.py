"""How many requests may wait for an engine before it takes no more."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxvllm.core.scheduler import Scheduler


class OverloadedError(RuntimeError):
    """Too many requests wait already: ask again later."""


@dataclass(frozen=True)
class QueueLimits:
    """What may wait beyond the requests that can run at once; None: any number."""

    num_requests: int | None = None
    num_tokens: int | None = None  # of prompts

    def most(self, num_slots: int) -> int | None:
        """Requests that may run, in so many slots, and wait; None: any number."""
        return None if self.num_requests is None else num_slots + self.num_requests

    def check(self, schedulers: Sequence[Scheduler], num_requests: int, num_tokens: int) -> None:
        """Raises OverloadedError when so many more requests, with so many tokens in all, are too many.

        ValueError for so many that they never could all wait, or run.
        A request that finds a free slot does not wait: the next step takes it, if there are pages.
        """
        most = self.most(sum(scheduler.slots.num_slots for scheduler in schedulers))
        if most is not None and num_requests > most:
            raise ValueError(f"n is {num_requests}, and {most} requests are the most that may run and wait: lower it")
        waiting = sum(scheduler.num_waiting for scheduler in schedulers) + num_requests
        free = sum(scheduler.slots.num_slots - scheduler.num_running for scheduler in schedulers)
        if waiting <= free:
            return
        if self.num_requests is not None and waiting - free > self.num_requests:
            raise OverloadedError(f"{self.num_requests} requests wait already, the most that may: try again later")
        if self.num_tokens is not None:
            tokens = sum(scheduler.num_waiting_tokens for scheduler in schedulers) + num_tokens
            if tokens > self.num_tokens:
                raise OverloadedError(
                    f"prompts of {tokens} tokens would wait, and the most is {self.num_tokens}: try again later"
                )
