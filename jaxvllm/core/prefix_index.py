"""`PrefixIndex`: which pages each of several replicas has cached, as far as their KV events tell."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from jaxvllm.core.kv_events import AllBlocksCleared, AnyKVEvent, BlockRemoved, BlockStored, KVEventBatch
from jaxvllm.core.lora import adapter_in, salted

_decode = msgspec.msgpack.Decoder(KVEventBatch).decode


class PrefixIndex:
    """Keys of pages (`kv_events.page_keys`) by replica. A hint: what it says was true when the event was sent.

    A key beyond `max_pages` of one replica takes the place of the one that was stored longest ago.
    """

    def __init__(self, max_pages: int = 1_000_000):
        """Limits the pages of each replica to `max_pages`. A million take 150 MiB (measured by hand)."""
        if max_pages < 1:
            raise ValueError(f"max_pages must be at least 1, not {max_pages}")
        self._max_pages = max_pages
        self._pages: dict[str, OrderedDict[int, None]] = {}  # by replica; the key that was stored last is the last
        self._adapters: dict[str, dict[str, str]] = {}  # by name and replica, what stands for them in salts
        self.page_size: int | None = None  # tokens, the same in all replicas; None: no event has told it

    def num_cached(self, replica: str, keys: Iterable[int]) -> int:
        """Returns how many of a prompt's pages, from its first on, `replica` has. An unknown replica has none."""
        pages = self._pages.get(replica, ())
        count = 0
        for key in keys:
            if key not in pages:
                break
            count += 1
        return count

    def salt(self, replica: str, model: str | None, given: str | None) -> str | None:
        """Returns the salt that prompts for `model` have on `replica`, of those that have the salt `given`.

        Raises KeyError for an adapter of which `replica` has told no page, and others have.
        """
        adapters = None if model is None else self._adapters.get(model)
        return given if adapters is None else salted(adapters[replica], given)

    def num_pages(self, replica: str) -> int:
        """Returns how many pages `replica` is known to have."""
        return len(self._pages.get(replica, ()))

    def apply(self, replica: str, event: AnyKVEvent) -> None:
        """Takes note of an event of `replica`.

        The first group of layers sees most, so its pages tell what is cached, and events of others change nothing.
        """
        match event:
            case AllBlocksCleared():
                self.forget(replica)
            case BlockStored() if not event.group_idx:
                self.page_size = event.block_size
                self.store(replica, event.block_hashes)
                self._note_adapter(replica, event)
            case BlockRemoved() if not event.group_idx:
                for key in event.block_hashes if replica in self._pages else ():
                    self._pages[replica].pop(key, None)

    def _note_adapter(self, replica: str, event: BlockStored) -> None:
        first = event.extra_keys[0] if event.extra_keys else None
        if event.lora_name is not None and event.parent_block_hash is None and first:
            if (adapter := adapter_in(first[0])) is not None:
                self._adapters.setdefault(event.lora_name, {})[replica] = adapter

    def store(self, replica: str, keys: Sequence[int]) -> None:
        """Takes note that `replica` has pages with these keys."""
        pages = self._pages.setdefault(replica, OrderedDict())
        for key in keys:
            pages[key] = None
            pages.move_to_end(key)
        for _ in range(len(pages) - self._max_pages):
            pages.popitem(last=False)

    def forget(self, replica: str) -> None:
        """Forgets all pages of `replica`."""
        self._pages.pop(replica, None)


class KVEventReader:
    """Tells an index the batches of one publisher, in order, and notices those that are missing.

    The caller moves the bytes. Where `receive` returns False, it asks the publisher again for the batches from
    `replay_from` on, and gives them to `receive` too. `skip_to` leaves out those that the publisher has no longer.
    """

    def __init__(self, index: PrefixIndex, replica: str):
        self._index = index
        self._replica = replica
        self.next_number = 0
        self._last_time: float | None = None  # of the batch before the next; None: it was not received

    @property
    def replay_from(self) -> int:
        """The first batch to ask for: the last one that was received, which shows whether the publisher is the same."""
        return max(self.next_number - 1, 0)

    def receive(self, number: int, payload: bytes) -> bool:
        """Takes the batch `number`. Returns False, and changes nothing, if batches before it are missing.

        A batch that was received before changes nothing. If its number is known and its time is not, the publisher was
        started again: what its replica had cached is gone. Raises msgspec.DecodeError for what is no batch.
        """
        batch = _decode(payload)
        if number < self.next_number:
            if not self._is_new(number, batch.ts):
                return True
            self._index.forget(self._replica)
            self.next_number = 0
        if number > self.next_number:
            return False
        for event in batch.events:
            self._index.apply(self._replica, event)
        self.next_number = number + 1
        self._last_time = batch.ts
        return True

    def skip_to(self, number: int) -> None:
        """Gives up the batches before `number`. Pages may have gone in them, so all of the replica are forgotten."""
        self._index.forget(self._replica)
        self.next_number = number
        self._last_time = None

    def _is_new(self, number: int, time: float) -> bool:
        """Returns whether a batch of that number and time was published after the one that was received last."""
        if self._last_time is None:
            return False
        return time > self._last_time or (number == self.next_number - 1 and time != self._last_time)
