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
from jaxvllm.core.page_groups import FullGroup, WindowedGroup
from jaxvllm.core.page_pool import TRASH_PAGE, PagePool, Pages, pages_for
from jaxvllm.core.request import Request
from jaxvllm.core.slots import SlotIds
from jaxvllm.core.state_group import StateGroup
from jaxvllm.core.step_plan import Ints, PageCopy, PageEntries


@dataclass(frozen=True)
class GroupSize:
    """The number of pages of a group, with the trash page, and what its layers see.

    That is the last `window` positions, or all (None). Layers that keep a state see what the last token left.
    """

    num_pages: int
    window: int | None = None
    keeps_state: bool = False


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
    layers: str  # those of the group, in words that follow "the pool"


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
        # Of layers; no step may compute these twice from one token on.
        self.has_states = any(size.keeps_state for size in sizes)

    def _group(self, index: int, size: GroupSize, num_slots: int, max_chunk: int) -> FullGroup:
        on_eviction = None if self._events is None else partial(self._events.removed, index)
        pool = PagePool(size.num_pages, self.page_size, self.enable_prefix_caching, on_eviction)
        if size.keeps_state:
            return StateGroup(pool, num_slots, self.max_pages)
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
                return Shortage(needed, group.usable, group.words)
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
        if last <= first or not self.enable_prefix_caching or request.has_old_pages:
            return []
        hashes = request.hashes(self.page_size)
        for index, group in enumerate(self.groups):
            columns = group.owned_columns(slot, first, last)
            self._make_findable(index, columns.tolist(), group.table[slot, columns].tolist(), request)
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
            self._events.stored(index, group.kind, group.window, [columns[place] for place in new], hashes, request)

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
