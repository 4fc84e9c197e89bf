"""`Router`: chooses the replica for each request."""

from collections.abc import Iterable

from jaxvllm.core.request import Request
from jaxvllm.core.routing import POLICIES, Asked
from jaxvllm.core.scheduler import Scheduler


class _ReplicaCandidate:
    """The part of a replica that a routing policy sees."""

    def __init__(self, place: int, scheduler: Scheduler):
        self.name = str(place)
        self.scheduler = scheduler
        self.last_chosen = -1

    @property
    def num_running(self) -> int:
        return self.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    @property
    def num_queued_tokens(self) -> int:
        return self.scheduler.num_waiting_tokens + self.scheduler.num_uncomputed_tokens


class Router:
    """Distributes requests among the schedulers of equal replicas, by a policy of `core/routing.py`."""

    def __init__(self, schedulers: Iterable[Scheduler], policy: str = "least-load"):
        self._replicas = [_ReplicaCandidate(place, scheduler) for place, scheduler in enumerate(schedulers)]
        self._policy = POLICIES[policy]
        self._num_chosen = 0

    def choose(self, request: Request) -> Scheduler:
        """Returns the scheduler for `request`. Takes O(replicas), and hashes the prompt where the policy needs it."""
        replicas = self._replicas
        asked = Asked(
            num_tokens=request.num_tokens,
            session_id=request.asked.session_id,
            num_cached=lambda place: replicas[place].scheduler.num_cached_tokens(request),
        )
        chosen = replicas[self._policy(replicas, asked)]
        chosen.last_chosen = self._num_chosen
        self._num_chosen += 1
        return chosen.scheduler
