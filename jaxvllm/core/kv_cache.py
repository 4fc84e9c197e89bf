"""The KV cache: which pages of which group every slot holds.

Layers that see the same positions form a group, with a pool of pages of its own. A group that sees every position holds
a request's pages until the request ends. A windowed group holds only those that a token still to be computed may see:
its tables keep their columns, and a page that left the window is the trash page there.

All groups have pages of the same number of tokens, so that one hash chain a request finds the pages of all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from jaxvllm.core.kv_events import KVEventLog
from jaxvllm.core.page_pool import TRASH_PAGE, PagePool, Pages, pages_for
from jaxvllm.core.request import Request
from jaxvllm.core.slots import SlotIds
from jaxvllm.core.step_plan import Ints, PageCopy, PageEntries


@dataclass(frozen=True)
class GroupSize:
    """The number of pages of a group, with the trash page, and the last positions that its layers see (None: all)."""

    num_pages: int
    window: int | None = None


@dataclass(frozen=True)
class CachedPrefix:
    """Pages that hold the KV of the first `num_pages` pages of a prompt: of each group, those that are still needed."""

    num_pages: int
    pages: tuple[list[int], ...]  # one list a group: the pages of the last columns


@dataclass(frozen=True, eq=False)
class ReservedPages:
    """Pages to be filled after a cached prefix: `pages[g]` i32[N] of group g, one for each of the next columns.

    It is the trash page where no token after all of them sees it.
    """

    first: int  # column
    pages: tuple[Ints, ...]
    kept: tuple[Pages, ...]  # all that is kept in each group, the cached pages before them included


@dataclass(frozen=True)
class Shortage:
    """The reason why a request can never run: a group lacks pages even if it has no other request."""

    needed: int
    usable: int
    window: int | None


class FullGroup:
    """The pages of layers that see every position. Pages that requests share count once."""

    window: int | None = None

    def __init__(self, pool: PagePool, num_slots: int, max_pages: int):
        self.pool = pool
        self.usable = pool.num_pages - 1  # by requests
        self.table = np.zeros((num_slots, max_pages), np.int32)
        self.first = np.zeros(num_slots, np.int32)  # column of the first page that a slot holds
        self.end = np.zeros(num_slots, np.int32)  # one past the column of its last page
        self._reserved: list[Pages] = []  # pages that no slot holds, and that are kept until `give_back`

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
        held = int(self.end[slot])
        count = pages_for(num_tokens, self.pool.page_size) - held
        if count <= 0:
            return PageEntries.none()
        pages = self.pool.allocate(count)
        self.table[slot, held : held + count] = pages
        self.end[slot] = held + count
        return PageEntries(np.full(count, slot, np.int32), np.arange(held, held + count, dtype=np.int32), pages)

    def grow(self, slots: SlotIds, ends: Ints) -> PageEntries | None:
        """Gives each of `slots` the pages for its first `ends[i]` tokens. None when there are not enough."""
        size = self.pool.page_size
        held = self.end[slots]
        opens = (ends > held * size).nonzero()[0]
        if not len(opens):
            return PageEntries.none()
        at, held = slots[opens], held[opens]
        counts = -(-ends[opens] // size) - held
        if not self._has_room(at, counts):
            return None
        self.end[at] = held + counts
        total = int(counts.sum())
        if total > len(at):  # else it is one page each, as in nearly every step
            first = np.cumsum(counts) - counts
            at, held = at.repeat(counts), (held - first).repeat(counts) + np.arange(total)
        pages = self.pool.allocate(total)
        self.table[at, held] = pages
        return PageEntries(at.astype(np.int32), held.astype(np.int32), pages)

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
            assert (row[first:end] != TRASH_PAGE).all(), "a slot lacks a page that it needs"
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

    def __init__(self, pool: PagePool, num_slots: int, max_pages: int, window: int, max_chunk: int):
        """Makes the tables. A step may compute `max_chunk` tokens of one prompt."""
        super().__init__(pool, num_slots, max_pages)
        self.window = window
        self.bound = windowed_pages(window, max_chunk, pool.page_size)
        self._room = np.zeros(num_slots, np.int32)  # pages that a slot is sure of, until it has covered
        self._target = np.zeros(num_slots, np.int32)  # so many columns

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
        held = pages_for(num_tokens, self.pool.page_size) - self.first[list(sources)]
        return int(self._charges().sum()) + self._num_reserved + int(held.sum()) <= self.usable

    def take(self, slot: int, prefix: Sequence[int], num_cached: int, num_tokens: int) -> None:
        self._share(slot, prefix, num_cached)
        self._room[slot] = self.most_pages(num_tokens)
        self._target[slot] = pages_for(num_tokens, self.pool.page_size)

    def free_unseen(self, slots: SlotIds, positions: Ints) -> None:
        firsts = np.maximum(positions - self.window + 1, 0) // self.pool.page_size
        moved = firsts > self.first[slots]
        for slot, first in zip(slots[moved].tolist(), firsts[moved].tolist(), strict=True):
            left = self.table[slot, self.first[slot] : first]
            self.pool.release(left)
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
        held = end - self.first
        return np.where(end < self._target, np.maximum(self._room, held), held)


def windowed_pages(window: int, num_tokens: int, page_size: int) -> int:
    """Returns the most pages that a request holds in a windowed group while a step computes that many of its tokens."""
    return pages_for(window - 1 + num_tokens, page_size) + 1


class KVCache:
    """The pages of all groups and slots: what the scheduler asks, which knows no group.

    Tokens of a slot are counted from the start of its prompt.
    """

    def __init__(
        self,
        sizes: Sequence[GroupSize],
        *,
        num_slots: int,
        max_model_len: int,
        page_size: int,
        max_chunk: int,
        enable_prefix_caching: bool = True,
        events: KVEventLog | None = None,
    ):
        """Makes pools and tables for each group. A step may compute `max_chunk` tokens of one prompt.

        `events` learns which pages the prefix cache can find, and which ones no longer.
        """
        self.page_size = page_size
        self.max_pages = pages_for(max_model_len, page_size)
        self.enable_prefix_caching = enable_prefix_caching
        self._events = events
        self.num_registered = np.zeros(num_slots, np.int32)  # leading columns of a slot that the prefix cache was told
        self.groups = tuple(self._group(index, size, num_slots, max_chunk) for index, size in enumerate(sizes))
        self._windowed = tuple(group for group in self.groups if isinstance(group, WindowedGroup))

    def _group(self, index: int, size: GroupSize, num_slots: int, max_chunk: int) -> FullGroup:
        on_eviction = None if self._events is None else partial(self._events.removed, index)
        pool = PagePool(size.num_pages, self.page_size, self.enable_prefix_caching, on_eviction)
        if size.window is None:
            return FullGroup(pool, num_slots, self.max_pages)
        return WindowedGroup(pool, num_slots, self.max_pages, size.window, max_chunk)

    @property
    def has_windows(self) -> bool:
        """Whether pages are freed while their request runs."""
        return bool(self._windowed)

    @property
    def no_entries(self) -> tuple[PageEntries, ...]:
        return (PageEntries.none(),) * len(self.groups)

    @property
    def pool(self) -> PagePool:
        """The pool of the first group, which is the one that sees most."""
        return self.groups[0].pool

    @property
    def num_pages(self) -> int:
        """Pages of the first group that requests may own."""
        return self.pool.num_pages - 1

    @property
    def num_owned(self) -> int:
        """Pages of the first group that requests own."""
        return self.pool.num_owned

    @property
    def is_empty(self) -> bool:
        """Whether no request holds a page of any group."""
        return not any(group.pool.num_owned for group in self.groups)

    @property
    def no_copies(self) -> tuple[PageCopy | None, ...]:
        return (None,) * len(self.groups)

    def shortage(self, num_tokens: int, num_prompt_tokens: int, num_beams: int | None) -> Shortage | None:
        """Returns the pages that a request of `num_tokens` tokens (of each beam) would lack even if it were alone."""
        for group in self.groups:
            needed = group.most_pages(num_tokens)
            if num_beams is not None:
                needed = group.most_pages_of_beams(num_tokens, num_prompt_tokens, num_beams)
            if needed > group.usable:
                return Shortage(needed, group.usable, group.window)
        return None

    def match(self, hashes: Sequence[bytes]) -> CachedPrefix:
        """Returns the longest prefix of which every group has the pages that the next token sees.

        It takes no page; `take` does.
        """
        whole = {group: group.pool.match(hashes) for group in self.groups if group.window is None}
        count = min(map(len, whole.values()), default=len(hashes))
        if self._windowed:
            count = self._last_windows(hashes[:count])
        pages = (whole[group][:count] if group in whole else self._seen(group, hashes[:count]) for group in self.groups)
        return CachedPrefix(count, tuple(pages))

    def _last_windows(self, hashes: Sequence[bytes]) -> int:
        """Returns how many of `hashes` make the longest prefix whose last window every windowed group has."""
        longest, runs = 0, [0] * len(self._windowed)
        for count, digest in enumerate(hashes, 1):
            runs = [
                run + 1 if group.pool.find(digest) is not None else 0
                for run, group in zip(runs, self._windowed, strict=True)
            ]
            needed = (count - group.first_seen(count * self.page_size) for group in self._windowed)
            if all(run >= need for run, need in zip(runs, needed, strict=True)):
                longest = count
        return longest

    def _seen(self, group: FullGroup, hashes: Sequence[bytes]) -> list[int]:
        """Returns the pages of `group` that the next token after the pages of these hashes sees."""
        return group.pool.match(hashes[group.first_seen(len(hashes) * self.page_size) :])

    def can_take(self, prefix: CachedPrefix, num_tokens: int, num_forks: int = 0) -> bool:
        """Returns whether there is room for a request whose tokens `prefix` are cached, and for its forks."""
        return all(
            group.can_take(of, num_tokens, num_forks) for group, of in zip(self.groups, prefix.pages, strict=True)
        )

    def take(self, slot: int, prefix: CachedPrefix, num_tokens: int) -> None:
        """Gives `slot` the pages of `prefix`, and room for all `num_tokens` tokens."""
        for group, pages in zip(self.groups, prefix.pages, strict=True):
            group.take(slot, pages, prefix.num_pages, num_tokens)
        self.num_registered[slot] = prefix.num_pages

    def cover(self, slot: int, num_tokens: int) -> tuple[PageEntries, ...]:
        """Gives `slot` the pages that its next chunk lacks, which ends after `num_tokens` tokens."""
        return tuple([group.cover(slot, num_tokens) for group in self.groups])

    def grow(self, slots: SlotIds, ends: Ints) -> tuple[PageEntries, ...] | None:
        """Gives each of `slots` the pages for its first `ends[i]` tokens. None when there are not enough."""
        grown: list[PageEntries] = []
        for group in self.groups:
            entries = group.grow(slots, ends)
            if entries is None:
                self.undo(grown)
                return None
            grown.append(entries)
        return tuple(grown)

    def undo(self, entries: Sequence[PageEntries]) -> None:
        """Takes back what `grow` gave."""
        for group, opened in zip(self.groups, entries, strict=False):
            group.undo(opened)

    def can_fork(self, sources: Sequence[int], num_tokens: int) -> bool:
        """Returns whether there is room for a fork of each of `sources`, each of which has computed `num_tokens`."""
        return not sources or all(group.can_fork(sources, num_tokens) for group in self.groups)

    def fork(self, source: int, slot: int, num_tokens: int) -> tuple[PageCopy | None, ...]:
        """Gives `slot` what `source` has of its first `num_tokens` tokens: full pages are shared, the last is a copy.

        Returns what is to be copied in each group. There is room: `can_fork` saw to it.
        """
        self.num_registered[slot] = self.num_registered[source]
        return tuple(group.fork(source, slot, num_tokens) for group in self.groups)

    def free_unseen(self, slots: SlotIds, positions: Ints) -> None:
        """Frees the pages that left a window: no step to come computes a token of `slots[i]` before `positions[i]`.

        Steps in flight may still read them. They do so before a later step writes.
        """
        for group in self._windowed:
            group.free_unseen(slots, positions)

    def register(self, slot: int, num_tokens: int, request: Request) -> list[bytes]:
        """Lets the prefix cache know the full pages of the first `num_tokens` tokens; their hashes, if they are new."""
        first, last = int(self.num_registered[slot]), num_tokens // self.page_size
        if last <= first or not self.enable_prefix_caching:
            return []
        hashes = request.hashes(self.page_size)
        for index, group in enumerate(self.groups):
            begin = max(first, int(group.first[slot]))
            self._make_findable(index, range(begin, last), group.table[slot, begin:last].tolist(), request)
        self.num_registered[slot] = last
        return hashes[first:last]

    def reserve(self, prefix: CachedPrefix, count: int) -> ReservedPages | None:
        """Keeps pages for the `count` columns after a cached prefix, and the prefix, until `give_back`.

        None: there are not enough free ones.
        """
        end = prefix.num_pages + count
        # Of a windowed group only the pages that a token after all of them sees.
        counts = [min(count, end - group.first_seen(end * self.page_size)) for group in self.groups]
        of_groups = list(zip(self.groups, prefix.pages, counts, strict=True))
        if not all(group.can_reserve(cached, needed) for group, cached, needed in of_groups):
            return None
        kept = tuple(group.reserve(cached, needed) for group, cached, needed in of_groups)
        pages = []
        for of_group, needed in zip(kept, counts, strict=True):
            pages.append(np.full(count, TRASH_PAGE, np.int32))
            pages[-1][count - needed :] = of_group[len(of_group) - needed :]
        return ReservedPages(prefix.num_pages, tuple(pages), kept)

    def register_filled(self, request: Request, reserved: ReservedPages, count: int) -> None:
        """Lets the prefix cache know the first `count` pages of `reserved`, filled with those of `request`."""
        for index, of_group in enumerate(reserved.pages):
            at = np.flatnonzero(of_group[:count] != TRASH_PAGE)
            self._make_findable(index, (reserved.first + at).tolist(), of_group[at].tolist(), request)

    def give_back(self, reserved: ReservedPages) -> None:
        """Undoes the `reserve` that returned `reserved`. Pages that the prefix cache knows stay there."""
        for group, kept in zip(self.groups, reserved.kept, strict=True):
            group.give_back(kept)

    def columns(self, prefix: CachedPrefix) -> tuple[Ints, ...]:
        """Returns the pages of a cached prefix, i32[num_pages] of each group.

        The trash page stands for pages that the group does without.
        """
        columns = tuple(np.full(prefix.num_pages, TRASH_PAGE, np.int32) for _ in self.groups)
        for of_group, pages in zip(columns, prefix.pages, strict=True):
            of_group[prefix.num_pages - len(pages) :] = pages
        return columns

    def _make_findable(self, index: int, columns: Sequence[int], pages: Sequence[int], request: Request) -> None:
        """Lets the prefix cache of a group know the pages of these columns of `request`."""
        group, hashes = self.groups[index], request.hashes(self.page_size)
        new = group.pool.register(pages, [hashes[column] for column in columns])
        if new and self._events is not None:
            self._events.stored(index, group.window, [columns[place] for place in new], hashes, request)

    def release(self, slot: int) -> None:
        """Frees all pages of `slot`."""
        for group in self.groups:
            group.release(slot)

    def tables(self, slot: int) -> Ints:
        """Returns a copy of the page tables of `slot`, up to the last column of any group: i32[groups, columns]."""
        count = max(int(group.end[slot]) for group in self.groups)
        return np.array([group.table[slot, :count] for group in self.groups])

    def pages(self, slot: int, first: int, count: int) -> tuple[Ints, ...]:
        """Copies of `count` columns of the page tables of `slot` from column `first` on: i32[count] of each group."""
        return tuple(group.table[slot, first : first + count].copy() for group in self.groups)

    def reset_prefix_cache(self) -> None:
        """Forgets every prefix (for example after a change of weights). Owned pages stay owned."""
        for group in self.groups:
            group.pool.reset_prefix_cache()
        if self._events is not None:
            self._events.cleared()

    def check_invariants(self, slots: Sequence[int]) -> None:
        """Asserts that `slots`, all that are taken, hold every page that is owned. For tests: costs O(pages)."""
        for group in self.groups:
            group.check_invariants(slots)
