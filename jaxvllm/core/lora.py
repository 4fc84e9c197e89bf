"""Adapters of low rank (LoRA, arXiv 2106.09685) on the host: what a request names, what was read, and who has room.

The devices have room for a few adapters at once, `max_loras`, in numbered slots. A place is in one of three states:

    held      requests that run use its adapter
    kept      no request uses it, but its adapter is there: a later request may find it (LRU order)
    free      it has no adapter

Only the first slots, `max_lora_heads`, have room for whole tables (LM heads and embeddings). So an adapter with tables
goes to one of these, and an adapter without tables goes there where no other slot is left.
"""

from collections import OrderedDict
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

# The slot of a request without an adapter. Adapters are in slots 1 to `max_loras`.
NO_ADAPTER = 0


@dataclass(frozen=True)
class LoRARequest:
    """The adapter that a request wants, with vLLM's names. An id stands for one adapter as long as an engine lives."""

    lora_name: str
    lora_int_id: int
    lora_path: str  # of a directory in PEFT's format

    def __post_init__(self) -> None:
        for name, value in (("lora_name", self.lora_name), ("lora_path", self.lora_path)):
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name} must be a string that is not empty, not {value!r}")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be an integer from 1 on, not {self.lora_int_id!r}")

    def routing_salt(self, given: str | None) -> str:
        """Returns a salt for the names of pages, where nobody has read the adapter: it is as good as its number."""
        return salted(str(self.lora_int_id), given)


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """An adapter that was read and checked, as the devices want it."""

    name: str
    # Of all that was read. Two adapters with equal digests compute alike, and one that was changed on disk has another.
    digest: bytes
    arrays: Any  # a tree of arrays of NumPy
    has_magnitudes: bool = False  # of rows of the changed matrices (DoRA), which depend on the weights of the model
    has_tables: bool = False  # an LM head or an embedding of its own, in the place of the model's

    def salt(self, given: str | None) -> str:
        """Returns the salt of prompts whose keys and values it changes, which have the salt `given`."""
        return salted(self.digest.hex(), given)


def salted(adapter: str, given: str | None) -> str:
    """Returns the salt of prompts with an adapter, which `adapter` stands for."""
    return f"lora:{adapter}:{given or ''}"


def adapter_in(salt: str) -> str | None:
    """Returns what stands for the adapter in the salt of a prompt, or None where it has no adapter."""
    kind, *others = salt.split(":")
    return others[0] if kind == "lora" and len(others) > 1 else None


def salt_without_adapter(given: str | None) -> str | None:
    """Returns the salt of a prompt without an adapter: one that no caller can make equal to that of an adapter.

    Usual ones stay as they are, and so do the names of their pages, which gateways may work out themselves.
    """
    return f"base:{given}" if given is not None and given.startswith(("lora:", "base:")) else given


def given_salt(salt: str | None) -> str | None:
    """Returns the salt that a caller has given to a prompt that has this one, with or without an adapter."""
    if salt is None or adapter_in(salt) is None:
        return None if salt is None else salt.removeprefix("base:")
    return salt.split(":", 2)[2] or None


class LoraSlots:
    """Hands out the slots of adapters to requests. It holds no weights: the device has them."""

    def __init__(self, num_slots: int, num_with_tables: int = 0):
        """Begins without adapters. The first `num_with_tables` slots have room for whole tables."""
        assert num_with_tables <= num_slots, "a slot with tables is one of all slots"
        self.num_slots = num_slots
        self._num_with_tables = num_with_tables
        # By digest. Of those that no request uses, the one that has been of no use for longest comes first.
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._free = set(range(1, num_slots + 1))
        self._held: dict[str, LoraAdapter] = {}  # by request id

    @property
    def held(self) -> Mapping[str, LoraAdapter]:
        """The adapters of running requests, by their ids."""
        return self._held

    @property
    def digests(self) -> Set[bytes]:
        """The digests of the adapters that have a slot, whether a request uses it or none."""
        return self._slots.keys()

    def can_take(self, adapter: LoraAdapter) -> bool:
        """Returns whether a request with this adapter could run now."""
        if adapter.digest in self._slots:
            return True
        last = self._last_slot(adapter)
        return sum(slot <= last for slot in self._in_use()) < last

    def take(self, request_id: str, adapter: LoraAdapter) -> tuple[int, bool]:
        """Lets a request use its adapter until `release`: returns its slot, and whether it has to be brought there.

        There is room: `can_take` saw to it.
        """
        assert request_id not in self._held, "a request takes its adapter once"
        is_new = adapter.digest not in self._slots
        if is_new:
            self._slots[adapter.digest] = self._emptied(self._last_slot(adapter))
        self._held[request_id] = adapter
        return self._slots[adapter.digest], is_new

    def release(self, request_id: str) -> None:
        """Ends what a request uses, if it uses anything.

        Steps that were dispatched read the adapter before another one comes into its slot.
        """
        adapter = self._held.pop(request_id, None)
        if adapter is not None:
            self._slots.move_to_end(adapter.digest)

    def _last_slot(self, adapter: LoraAdapter) -> int:
        """Returns the last of the slots that an adapter may have."""
        return self._num_with_tables if adapter.has_tables else self.num_slots

    def _emptied(self, last: int) -> int:
        """Takes a slot up to `last`: a free one where there is one, and otherwise that of the oldest that is kept."""
        if free := [slot for slot in self._free if slot <= last]:
            slot = min(free, key=lambda slot: (slot <= self._num_with_tables, slot))
            self._free.remove(slot)
            return slot
        in_use = self._in_use()
        oldest = next(digest for digest, slot in self._slots.items() if slot <= last and slot not in in_use)
        return self._slots.pop(oldest)

    def _in_use(self) -> set[int]:
        return {self._slots[adapter.digest] for adapter in self._held.values()}

    def check_invariants(self) -> None:
        """Asserts that every slot is in one place. For tests."""
        assert sorted([*self._free, *self._slots.values()]) == list(range(1, self.num_slots + 1)), "a slot leaked"
        held = {adapter.digest: adapter for adapter in self._held.values()}
        assert held.keys() <= self._slots.keys(), "a request uses an adapter that is nowhere"
        are_in_place = (self._slots[digest] <= self._last_slot(adapter) for digest, adapter in held.items())
        assert all(are_in_place), "an adapter with tables is in a slot that has no room for them"
