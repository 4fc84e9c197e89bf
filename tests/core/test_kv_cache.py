"""Groups of layers with windows: what a request holds of each, and which prefixes are found again."""

import numpy as np
import pytest

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.kv_cache import GroupSize, KVCache
from jaxvllm.core.page_groups import windowed_pages
from jaxvllm.core.page_pool import TRASH_PAGE, extend_page_hashes
from tests.core.fake_device import VOCAB_SIZE
from tests.core.simulation import Job, Setup, Simulation

PAGE_SIZE, WINDOW = 4, 10
TWO = Setup(num_pages=64, page_size=PAGE_SIZE, more_groups=(GroupSize(16, WINDOW),))


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist())


@pytest.mark.parametrize(("width", "seed"), [(1, None), (5, None), (5, 0)])
@pytest.mark.parametrize("budget", [4, 8, 16])
def test_a_long_request_holds_a_bounded_number_of_windowed_pages(budget: int, width: int, seed: int | None) -> None:
    simulation = Simulation(Setup(**vars(TWO) | dict(budget=budget, decode_steps=width, seed=seed)))
    shadow = simulation.add(Job(prompt_of(40), max_tokens=20))
    full, windowed = simulation.cache.groups
    # Steps that are dispatched but not read may have yielded nothing: their tokens may have to be computed still.
    while_prompt = windowed_pages(WINDOW, budget, PAGE_SIZE)
    while_decoding = windowed_pages(WINDOW, width * (TWO.depth + 1), PAGE_SIZE)
    most = {True: 0, False: 0}
    while simulation.scheduler.has_work:
        simulation.step()
        if (slot := shadow.slot) is not None:
            is_prompt = shadow.computed < 40
            most[is_prompt] = max(most[is_prompt], len(windowed.pages(slot)))
            assert len(windowed.pages(slot)) <= (while_prompt if is_prompt else max(while_prompt, while_decoding))
            assert (full.first[slot], full.end[slot]) == (0, len(full.pages(slot)))
    assert most[True] <= while_prompt < 10  # of the prompt alone
    assert most[False] <= max(while_prompt, while_decoding) < 15  # of all of it
    assert 3 <= most[False], "less than a window is held"


def test_a_prompt_has_room_for_its_chunks_from_its_admission_on() -> None:
    # The pool has one page too few for the most that both will hold, though their first chunks would fit many times.
    room = windowed_pages(WINDOW, 4, PAGE_SIZE)
    groups = (GroupSize(2 * room, WINDOW),)
    simulation = Simulation(Setup(num_pages=64, page_size=PAGE_SIZE, budget=4, caching=False, more_groups=groups))
    first, second = (simulation.add(Job(prompt_of(40, seed), max_tokens=1)) for seed in range(2))
    while first.state != "ended":
        simulation.step()
        assert first.state == "ended" or second.state == "waiting"
    simulation.drain()
    assert simulation.scheduler.num_preemptions == 0


def test_what_left_the_window_is_the_trash_page_in_the_table() -> None:
    simulation = Simulation(TWO)
    shadow = simulation.add(Job(prompt_of(30), max_tokens=6))
    while shadow.known < 35:
        simulation.step()
    _, windowed = simulation.cache.groups
    assert shadow.slot is not None
    # Position 34 sees 25 to 34: pages 6 to 8, of four tokens each.
    assert (windowed.table[shadow.slot, :6] == TRASH_PAGE).all()
    assert (windowed.table[shadow.slot, 6:9] != TRASH_PAGE).all()
    simulation.drain()


# The prefix cache.


def hashes_of(tokens: tuple[int, ...]) -> list[bytes]:
    return extend_page_hashes([], np.array(tokens, np.int32), PAGE_SIZE, None)


def cache_with(full: set[int], windowed: set[int], hashes: list[bytes]) -> KVCache:
    """A cache whose groups have the pages of those columns."""
    sizes = [GroupSize(64), GroupSize(64, WINDOW)]
    cache = KVCache(sizes, num_slots=1, max_model_len=64, page_size=PAGE_SIZE, max_chunk=16)
    for group, columns in zip(cache.groups, (full, windowed), strict=True):
        pages = group.pool.allocate(len(columns))
        group.pool.register(pages.tolist(), [hashes[column] for column in sorted(columns)])
        group.pool.release(pages)
    return cache


@pytest.mark.parametrize(
    ("full", "windowed", "found", "held"),
    [
        (8, set(range(8)), 8, 3),  # the token at 32 sees 23 to 31: pages 5 to 7
        (8, {5, 6, 7}, 8, 3),
        (8, {4, 6, 7}, 0, 0),
        (8, {3, 4, 5, 7}, 6, 3),  # a shorter prefix whose last window is there
        (5, set(range(8)), 5, 3),
        (8, {0, 1, 2}, 3, 3),  # the window begins with the prompt
        (8, {0}, 1, 1),
        (0, set(range(8)), 0, 0),
        (8, set(), 0, 0),
    ],
)
def test_a_prefix_needs_all_full_pages_and_the_last_window(
    full: int, windowed: set[int], found: int, held: int
) -> None:
    hashes = hashes_of(prompt_of(32))
    prefix = cache_with(set(range(full)), windowed, hashes).match(hashes)
    assert (prefix.num_pages, len(prefix.pages[0]), len(prefix.pages[1])) == (found, found, held)


def test_a_conversation_goes_on_behind_pages_that_left_the_window() -> None:
    simulation = Simulation(Setup(**vars(TWO) | dict(budget=64)))
    first = simulation.add(Job(prompt_of(30), max_tokens=15))
    simulation.drain()
    follow_up = simulation.add(Job((*first.tokens, 1, 2), max_tokens=9))
    simulation.step()
    # 45 tokens, and the KV of the last one was never computed: eleven full pages.
    assert follow_up.request.num_cached_tokens == 44
    assert follow_up.pages[1][:8] == [TRASH_PAGE] * 8 and all(follow_up.pages[1][8:])
    simulation.drain()


# Refusals.


def test_a_request_larger_than_a_windowed_pool_is_refused() -> None:
    simulation = Simulation(Setup(num_pages=64, page_size=PAGE_SIZE, budget=16, more_groups=(GroupSize(7, WINDOW),)))
    words = "needs 8 pages of 4 tokens, but the pool of layers with a window of 10 tokens has 6: lower max_tokens"
    with pytest.raises(ParameterError, match=words):
        simulation.add(Job(prompt_of(40), max_tokens=4))
    simulation.add(Job(prompt_of(20), max_tokens=5))
    simulation.drain()
