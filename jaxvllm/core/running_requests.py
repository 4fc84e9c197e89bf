"""`RunningRequests`: the requests that have a slot, and their order."""

from collections.abc import Iterator

from jaxvllm.core.request import Request
from jaxvllm.core.slots import SlotTable


class RunningRequests:
    """The slot of each running request by its id: of a beam search, the slot of one of its beams."""

    def __init__(self, slots: SlotTable):
        self._slots = slots
        self._slot_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slot_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._slot_of)

    def slot(self, request_id: str) -> int | None:
        """Returns the slot of a request, if it runs."""
        return self._slot_of.get(request_id)

    def put(self, request_id: str, slot: int) -> None:
        """Takes note that a request has this slot now."""
        self._slot_of[request_id] = slot

    def remove(self, request_id: str) -> None:
        """Takes note that a request runs no more."""
        del self._slot_of[request_id]

    @property
    def last(self) -> int:
        """The slot of the last one in the queue's order, which is preempted first."""
        return max(self._slot_of.values(), key=lambda slot: self._slots.tenant(slot).key)

    def in_order(self) -> Iterator[tuple[int, Request]]:
        """Returns the slot and the request of all that run, in the queue's order."""
        at = sorted(self._slot_of.values(), key=lambda slot: self._slots.tenant(slot).key)
        return ((slot, self._slots.tenant(slot)) for slot in at)

    def check_invariants(self) -> None:
        """Asserts that each slot is that of its request. For tests."""
        assert all(self._slots.tenant(slot).request_id == name for name, slot in self._slot_of.items())
