"""Which replica a request goes to."""

from collections.abc import Iterable

from jaxvllm.core.request import Request
from jaxvllm.core.scheduler import Scheduler

# A running request has its share of steps that are made anyway; a waiting one is work not begun. vLLM weighs them so.
WAITING_WEIGHT = 4


class Router:
    """Shares requests out among the schedulers of equal replicas.

    The least loaded gets a request. Among equals, the one whose prefix cache holds most of the prompt; then the one
    that was chosen the longest ago.
    """

    def __init__(self, schedulers: Iterable[Scheduler]):
        self._turns = list(schedulers)  # the one chosen the longest ago first

    def choose(self, request: Request) -> Scheduler:
        """The scheduler that `request` should be added to. Takes O(replicas), and hashes the prompt only in a tie."""
        loads = [WAITING_WEIGHT * scheduler.num_waiting + scheduler.num_running for scheduler in self._turns]
        least = [scheduler for scheduler, load in zip(self._turns, loads, strict=True) if load == min(loads)]
        # `max` takes the first of equals.
        chosen = least[0] if len(least) == 1 else max(least, key=lambda one: one.num_cached_tokens(request))
        self._turns.remove(chosen)
        self._turns.append(chosen)
        return chosen
