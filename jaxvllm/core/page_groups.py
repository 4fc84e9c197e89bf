"""The pages of one group of layers: which of them every slot holds, and how many a request may still need."""

from collections.abc import Sequence

import numpy as np

from jaxvllm.core.kv_events import SpecKind
from jaxvllm.core.page_pool import TRASH_PAGE, PagePool, Pages, pages_for
from jaxvllm.core.slots import SlotIds
from jaxvllm.core.step_plan import Ints, PageCopy, PageEntries


class FullGroup:
    """The pages of layers that see every position. Pages that requests share count once."""

    window: int | None = None
    kind: SpecKind = "full_attention"

    def __init__(self, pool: PagePool, num_slots: int, max_pages: int):
        self.pool = pool
        self.usable = pool.num_pages - 1  # by requests
        self.table = np.zeros((num_slots, max_pages), np.int32)
        self.first = np.zeros(num_slots, np.int32)  # column of the first page that a slot holds
        self.end = np.zeros(num_slots, np.int32)  # one past the column of its last page
        self._reserved: list[Pages] = []  # pages that no slot holds, and that are kept until `give_back`

    @property
    def words(self) -> str:
        """The layers, in words that follow "the pool" in an error."""
        return ""

    def first_seen(self, position: int) -> int:
        """Returns the column of the first page that a token at `position` sees."""
        return 0

    def most_pages(self, num_tokens: int) -> int:
        """Returns the most pages that a request of so many tokens holds at once, until its prompt is computed."""
        return pages_for(num_tokens, self.pool.page_size)

    def most_pages_of_beams(self, num_tokens: int, num_prompt_tokens: int, num_beams: int) -> int:
        """Returns the most pages that several beams hold at once, which share the full pages of their prompt."""
        num_shared = num_prompt_tokens // self.pool.page_size
        return num_shared + num_beams * max(self.most_pages(num_tokens) - num_shared, 1)

    def pages(self, slot: int) -> Pages:
        """Returns the pages that `slot` holds, in the order of their columns."""
        return self.table[slot, self.first[slot] : self.end[slot]]

    def owned_columns(self, slot: int, first: int, last: int) -> Ints:
        """Returns the columns from `first` to before `last` in which `slot` holds a page."""
        return np.arange(max(first, int(self.first[slot])), last, dtype=np.int32)

    def can_take(self, prefix: Sequence[int], num_tokens: int, num_forks: int) -> bool:
        """Returns whether a new request with the cached pages `prefix`, and so many forks of it, have room."""
        count = self.most_pages(num_tokens) - len(prefix) + num_forks
        return count + self.pool.num_cached(prefix) <= self.pool.num_available

    def take(self, slot: int, prefix: Sequence[int], num_cached: int, num_tokens: int) -> None:
        """Gives `slot` the pages `prefix`, which end at column `num_cached`, and those that it needs at once."""
        self._share(slot, prefix, num_cached)
        self.cover(slot, num_tokens)

    def cover(self, slot: int, num_tokens: int) -> PageEntries:
        """Gives `slot` the pages that its first `num_tokens` tokens lack. There is room: `take` saw to it."""
        owned = int(self.end[slot])
        count = pages_for(num_tokens, self.pool.page_size) - owned
        if count <= 0:
            return PageEntries.none()
        pages = self.pool.allocate(count)
        self.table[slot, owned : owned + count] = pages
        self.end[slot] = owned + count
        return PageEntries(np.full(count, slot, np.int32), np.arange(owned, owned + count, dtype=np.int32), pages)

    def grow(self, slots: SlotIds, ends: Ints) -> PageEntries | None:
        """Gives each of `slots` the pages for its first `ends[i]` tokens. None when there are not enough."""
        size = self.pool.page_size
        owned = self.end[slots]
        opens = (ends > owned * size).nonzero()[0]
        if not len(opens):
            return PageEntries.none()
        at, owned = slots[opens], owned[opens]
        counts = -(-ends[opens] // size) - owned
        if not self._has_room(at, counts):
            return None
        self.end[at] = owned + counts
        total = int(counts.sum())
        if total > len(at):  # else it is one page each, as in nearly every step
            first = np.cumsum(counts) - counts
            at, owned = at.repeat(counts), (owned - first).repeat(counts) + np.arange(total)
        pages = self.pool.allocate(total)
        self.table[at, owned] = pages
        return PageEntries(at.astype(np.int32), owned.astype(np.int32), pages)

    def undo(self, entries: PageEntries) -> None:
        """Takes back what `grow` gave."""
        np.subtract.at(self.end, entries.slots, 1)
        self.table[entries.slots, entries.columns] = TRASH_PAGE
        self.pool.release(entries.pages)

    def can_fork(self, sources: Sequence[int], num_tokens: int) -> bool:
        """Returns whether there is room for a fork of each of `sources`, after the first `num_tokens` tokens."""
        return len(sources) <= self.pool.num_available or num_tokens % self.pool.page_size == 0

    def fork(self, source: int, slot: int, num_tokens: int) -> PageCopy | None:
        """Gives `slot` the full pages of the first `num_tokens` tokens of `source`, and a page for those after them.

        Returns the page whose content that page needs, unless all pages are full. There is room: `can_fork` saw to it.
        """
        full = num_tokens // self.pool.page_size
        self._share(slot, self.table[source, self.first[source] : full].tolist(), full)
        if not num_tokens % self.pool.page_size:
            return None
        [page] = self.pool.allocate(1).tolist()
        self.table[slot, full] = page
        self.end[slot] = full + 1
        return PageCopy(full, int(self.table[source, full]), page)

    def free_unseen(self, slots: SlotIds, positions: Ints) -> None:
        """Frees the pages of each of `slots` that no token from `positions[i]` on sees."""

    def can_reserve(self, prefix: Sequence[int], count: int) -> bool:
        """Returns whether the cached pages `prefix` and `count` others may be kept for a request without a slot."""
        return count + self.pool.num_cached(prefix) <= self.pool.num_available

    def reserve(self, prefix: Sequence[int], count: int) -> Pages:
        """Keeps the cached pages `prefix` and `count` others until `give_back`, and returns all of them in order."""
        self.pool.share(prefix)
        pages = np.concatenate([np.array(prefix, np.int32), self.pool.allocate(count)])
        self._reserved.append(pages)
        return pages

    def give_back(self, pages: Pages) -> None:
        """Undoes the `reserve` that returned `pages`."""
        self._reserved = [others for others in self._reserved if others is not pages]
        self.pool.release(pages)

    def release(self, slot: int) -> None:
        """Frees all pages of `slot`."""
        self.pool.release(self.pages(slot))
        self.table[slot, : self.end[slot]] = TRASH_PAGE
        self.first[slot] = self.end[slot] = 0

    def check_invariants(self, slots: Sequence[int]) -> None:
        self.pool.check_invariants([*(self.pages(slot) for slot in slots), *self._reserved])
        for slot, row in enumerate(self.table):
            first, end = (int(at[slot]) for at in (self.first, self.end))
            assert slot in slots or not end, "a vacant slot has pages"
            assert (row[self.owned_columns(slot, first, end)] != TRASH_PAGE).all(), "a slot lacks a page that it needs"
            assert not row[:first].any() and not row[end:].any(), "a table has a page that its slot does not hold"

    def _share(self, slot: int, prefix: Sequence[int], num_cached: int) -> None:
        self.pool.share(prefix)
        self.first[slot], self.end[slot] = num_cached - len(prefix), num_cached
        self.table[slot, self.first[slot] : num_cached] = prefix

    def _has_room(self, slots: SlotIds, counts: Ints) -> bool:
        return int(counts.sum()) <= self.pool.num_available

    @property
    def _num_reserved(self) -> int:
        return sum(map(len, self._reserved))


class WindowedGroup(FullGroup):
    """The pages of layers that see the last `window` positions, the token's own included.

    A prompt's pages are taken chunk by chunk, as earlier ones leave the window. So that a chunk never waits for pages
    that a younger request holds, a request has room for the most that it will hold from its admission on. Each
    request counts for itself here: one that shares a page may keep it longer than the one that took it.
    """

    window: int
    kind: SpecKind = "sliding_window"

    def __init__(self, pool: PagePool, num_slots: int, max_pages: int, window: int, max_chunk: int):
        """Makes the tables. A step may compute `max_chunk` tokens of one prompt."""
        super().__init__(pool, num_slots, max_pages)
        self.window = window
        self.bound = windowed_pages(window, max_chunk, pool.page_size)
        self._room = np.zeros(num_slots, np.int32)  # pages that a slot is sure of, until it has covered
        self._target = np.zeros(num_slots, np.int32)  # so many columns

    @property
    def words(self) -> str:
        return f" of layers with a window of {self.window} tokens"

    def first_seen(self, position: int) -> int:
        return max(position - self.window + 1, 0) // self.pool.page_size

    def most_pages(self, num_tokens: int) -> int:
        return min(super().most_pages(num_tokens), self.bound)

    def most_pages_of_beams(self, num_tokens: int, num_prompt_tokens: int, num_beams: int) -> int:
        return num_beams * self.most_pages(num_tokens)

    def can_take(self, prefix: Sequence[int], num_tokens: int, num_forks: int) -> bool:
        needed = (1 + num_forks) * self.most_pages(num_tokens)
        return int(self._charges().sum()) + self._num_reserved + needed <= self.usable

    def can_reserve(self, prefix: Sequence[int], count: int) -> bool:
        return int(self._charges().sum()) + self._num_reserved + len(prefix) + count <= self.usable

    def can_fork(self, sources: Sequence[int], num_tokens: int) -> bool:
        owned = pages_for(num_tokens, self.pool.page_size) - self.first[list(sources)]
        return int(self._charges().sum()) + self._num_reserved + int(owned.sum()) <= self.usable

    def take(self, slot: int, prefix: Sequence[int], num_cached: int, num_tokens: int) -> None:
        self._share(slot, prefix, num_cached)
        self._room[slot] = self.most_pages(num_tokens)
        self._target[slot] = pages_for(num_tokens, self.pool.page_size)

    def free_unseen(self, slots: SlotIds, positions: Ints) -> None:
        firsts = np.maximum(positions - self.window + 1, 0) // self.pool.page_size
        moved = firsts > self.first[slots]
        for slot, first in zip(slots[moved].tolist(), firsts[moved].tolist(), strict=True):
            self._drop(slot, first)

    def _drop(self, slot: int, first: int) -> None:
        """Frees the pages of `slot` before column `first`."""
        left = self.table[slot, self.first[slot] : first]
        self.pool.release(left[left != TRASH_PAGE])
        left[:] = TRASH_PAGE
        self.first[slot] = first

    def release(self, slot: int) -> None:
        super().release(slot)
        self._room[slot] = self._target[slot] = 0

    def check_invariants(self, slots: Sequence[int]) -> None:
        super().check_invariants(slots)
        promised = int(self._charges().sum()) + self._num_reserved
        assert promised <= self.usable, "more pages are promised than there are"

    def _has_room(self, slots: SlotIds, counts: Ints) -> bool:
        end = self.end.copy()
        end[slots] += counts
        return int(self._charges(end).sum()) + self._num_reserved <= self.usable

    def _charges(self, end: Ints | None = None) -> Ints:
        """Returns how many pages each slot holds or may still take without asking, i32[slots], up to column `end`."""
        end = self.end if end is None else end
        owned = self._owned(end)
        return np.where(end < self._target, np.maximum(self._room, owned), owned)

    def _owned(self, end: Ints) -> Ints:
        """Returns how many pages each slot holds when it has those up to column `end`, i32[slots]."""
        owned: Ints = end - self.first
        return owned


def windowed_pages(window: int, num_tokens: int, page_size: int) -> int:
    """Returns the most pages that a request holds in a windowed group while a step computes that many of its tokens."""
    return pages_for(window - 1 + num_tokens, page_size) + 1
