"""The page pool against plain sets and lists, and its rules one by one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jaxvllm.core.page_pool import TRASH_PAGE, PagePool, Pages, extend_page_hashes, pages_for

TOKENS = st.lists(st.integers(0, 2), max_size=12)


def hashes_of(token_ids: Sequence[int], page_size: int, salt: str | None = None) -> list[bytes]:
    return extend_page_hashes([], np.array(token_ids, np.int32), page_size, salt)


# Hash chains.


@given(a=TOKENS, b=TOKENS, page_size=st.integers(1, 4), salts=st.tuples(*[st.sampled_from([None, "", "x"])] * 2))
def test_hashes_are_equal_exactly_as_far_as_salts_and_tokens_are(
    a: list[int], b: list[int], page_size: int, salts: tuple[str | None, str | None]
) -> None:
    pairs = zip(hashes_of(a, page_size, salts[0]), hashes_of(b, page_size, salts[1]), strict=False)
    for index, (of_a, of_b) in enumerate(pairs):
        end = (index + 1) * page_size
        assert (of_a == of_b) == (salts[0] == salts[1] and a[:end] == b[:end])


@given(token_ids=TOKENS, cut=st.integers(0, 12), page_size=st.integers(1, 4))
def test_a_chain_grown_in_parts_is_the_chain(token_ids: list[int], cut: int, page_size: int) -> None:
    hashes = hashes_of(token_ids[:cut], page_size)
    assert extend_page_hashes(hashes, np.array(token_ids, np.int32), page_size, None) is hashes
    assert hashes == hashes_of(token_ids, page_size)
    assert len(hashes) == len(token_ids) // page_size


def test_pages_for_rounds_up() -> None:
    assert [pages_for(n, 4) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


# The pool against an oracle.


@dataclass
class NaivePool:
    """The same pool as plain lists, which learns from the real one only which free pages it handed out."""

    free: set[int]
    cached: list[int] = field(default_factory=list)  # least recently used first
    owners: dict[int, int] = field(default_factory=dict)
    hash_of: dict[int, bytes] = field(default_factory=dict)

    def match(self, hashes: list[bytes]) -> list[int]:
        page_of = {digest: page for page, digest in self.hash_of.items()}
        known = [digest in page_of for digest in hashes]
        longest = known.index(False) if False in known else len(known)
        return [page_of[digest] for digest in hashes[:longest]]

    def share(self, pages: list[int]) -> None:
        for page in pages:
            if page in self.cached:
                self.cached.remove(page)
            self.owners[page] = self.owners.get(page, 0) + 1

    def allocate(self, taken: list[int]) -> None:
        assert len(set(taken)) == len(taken)
        evicted = self.cached[: max(len(taken) - len(self.free), 0)]
        assert set(taken) <= self.free | set(evicted), "a page that was not free"
        assert set(evicted) <= set(taken), "not the least recently used"
        if evicted:
            assert self.free <= set(taken), "a prefix was evicted while pages were free"
        for page in taken:
            self.hash_of.pop(page, None)
            self.owners[page] = 1
        self.free -= set(taken)
        self.cached = self.cached[len(evicted) :]

    def register(self, pages: list[int], hashes: list[bytes]) -> None:
        for page, digest in zip(pages, hashes, strict=True):
            if digest not in self.hash_of.values() and page not in self.hash_of:
                self.hash_of[page] = digest

    def release(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self.owners[page] -= 1
            if not self.owners[page]:
                del self.owners[page]
                self.cached.append(page) if page in self.hash_of else self.free.add(page)

    def reset(self) -> None:
        self.free |= set(self.cached)
        self.cached.clear()
        self.hash_of.clear()


ACTIONS = st.one_of(
    st.tuples(st.just("begin"), TOKENS.filter(len), st.sampled_from([None, None, "x"])),
    st.tuples(st.just("grow"), st.integers(0, 9), st.integers(1, 3)),
    st.tuples(st.just("end"), st.integers(0, 9), st.none()),
    st.tuples(st.just("end"), st.integers(0, 9), st.none()),
    st.tuples(st.just("reset"), st.none(), st.none()),
)


@given(
    num_pages=st.integers(2, 16),
    page_size=st.integers(1, 3),
    caching=st.booleans(),
    actions=st.lists(ACTIONS, max_size=40),
)
def test_the_pool_does_what_plain_lists_do(num_pages: int, page_size: int, caching: bool, actions: list) -> None:
    pool = PagePool(num_pages, page_size, caching)
    naive = NaivePool(set(range(1, num_pages)))
    requests: list[list[int]] = []  # the pages of each
    for name, value, extra in actions:
        match name:
            case "begin":
                hashes = hashes_of(value, page_size, extra)
                hits = pool.match(hashes)
                assert hits == naive.match(hashes)
                count = pages_for(len(value), page_size) - len(hits)
                assert pool.num_cached(hits) == len(set(hits) & set(naive.cached))
                if count + pool.num_cached(hits) > pool.num_available:
                    continue
                pool.share(hits)
                naive.share(hits)
                fresh = pool.allocate(count).tolist()
                naive.allocate(fresh)
                requests.append(pages := hits + fresh)
                full = pages[: len(hashes)]
                pool.register(full, hashes)
                if caching:
                    naive.register(full, hashes)
            case "grow" if requests and extra <= pool.num_available:
                fresh = pool.allocate(extra).tolist()
                naive.allocate(fresh)
                requests[value % len(requests)].extend(fresh)
            case "end" if requests:
                pages = requests.pop(value % len(requests))
                pool.release(np.array(pages, np.int32))
                naive.release(pages)
            case "reset":
                pool.reset_prefix_cache()
                naive.reset()
        pool.check_invariants(np.array(pages, np.int32) for pages in requests)
        assert pool.num_available == len(naive.free) + len(naive.cached)
        assert pool.num_owned == len(naive.owners)
        assert {page: count for page, count in enumerate(pool.ref_counts.tolist()) if count} == naive.owners


# Its rules.


def cached_prompt(pool: PagePool, token_ids: Sequence[int]) -> tuple[list[bytes], Pages]:
    """A prompt of full pages, computed and released: its pages are cached."""
    hashes = hashes_of(token_ids, pool.page_size)
    pages = pool.allocate(len(hashes))
    pool.register(pages.tolist(), hashes)
    pool.release(pages)
    return hashes, pages


def test_the_trash_page_is_never_handed_out() -> None:
    pool = PagePool(8, 2)
    assert pool.num_available == 7
    assert sorted([TRASH_PAGE, *pool.allocate(7).tolist()]) == list(range(8))


def test_a_pool_needs_a_page_beside_the_trash_page() -> None:
    with pytest.raises(ValueError, match="at least 2 pages .*got 1"):
        PagePool(1, 4)


def test_more_than_there_is_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        PagePool(4, 4).allocate(4)


def test_the_tail_of_a_prompt_is_evicted_before_its_head() -> None:
    pool = PagePool(5, 1)
    hashes, pages = cached_prompt(pool, [0, 1, 2, 3])
    assert pool.allocate(1).tolist() == [pages[3]]
    assert pool.match(hashes) == pages[:3].tolist()
    assert pool.allocate(2).tolist() == [pages[2], pages[1]]
    assert pool.match(hashes) == pages[:1].tolist()


def test_the_least_recently_used_prompt_is_evicted_first() -> None:
    pool = PagePool(5, 1)
    old, old_pages = cached_prompt(pool, [0, 1])
    new, new_pages = cached_prompt(pool, [2, 2])
    pool.share(pool.match(old))  # used again
    pool.release(old_pages)
    pool.allocate(2)
    assert pool.match(new) == []
    assert pool.match(old) == old_pages.tolist()


def test_a_prefix_survives_while_pages_are_free() -> None:
    pool = PagePool(6, 1)
    hashes, pages = cached_prompt(pool, [0, 1])
    assert not set(pool.allocate(3).tolist()) & set(pages.tolist())
    assert pool.match(hashes) == pages.tolist()


def test_an_owned_prefix_is_never_evicted() -> None:
    pool = PagePool(4, 1)
    hashes, pages = cached_prompt(pool, [0, 1, 2])
    pool.share(pool.match(hashes)[:2])
    assert pool.num_available == 1
    assert pool.allocate(1).tolist() == [pages[2]]
    assert pool.match(hashes) == pages[:2].tolist()


def test_the_first_page_of_a_hash_stays_the_one_that_is_found() -> None:
    pool = PagePool(8, 1)
    hashes = hashes_of([0, 1], 1)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.register(first.tolist(), hashes)
    pool.register(second.tolist(), hashes)
    pool.release(second)
    assert pool.match(hashes) == first.tolist()
    assert pool.num_available == 5


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = PagePool(4, 1, enable_prefix_caching=False)
    hashes, _ = cached_prompt(pool, [0, 1])
    assert pool.match(hashes) == []


def test_a_reset_forgets_every_prefix_and_takes_no_page_from_its_owner() -> None:
    pool = PagePool(6, 1)
    owned, _ = cached_prompt(pool, [0, 1])
    pool.share(kept := pool.match(owned))
    idle, _ = cached_prompt(pool, [2])
    pool.reset_prefix_cache()
    assert pool.match(owned) == pool.match(idle) == []
    assert pool.num_owned == 2
    pool.check_invariants([np.array(kept, np.int32)])


@pytest.mark.parametrize(
    ("owners", "complaint"),
    [([], "reference counts"), ([[1, 1]], "twice"), ([[1], [1], [2]], "reference counts")],
)
def test_the_invariants_can_fail(owners: list[list[int]], complaint: str) -> None:
    pool = PagePool(4, 1)
    pages = pool.allocate(2)
    pool.check_invariants([pages])
    with pytest.raises(AssertionError, match=complaint):
        pool.check_invariants([np.array(pages, np.int32) for pages in owners])
