"""The queue of requests that wait for a slot and pages, in the order in which they run."""

import heapq
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter

import numpy as np

from jaxvllm.core.lora import LoraAdapter
from jaxvllm.core.request import QueueKey, Request


@dataclass(frozen=True, order=True)
class Queued:
    """A request in the queue, and whether updates report each of its tokens."""

    key: QueueKey
    request: Request = field(compare=False)
    watched: bool = field(compare=False)


class WaitingQueue:
    """Requests that wait, by their keys. One that has ended while it waited is skipped when its turn comes.

    Each adapter has a lane of its own, because all of its requests wait together where it has no slot, and nobody looks
    at each of them then. A request whose pages are being loaded waits too, beside the queue: it is `set_aside`, and
    `brought_back`. While the queue `holds` new requests, only those have a turn that have run before.
    """

    def __init__(self) -> None:
        # A heap for each adapter, by its digest; None: for requests without one. Keys are unique.
        self._lanes: dict[bytes | None, list[Queued]] = {}
        self._waiting: dict[str, Request] = {}
        self._aside: dict[str, Queued] = {}  # by id
        self._holds = False
        self._held: list[Queued] = []  # those that have no turn
        self.num_tokens = 0  # of all requests that wait

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __getitem__(self, request_id: str) -> Request:
        return self._waiting[request_id]

    def __iter__(self) -> Iterator[Request]:
        """Yields the requests that wait in the queue itself, in no order but that the first is the next."""
        self._drop_ended()
        lanes = sorted(self._lanes.values(), key=itemgetter(0))
        return (one.request for one in chain.from_iterable(lanes) if self._is_open(one))

    @property
    def requests(self) -> Iterable[Request]:
        """All requests that wait, those beside the queue too."""
        return self._waiting.values()

    def push(self, request: Request, watched: bool) -> None:
        """Queues a request. Tokens with which its constraint begins are known from now on."""
        if forced := request.forced(request.limit - request.num_tokens - 1):
            assert request.constraint is not None
            request.constraint.take_forced(forced)
            request.output_token_ids = np.concatenate([request.output_token_ids, np.array(forced, np.int32)])
            request.num_unreported += len(forced)
        self._waiting[request.request_id] = request
        self.num_tokens += request.num_tokens
        self.put_back(Queued(request.key, request, watched))

    def hold(self, holds: bool) -> None:
        """Holds requests that have never run, or, with False, gives all of them their turns again."""
        self._holds = holds
        entries = [one for one in (*chain.from_iterable(self._lanes.values()), *self._held) if self._is_open(one)]
        self._lanes, self._held = {}, []
        for one in entries:
            self.put_back(one)

    @property
    def has_turns(self) -> bool:
        """Whether a request waits that is not held."""
        return bool(self._aside) or self.next is not None

    @property
    def next(self) -> Queued | None:
        """The request whose turn it is, which stays in the queue."""
        return self.first(())

    @property
    def adapters(self) -> list[LoraAdapter]:
        """The adapters that requests in the queue have, each once."""
        firsts = (lane[0].request.adapter for lane in self._lanes.values() if lane)
        return [adapter for adapter in firsts if adapter is not None]

    def first(self, closed: Collection[bytes]) -> Queued | None:
        """Returns the request whose turn it is but for those with the adapters `closed`. It stays in the queue."""
        self._drop_ended()
        return min((lane[0] for digest, lane in self._lanes.items() if digest not in closed), default=None)

    def _drop_ended(self) -> None:
        """Sees to it that every lane begins with a request that still waits."""
        for digest, lane in [*self._lanes.items()]:
            while lane and not self._is_open(lane[0]):
                heapq.heappop(lane)
            if not lane:
                del self._lanes[digest]

    def pop(self, queued: Queued) -> None:
        """Takes out what `first` has returned. It still waits until it is `admitted`, or comes back."""
        first = heapq.heappop(self._lanes[_lane(queued)])
        assert first is queued, "another request of its lane has its turn before"

    def put_back(self, queued: Queued) -> None:
        """Puts back a request that was popped."""
        if self._holds and not queued.request.num_preemptions:
            self._held.append(queued)
        else:
            heapq.heappush(self._lanes.setdefault(_lane(queued), []), queued)

    def set_aside(self, queued: Queued) -> None:
        """Lets a request that was popped wait beside the queue."""
        self._aside[queued.request.request_id] = queued

    def bring_back(self, request_id: str) -> None:
        """Puts back a request that was set aside."""
        self.put_back(self._aside.pop(request_id))

    def admitted(self, request: Request) -> None:
        """Takes note that a request that was popped runs now."""
        del self._waiting[request.request_id]
        self.num_tokens -= request.num_tokens

    def end(self, request_id: str) -> tuple[Request | None, bool]:
        """Ends a request that waits, and returns it, if there is one, and whether it had been set aside."""
        was_aside = self._aside.pop(request_id, None) is not None
        request = self._waiting.pop(request_id, None)
        if request is not None:
            self.num_tokens -= request.num_tokens
        return request, was_aside

    def _is_open(self, queued: Queued) -> bool:
        """Returns whether the request has not ended while it waited. Another one may have its id by now."""
        return self._waiting.get(queued.request.request_id) is queued.request

    @property
    def aside(self) -> tuple[str, ...]:
        """The ids of the requests that wait beside the queue."""
        return tuple(self._aside)

    def check_invariants(self) -> None:
        """Asserts that the queue agrees with itself. For tests."""
        in_lanes = chain.from_iterable(self._lanes.values())
        queued = {one.request.request_id for one in (*in_lanes, *self._held)} | self._aside.keys()
        assert self._holds or not self._held, "a request is held, and the queue holds none"
        assert self._aside.keys() <= self._waiting.keys(), "a request that has ended is loaded"
        tokens = sum(request.num_tokens for request in self._waiting.values())
        assert self.num_tokens == tokens, "the tokens that wait are miscounted"
        assert self._waiting.keys() <= queued, "a waiting request is not in the queue"


def _lane(queued: Queued) -> bytes | None:
    adapter = queued.request.adapter
    return None if adapter is None else adapter.digest
