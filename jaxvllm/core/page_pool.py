"""The page pool: who owns which KV page, and which free pages still hold a reusable prefix.

A page is in exactly one of three places:

    owned     reference count > 0; one or more running requests read it
    cached    reference count 0, but its hash is known: a later prompt may take it back (LRU order)
    free      reference count 0 and no hash; handed out first, so that cached prefixes live longest

Page 0 is the trash page: padding rows of a step write there, and nobody owns it. One row reads it: where pipeline
stages cut a prompt into microbatches, its layers' states are there between two of them (`StateMemory.advance`).
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

type Pages = NDArray[np.int32]

TRASH_PAGE = 0


def pages_for(num_tokens: int, page_size: int) -> int:
    """Returns how many pages `num_tokens` tokens of one request occupy."""
    return -(-num_tokens // page_size)


def extend_page_hashes(
    hashes: list[bytes],
    token_ids: NDArray[np.int32],
    page_size: int,
    salt: str | None,
    extra_keys: Callable[[int, int], Sequence[bytes]] | None = None,
) -> list[bytes]:
    """Extends `hashes` in place to one entry per full page of `token_ids`, and returns it.

    Entry i is SHA-256 over entry i-1, the tokens of page i and its extra keys, so equal hashes mean equal inputs from
    the start of the prompt on. `salt` seeds the chain: requests with different salts never share a page.
    `extra_keys` returns what else tells the positions from one to another apart: keys of equal length, often none.
    """
    parent = hashes[-1] if hashes else hashlib.sha256(b"" if salt is None else b"salt:" + salt.encode()).digest()
    tokens = token_ids[len(hashes) * page_size :].tobytes()
    page_bytes = page_size * token_ids.itemsize
    for end in range(page_bytes, len(tokens) + 1, page_bytes):
        page = tokens[end - page_bytes : end]
        if extra_keys is not None:
            start = len(hashes) * page_size
            page = b"".join((page, *extra_keys(start, start + page_size)))
        parent = hashlib.sha256(parent + page).digest()
        hashes.append(parent)
    return hashes


class PagePool:
    """Reference-counted pages with a prefix cache. Every operation is O(pages it is given)."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        enable_prefix_caching: bool = True,
        on_eviction: Callable[[bytes], None] | None = None,
    ):
        """Makes a pool of free pages. `num_pages` counts the trash page, so `num_pages - 1` can be owned.

        `on_eviction` gets the hash of each page that stops being findable because the page is needed.
        """
        if num_pages < 2:
            raise ValueError(f"a page pool needs at least 2 pages (one is the trash page), got {num_pages}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self._on_eviction = on_eviction
        self.ref_counts = np.zeros(num_pages, np.int32)
        self._free = list(range(num_pages - 1, TRASH_PAGE, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._page_of_hash: dict[bytes, int] = {}
        self._hash_of_page: list[bytes | None] = [None] * num_pages

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out now; cached prefixes count, they are evicted on demand."""
        return len(self._free) + len(self._cached)

    @property
    def num_owned(self) -> int:
        return self.num_pages - 1 - self.num_available

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Returns the pages of the longest prefix of `hashes` that is in the pool. It takes none; `share` does."""
        pages: list[int] = []
        for digest in hashes:
            page = self._page_of_hash.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def find(self, digest: bytes) -> int | None:
        """Returns the page of that hash, if the pool has it."""
        return self._page_of_hash.get(digest)

    def is_findable(self, page: int) -> bool:
        """Returns whether `match` can return `page`."""
        return self._hash_of_page[page] is not None

    def num_cached(self, pages: Iterable[int]) -> int:
        """Returns how many of `pages` nobody owns: sharing them takes that many from `num_available`."""
        return sum([page in self._cached for page in pages])

    def share(self, pages: Sequence[int]) -> None:
        """Adds one owner to each of `pages`, which come from `match` or have an owner."""
        if not pages:
            return
        for page in pages:
            self._cached.pop(page, None)
        self.ref_counts[list(pages)] += 1

    def allocate(self, count: int) -> Pages:
        """Hands out `count` pages with one owner each; evicts the least recently used prefixes if it must."""
        assert count <= self.num_available, "the scheduler allocates only what is available"
        split = max(len(self._free) - count, 0)
        taken = self._free[split:]
        del self._free[split:]
        if len(taken) < count:
            taken += self._evict(count - len(taken))
        pages = np.array(taken, np.int32)
        self.ref_counts[pages] = 1
        return pages

    def register(self, pages: Iterable[int], hashes: Iterable[bytes]) -> list[int]:
        """Makes owned `pages`, whose KV is computed or about to be, findable by `match`.

        Returns which of them were not findable before, as places in `pages`. A hash that is already in the pool keeps
        its first page: two requests that computed the same prefix side by side leave one cached copy.
        """
        new: list[int] = []
        if not self.enable_prefix_caching:
            return new
        page_of_hash, hash_of_page = self._page_of_hash, self._hash_of_page
        for place, (page, digest) in enumerate(zip(pages, hashes, strict=True)):
            if hash_of_page[page] is None and page_of_hash.setdefault(digest, page) == page:
                hash_of_page[page] = digest
                new.append(place)
        return new

    def release(self, pages: Pages) -> None:
        """Takes one owner from each of `pages` (in request order). The tail becomes evictable before the head."""
        self.ref_counts[pages] -= 1
        hash_of_page = self._hash_of_page
        for page in pages[self.ref_counts[pages] == 0][::-1].tolist():
            if hash_of_page[page] is None:
                self._free.append(page)
            else:
                self._cached[page] = None

    def reset_prefix_cache(self) -> None:
        """Forgets every prefix (for example after a change of weights). Owned pages stay owned."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._page_of_hash.clear()
        self._hash_of_page = [None] * self.num_pages

    def _evict(self, count: int) -> list[int]:
        """Takes the `count` pages of the least recently used prefixes."""
        popitem, hash_of_page, page_of_hash = self._cached.popitem, self._hash_of_page, self._page_of_hash
        pages = [popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            digest = hash_of_page[page]
            assert digest is not None, "a cached page has no hash"
            hash_of_page[page] = None
            del page_of_hash[digest]
            if self._on_eviction is not None:
                self._on_eviction(digest)
        return pages

    def check_invariants(self, owners: Iterable[Pages]) -> None:
        """Asserts that `owners`, the page lists of all running requests, account for every page exactly."""
        counts = np.zeros(self.num_pages, np.int64)
        for pages in owners:
            assert len(set(pages.tolist())) == len(pages), "a request holds a page twice"
            counts[pages] += 1
        assert (counts == self.ref_counts).all(), "reference counts differ from the owners' page lists"
        assert counts[TRASH_PAGE] == 0, "somebody owns the trash page"
        owned = set(np.flatnonzero(counts).tolist())
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        assert not (owned & free or owned & cached or free & cached), "a page is in two places"
        assert len(owned) + len(free) + len(cached) == self.num_pages - 1, "a page leaked"
        hashes = {page: digest for page, digest in enumerate(self._hash_of_page) if digest is not None}
        assert cached <= hashes.keys(), "a cached page has no hash"
        assert not free & hashes.keys(), "a free page still has a hash"
        assert {page: digest for digest, page in self._page_of_hash.items()} == hashes
