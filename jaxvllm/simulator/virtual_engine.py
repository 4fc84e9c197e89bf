"""`VirtualEngine`: the real router over virtual replicas, and the host that serves all of them one after the other."""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.request import GenerationRequest, Prompt, QueueKey, Request, TokenIds
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.engine.router import Router
from jaxvllm.simulator.engine_setup import BucketChoice, EngineSetup
from jaxvllm.simulator.ledger import Ledger
from jaxvllm.simulator.step_cost import StepCost
from jaxvllm.simulator.timeline import EngineLoad, LoadTimeline
from jaxvllm.simulator.transfer import Transfer, has_room, import_pages
from jaxvllm.simulator.virtual_replica import VirtualReplica, VirtualRequest

# One value for all requests: to check such a value takes longer than to simulate a step.
_PARAMS = SamplingParams(ignore_eos=True, max_tokens=None)


@dataclass(frozen=True)
class Incoming:
    """A request on its way to an engine. With `is_computed`, the KV of all tokens but the last comes with it."""

    at: float
    number: int  # in the ledger
    tokens: TokenIds
    answer: int  # the token that it generates
    num_output: int
    is_computed: bool = False


@dataclass(frozen=True)
class Outgoing:
    """A request that an engine has ended."""

    at: float
    incoming: Incoming
    replica: int


class VirtualEngine:
    """Steps its replicas as `engine.engine.Engine` does, on a clock that stands still unless something takes time."""

    def __init__(self, setup: EngineSetup, cost: StepCost, ledger: Ledger):
        self.now = 0.0
        self.timeline = LoadTimeline()
        self._setup = setup
        self._cost = cost
        self._ledger = ledger
        self._open: dict[str, Incoming] = {}
        buckets = BucketChoice(setup.ladder)
        self.replicas = tuple(
            VirtualReplica(setup, cost, ledger, self._about, buckets) for _ in range(setup.num_replicas)
        )
        self._router = Router((replica.scheduler for replica in self.replicas), setup.routing_policy)
        self._landed: deque[tuple[Incoming, Request]] = deque()  # computed elsewhere, and without pages here

    def run(self, arrivals: Iterable[Incoming]) -> Iterator[Outgoing]:
        """Serves `arrivals`, which come in the order of time, and yields the requests as they end."""
        coming = iter(arrivals)
        following = next(coming, None)
        while following is not None or self._has_work:
            if following is not None and following.at > self.now and not self._has_work:
                self.now = following.at
            while following is not None and following.at <= self.now:
                self._submit(following)
                following = next(coming, None)
            if self._has_work:  # or all that came were refused
                yield from self._step(math.inf if following is None else following.at)
                self._note_load()

    @property
    def _has_work(self) -> bool:
        return bool(self._landed) or any(replica.has_work for replica in self.replicas)

    def _submit(self, incoming: Incoming) -> None:
        name = str(incoming.number)
        limit = len(incoming.tokens) + incoming.num_output
        request = Request(
            GenerationRequest(name, Prompt(None, incoming.tokens), _PARAMS), 0, (), limit, QueueKey(0, incoming.number)
        )
        try:
            if limit > self._setup.max_model_len:
                raise ParameterError(f"{limit} tokens exceed the model's {self._setup.max_model_len}")
            self.replicas[0].scheduler.check_fits(len(incoming.tokens), limit)
        except ParameterError:
            return  # it never ends, and so it counts as failed
        self._open[name] = incoming
        self.now += self._cost.request_seconds
        if incoming.is_computed:
            self._landed.append((incoming, request))
        else:
            self._router.choose(request).add(request)

    def _step(self, horizon: float) -> Iterator[Outgoing]:
        """Dispatches each replica's next step and reads those that are done, as `Engine.step` does."""
        self._land()
        before = self.now
        num_busy = sum([replica.has_work for replica in self.replicas])
        for replica in self.replicas:
            self.now = replica.dispatch(self.now, horizon, num_busy)
        ready = self._to_collect()
        ended: list[tuple[int, Request]] = []
        for index in ready:
            replica = self.replicas[index]
            self.now = max(self.now, replica.ready_at)
            self.now, requests = replica.collect(self.now)
            ended += [(index, request) for request in requests]
        assert self.now > before or ready or any(one.is_busy for one in self.replicas), "nothing can go on"
        for index, request in ended:
            incoming = self._open.pop(request.request_id)
            yield Outgoing(self._ledger.last(incoming.number), incoming, index)

    def _to_collect(self) -> list[int]:
        """Returns the replicas whose oldest step must be read now.

        If several are busy, these are the ones that are done.
        """
        busy = [index for index, replica in enumerate(self.replicas) if replica.is_busy]
        due = [index for index in busy if self.replicas[index].is_due]
        if len(busy) < 2:
            return due
        if len(due) == len(busy):
            self.now = max(self.now, min(self.replicas[index].ready_at for index in due))
        return [index for index in due if self.replicas[index].ready_at <= self.now]

    def _land(self) -> None:
        """Gives requests that were computed elsewhere their pages, in their order, as far as there is room."""
        while self._landed:
            _, request = self._landed[0]
            scheduler = self._router.choose(request)
            if scheduler.slots.num_free <= scheduler.num_waiting or not has_room(scheduler.cache, request):
                return
            import_pages(scheduler.cache, request)
            scheduler.add(request)
            self._landed.popleft()

    def _about(self, request: Request) -> VirtualRequest:
        incoming = self._open[request.request_id]
        return VirtualRequest(incoming.number, incoming.answer, incoming.is_computed)

    def _note_load(self) -> None:
        owned, pages, running, waiting = 0, 0, 0, len(self._landed)
        for replica in self.replicas:
            scheduler = replica.scheduler
            owned += scheduler.cache.num_owned
            pages += scheduler.cache.num_pages
            running += scheduler.num_running
            waiting += scheduler.num_waiting
        self.timeline.add(EngineLoad(self.now, owned / pages, running, waiting))


def transferred(ended: Iterable[Outgoing], transfer: Transfer, num_outputs: dict[int, int]) -> Iterator[Incoming]:
    """Yields the requests that a pool has prefilled when they reach the next one, in the order of time.

    `num_outputs` are the tokens that each is still to get. Each replica sends over a link of its own.
    """
    links: dict[int, float] = {}
    on_the_way: list[tuple[float, int, Incoming]] = []
    for one in ended:
        # Nothing that ends from now on can arrive before this moment.
        while on_the_way and on_the_way[0][0] <= one.at:
            yield heapq.heappop(on_the_way)[2]
        number = one.incoming.number
        free_at = max(links.get(one.replica, 0.0), one.at) + transfer.seconds(len(one.incoming.tokens))
        links[one.replica] = free_at
        at = free_at + transfer.latency
        tokens = np.append(one.incoming.tokens, np.int32(one.incoming.answer))
        arriving = Incoming(at, number, tokens, one.incoming.answer, num_outputs.pop(number), is_computed=True)
        heapq.heappush(on_the_way, (at, number, arriving))
    while on_the_way:
        yield heapq.heappop(on_the_way)[2]
