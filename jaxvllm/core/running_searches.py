"""Running searches: the slots and pages of requests that are searched by several beams.

A search owns as many slots as it has beams at most, from its admission to its end. Each beam sits in one of
them and is stepped like any row, one token at a time: until the host has chosen the survivors its slot waits. The
survivor that continues a beam stays in its slot. Every other one is a fork: a slot that shares the full pages with
the one that it continues, and has a copy of the last page, which is partly filled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxvllm.core.beam import BeamSearch, Survivor
from jaxvllm.core.kv_cache import KVCache
from jaxvllm.core.request import Request
from jaxvllm.core.slots import SlotTable
from jaxvllm.core.step_plan import Fork


@dataclass(eq=False)
class RunningSearch:
    """The slots of one request: those of the beams, in the order of `search.beams`, and those without one."""

    request: Request
    search: BeamSearch
    slots: list[int]
    spare: list[int]


class RunningSearches:
    """All searches that run, by the id of their request."""

    def __init__(self, slots: SlotTable, cache: KVCache):
        self._slots = slots
        self._cache = cache
        self._running: dict[str, RunningSearch] = {}

    def __len__(self) -> int:
        return len(self._running)

    def of(self, request: Request) -> RunningSearch | None:
        """Returns the search of `request`, if it runs."""
        return self._running.get(request.request_id)

    def open(self, request: Request, search: BeamSearch, slot: int) -> None:
        """Begins the search of `request`, which has just got `slot`, and takes the slots that it will need."""
        search.restart()
        spare = self._slots.reserve(search.params.beam_width - 1)
        self._slots.is_beam[slot] = True
        self._running[request.request_id] = RunningSearch(request, search, [slot], spare)

    def keep(self, running: RunningSearch, survivors: Sequence[Survivor]) -> list[int]:
        """Lets go of the beams that nobody continues. Returns the slot that each of `survivors` continues."""
        sources = [running.slots[survivor.parent] for survivor in survivors]
        for slot in set(running.slots) - set(sources):
            self._cache.release(slot)
            self._slots.vacate(slot, reserve=True)
            running.spare.append(slot)
        running.slots = list(dict.fromkeys(sources))
        return sources

    def can_fork(self, sources: Sequence[int]) -> bool:
        """Returns whether there are pages for `fork` of these slots."""
        again = list(sources)
        for slot in set(sources):  # the first survivor of a beam takes its slot over
            again.remove(slot)
        return self._cache.can_fork(again, self._num_computed(sources[0]))

    def fork(self, running: RunningSearch, sources: Sequence[int], survivors: Sequence[Survivor]) -> list[Fork]:
        """Gives each of `survivors` a slot, and returns what the device must do. There is room: ask `can_fork`."""
        slots: list[int] = []
        forks: list[Fork] = []
        for source, survivor in zip(sources, survivors, strict=True):
            slot, copies = source, self._cache.no_copies
            if source in slots:
                slot = running.spare.pop()
                copies = self._cache.fork(source, slot, self._num_computed(source))
                self._slots.fork(source, slot)
            slots.append(slot)
            forks.append(Fork(source, slot, survivor.token_id, copies))
        for slot, survivor in zip(slots, survivors, strict=True):
            self._slots.token_ids[slot, self._slots.num_known[slot] - 1] = survivor.token_id
            self._slots.is_undecided[slot] = False
        running.slots = slots
        return forks

    def _num_computed(self, slot: int) -> int:
        """Returns how many tokens of a beam have their KV computed: all but the last, which was just chosen."""
        return int(self._slots.num_known[slot]) - 1

    def close(self, running: RunningSearch) -> None:
        """Frees all slots and pages of a search."""
        for slot in running.slots:
            self._cache.release(slot)
            self._slots.vacate(slot)
        self._slots.unreserve(running.spare)
        del self._running[running.request.request_id]

    def check_invariants(self) -> None:
        """Asserts that the searches hold all beams and all slots that are reserved for them. For tests."""
        beams = [slot for running in self._running.values() for slot in running.slots]
        assert sorted(beams) == np.flatnonzero(self._slots.is_beam).tolist(), "a slot has a beam of no search"
        for running in self._running.values():
            assert len(running.slots) + len(running.spare) == running.search.params.beam_width
            assert len(running.slots) == len(running.search.beams), "a beam has no slot"
            assert all(self._slots.tenants[slot] is running.request for slot in running.slots)
            assert len({int(self._slots.num_computed[slot]) for slot in running.slots}) == 1, "beams differ in length"
