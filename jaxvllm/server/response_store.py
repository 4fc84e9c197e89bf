"""`ResponseStore`: the latest responses of `/v1/responses`, so that a request may follow one of them."""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxvllm.server.errors import ApiError

# A response is kept with its whole conversation, of which an agent's has about 100 KB after many turns.
MAX_RESPONSES = 4096
MAX_BYTES = 2**26


@dataclass(frozen=True)
class StoredResponse:
    """A response that has ended, and all items that it answers, also those of the responses before it, as JSON."""

    response: bytes
    items: bytes
    item_ids: tuple[str, ...] = ()  # of its output and of the items that its request brought

    def all_items(self) -> list[dict[str, Any]]:
        """Returns the items of the conversation up to the end of the response."""
        return [*json.loads(self.items), *json.loads(self.response)["output"]]

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items)


class ResponseStore:
    """Keeps responses in memory, each for its owner alone. The oldest make room for new ones. Threads may share it."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES):
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._stored: OrderedDict[tuple[bytes, str], StoredResponse] = OrderedDict()
        self._holders: dict[tuple[bytes, str], str] = {}  # the response that has an item, by the item's id
        self._num_bytes = 0

    def add(self, owner: bytes, response_id: str, stored: StoredResponse) -> None:
        """Stores a response, unless it is larger than all of them together may be."""
        if stored.num_bytes > self._max_bytes:
            return
        with self._lock:
            self._drop((owner, response_id))
            self._stored[owner, response_id] = stored
            self._holders |= {(owner, item_id): response_id for item_id in stored.item_ids}
            self._num_bytes += stored.num_bytes
            while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._stored)))

    def find(self, owner: bytes, response_id: str) -> StoredResponse | None:
        """Returns the owner's response of this id, or None."""
        with self._lock:
            return self._stored.get((owner, response_id))

    def get(self, owner: bytes, response_id: str) -> StoredResponse:
        """Returns the owner's response of this id. Raises ApiError if there is none."""
        if (found := self.find(owner, response_id)) is None:
            raise _not_found(response_id)
        return found

    def items(self, owner: bytes, item_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Returns those of the owner's items that are stored, by their ids."""
        with self._lock:
            names = {self._holders.get((owner, item_id)): None for item_id in item_ids}
            holders = [self._stored[owner, name] for name in names if name is not None]
        return {item["id"]: item for holder in holders for item in holder.all_items()}

    def remove(self, owner: bytes, response_id: str) -> None:
        """Forgets the owner's response of this id. Raises ApiError if there is none."""
        with self._lock:
            if not self._drop((owner, response_id)):
                raise _not_found(response_id)

    def _drop(self, key: tuple[bytes, str]) -> bool:
        if (dropped := self._stored.pop(key, None)) is None:
            return False
        self._num_bytes -= dropped.num_bytes
        owner, response_id = key
        for item_id in dropped.item_ids:
            if self._holders.get((owner, item_id)) == response_id:
                del self._holders[owner, item_id]
        return True


def _not_found(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"Response with id {response_id!r:.80} not found: it was not stored, was deleted, or made room for later ones",
    )
