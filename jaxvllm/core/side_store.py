"""The side store: which rows of the device's store have which side input, and which slots still need them.

A row is in exactly one of three places, as a page of the pool is:

    held      some slot has still to compute a position that reads it
    kept      no slot needs it, but its content is known: a later request may find it there (LRU order)
    free      it has no content that counts
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.side_input import SideInput

type Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class SideRows:
    """Rows of the store that get the values of a side input before the next step."""

    rows: Ints  # i32[N]
    side: SideInput  # of N rows


@dataclass
class _RowsOfContent:
    """The rows that have one content, and how often a slot holds them."""

    rows: Ints
    count: int = 0


class SideStore:
    """Hands out the rows of a store of fixed size by content, to slots. It holds no values: the device has them."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self._free = list(range(num_rows))
        self._entries: dict[bytes, _RowsOfContent] = {}
        self._kept: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        self._num_kept = 0  # rows of these
        self._held: dict[int, tuple[SideInput, ...]] = {}  # by slot

    @property
    def num_held(self) -> int:
        """Rows that slots hold."""
        return self.num_rows - len(self._free) - self._num_kept

    def can_take(self, sides: Iterable[SideInput]) -> bool:
        """Returns whether there are rows for all of `sides` at once."""
        contents = {side.digest: len(side) for side in sides}
        new = sum(count for digest, count in contents.items() if digest not in self._entries)
        found = sum(count for digest, count in contents.items() if digest in self._kept)
        return new <= len(self._free) + self._num_kept - found

    def take(self, slot: int, sides: Sequence[SideInput]) -> tuple[SideRows, ...]:
        """Lets `slot` hold rows for `sides` until `release`, and returns those that are to be filled.

        There is room: `can_take` saw to it.
        """
        if not sides:
            return ()
        assert slot not in self._held, "a slot takes its side inputs once"
        self._held[slot] = tuple(sides)
        for side in sides:  # first of all, so that no room is made of what is needed
            if side.digest in self._kept:
                del self._kept[side.digest]
                self._num_kept -= len(side)
        filled: list[SideRows] = []
        for side in sides:
            if side.digest not in self._entries:
                self._make_room(len(side))
                split = len(self._free) - len(side)
                rows = np.array(self._free[split:], np.int32)
                del self._free[split:]
                self._entries[side.digest] = _RowsOfContent(rows)
                filled.append(SideRows(rows, side))
            self._entries[side.digest].count += 1
        return tuple(filled)

    def _make_room(self, count: int) -> None:
        while len(self._free) < count:
            digest, _ = self._kept.popitem(last=False)
            rows = self._entries.pop(digest).rows
            self._num_kept -= len(rows)
            self._free.extend(rows.tolist())

    def inputs(self, slot: int, start: int, token_ids: Ints, sides: Sequence[SideInput]) -> Ints:
        """Returns what a step computes for `token_ids`, which are those of `slot` from position `start` on.

        That is `-1 - row` where one of `sides`, which are those of its prompt, has a row, and the token id elsewhere.
        """
        if not sides:
            return token_ids
        inputs, end = token_ids.copy(), start + len(token_ids)
        for side in sides:
            first, last = max(start, side.first), min(end, side.end)
            if first < last:
                assert any(side is held for held in self._held.get(slot, ())), "a step reads a row that nobody holds"
                rows = self._entries[side.digest].rows[first - side.first : last - side.first]
                inputs[first - start : last - start] = -1 - rows
        return inputs

    def holders(self) -> list[tuple[int, int]]:
        """Returns the slots that hold rows, each with the position after the last that reads them."""
        return [(slot, max(side.end for side in sides)) for slot, sides in self._held.items()]

    def release(self, slot: int) -> None:
        """Ends what `slot` holds, if it holds anything.

        Steps that were dispatched read the rows before a later request fills them.
        """
        for side in self._held.pop(slot, ()):
            entry = self._entries[side.digest]
            entry.count -= 1
            if not entry.count:
                self._kept[side.digest] = None
                self._num_kept += len(entry.rows)

    def check_invariants(self) -> None:
        """Asserts that every row is in one place. For tests: costs O(rows)."""
        counts = dict.fromkeys(self._entries, 0)
        for sides in self._held.values():
            for side in sides:
                counts[side.digest] += 1
                assert len(self._entries[side.digest].rows) == len(side), "a side input has rows of another"
        assert counts == {digest: entry.count for digest, entry in self._entries.items()}, "a count is wrong"
        assert self._kept.keys() == {digest for digest, count in counts.items() if not count}
        rows = [*self._free, *(row for entry in self._entries.values() for row in entry.rows.tolist())]
        assert sorted(rows) == list(range(self.num_rows)), "a row leaked"
        assert self._num_kept == sum(len(self._entries[digest].rows) for digest in self._kept)
