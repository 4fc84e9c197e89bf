"""`Router`: chooses the replica for each request."""

from collections.abc import Iterable

from jaxvllm.core.request import Request
from jaxvllm.core.scheduler import Scheduler

# A running request shares steps that are computed anyway, while a waiting one is work not begun. The weight is vLLM's.
WAITING_WEIGHT = 4


class Router:
    """Distributes requests among the schedulers of equal replicas.

    The least loaded scheduler gets a request. Among several of the same load, the one whose prefix cache holds most of
    the prompt gets it, and after that the one that was chosen longest ago.
    """

    def __init__(self, schedulers: Iterable[Scheduler]):
        self._turns = list(schedulers)  # the one chosen longest ago is first

    def choose(self, request: Request) -> Scheduler:
        """Returns the scheduler for `request`. Takes O(replicas), and hashes the prompt only in a tie."""
        loads = [WAITING_WEIGHT * scheduler.num_waiting + scheduler.num_running for scheduler in self._turns]
        least = [scheduler for scheduler, load in zip(self._turns, loads, strict=True) if load == min(loads)]
        # `max` returns the first of several largest.
        chosen = least[0] if len(least) == 1 else max(least, key=lambda one: one.num_cached_tokens(request))
        self._turns.remove(chosen)
        self._turns.append(chosen)
        return chosen
