"""KV events: which full pages the prefix cache can find since when, by their hashes, and which ones no longer.

The structs are vLLM's, with vLLM's names (a block is a page) and encoding: since June 2026 an event is a MessagePack
map with its tag under `type`, and a batch is an array. Routers that read vLLM's events read these.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.page_pool import extend_page_hashes
from jaxvllm.core.request import Prompt, Request

# What vLLM calls the memory of the device that computes. Routers weigh tiers by this name, whatever the device is.
DEVICE_MEDIUM = "GPU"
# The number of the message that ends an answer with earlier batches.
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

# What the layers of a group keep, by vLLM's names.
SpecKind = Literal["full_attention", "sliding_window", "mamba"]


class KVEvent(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """Something that happened to findable pages. The name of its class is its tag."""


class BlockStored(KVEvent, frozen=True):
    """Pages became findable, one after the other."""

    block_hashes: list[int]  # one a page: the last 8 bytes of its hash
    parent_block_hash: int | None  # of the page before the first; None: a prompt begins with the first
    token_ids: list[int]  # of all these pages
    block_size: int  # tokens in a page
    lora_id: int | None  # an older way of saying `lora_name`
    medium: str | None
    lora_name: str | None  # the name of the adapter that computed the pages
    # What hashes depend on beside tokens: the salt, which is told of the first page of a prompt alone, and the keys of
    # side inputs, in hexadecimal digits. The salt is the cache_salt, or that of an adapter (`lora.salted`).
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None  # of the layers; group 0 sees most
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    session_id: str | None = None  # of the request that computed the pages


class BlockRemoved(KVEvent, frozen=True):
    """Pages are no longer findable."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVEvent, frozen=True):
    """No page of any group is findable any more."""


type AnyKVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Events in the order in which they happened."""

    ts: float  # Unix time, seconds
    events: list[AnyKVEvent]
    data_parallel_rank: int | None = None  # the replica


def hash_key(digest: bytes) -> int:
    """Returns how events name the page with the hash `digest`. As in vLLM, its last 8 bytes as a big-endian number."""
    return int.from_bytes(digest[-8:], "big")


def page_keys(
    token_ids: NDArray[np.int32],
    page_size: int,
    salt: str | None = None,
    extra_keys: Callable[[int, int], Sequence[bytes]] | None = None,
) -> list[int]:
    """Returns how events name the full pages of a prompt, first to last."""
    return [hash_key(digest) for digest in extend_page_hashes([], token_ids, page_size, salt, extra_keys)]


class KVEventLog:
    """Collects the events of one KV cache, in order, until `take`."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._events: list[AnyKVEvent] = []
        self._removed: list[int] = []  # since the last event, of `_removed_group`
        self._removed_group = 0

    def stored(
        self,
        group: int,
        kind: SpecKind,
        window: int | None,
        columns: Sequence[int],
        hashes: Sequence[bytes],
        request: Request,
    ) -> None:
        """Takes note that the pages at `columns` of `request` became findable in `group`.

        `hashes` are those of all its full pages. An event is made of each run of columns that follow each other.
        """
        self._end_removed()
        page_size, token_ids = self._page_size, request.token_ids()
        for first, end in _runs(columns):
            event = BlockStored(
                block_hashes=[hash_key(digest) for digest in hashes[first:end]],
                parent_block_hash=hash_key(hashes[first - 1]) if first else None,
                token_ids=token_ids[first * page_size : end * page_size].tolist(),
                block_size=page_size,
                lora_id=None,
                medium=DEVICE_MEDIUM,
                lora_name=None if request.adapter is None else request.adapter.name,
                extra_keys=_extra_keys(request.asked.prompt, page_size, first, end),
                group_idx=group,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window if kind == "sliding_window" else None,
                session_id=request.asked.session_id,
            )
            self._events.append(event)

    def removed(self, group: int, digest: bytes) -> None:
        """Takes note that the page with this hash is no longer findable in `group`."""
        if self._removed and group != self._removed_group:
            self._end_removed()
        self._removed_group = group
        self._removed.append(hash_key(digest))

    def cleared(self) -> None:
        """Takes note that nothing is findable any more. What happened before and was not taken matters no more."""
        self._removed = []
        self._events = [AllBlocksCleared()]

    def take(self) -> list[AnyKVEvent]:
        """Returns the events since the last call."""
        self._end_removed()
        events, self._events = self._events, []
        return events

    def _end_removed(self) -> None:
        if self._removed:
            self._events.append(BlockRemoved(self._removed, DEVICE_MEDIUM, group_idx=self._removed_group))
            self._removed = []


def _extra_keys(prompt: Prompt, page_size: int, first: int, end: int) -> list[tuple[str, ...] | None] | None:
    """Returns the extra keys of each page from column `first` to `end`, or None where no page has any."""
    if prompt.cache_salt is None and not prompt.side_inputs:
        return None
    keys = [
        [key.hex() for key in prompt.extra_keys(column * page_size, (column + 1) * page_size)]
        for column in range(first, end)
    ]
    if prompt.cache_salt is not None and not first:
        keys[0].insert(0, prompt.cache_salt)
    return [tuple(of_page) or None for of_page in keys] if any(keys) else None


def _runs(columns: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields first and end of each run of numbers that follow each other."""
    first = 0
    for index in range(1, len(columns) + 1):
        if index == len(columns) or columns[index] != columns[index - 1] + 1:
            yield columns[first], columns[index - 1] + 1
            first = index
