"""A peer that fails is left alone for a while, and those who wait for it end. Others are fetched from meanwhile."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import pytest

from jaxvllm.kv_transfer import peer_fetches
from jaxvllm.kv_transfer.page_format import Page
from jaxvllm.kv_transfer.peer_fetches import PER_PEER, Fetched, PeerFetches
from tests.kv_transfer.conftest import Clock
from tests.waiting import wait_until

PAGE = Page(())
DEAD, LIVELY = ("dead", 1), ("lively", 1)


@pytest.fixture
def fetches(clock: Clock) -> Iterator[PeerFetches]:
    made = PeerFetches(6.0, clock)
    yield made
    made.close()


def answers() -> Fetched:
    return Fetched([PAGE])


def fails() -> Fetched:
    return Fetched((), peer_failed=True)


def waits(for_what: threading.Event, then: Callable[[], Fetched]) -> Callable[[], Fetched]:
    def fetch() -> Fetched:
        for_what.wait()
        return then()

    return fetch


def pages(future: Future[Sequence[Page]]) -> list[Page]:
    return list(future.result())


def test_those_who_wait_for_a_peer_that_fails_end_with_it(fetches: PeerFetches) -> None:
    ends = threading.Event()
    stuck = [fetches.submit(DEAD, waits(ends, fails)) for _ in range(80)]
    assert pages(fetches.submit(LIVELY, answers)) == [PAGE]
    assert not any(future.done() for future in stuck)
    ends.set()
    assert [pages(future) for future in stuck] == [[]] * 80
    assert pages(fetches.submit(LIVELY, answers)) == [PAGE]


def test_a_peer_that_failed_is_tried_by_one_after_the_pause(fetches: PeerFetches, clock: Clock) -> None:
    def is_over() -> bool:
        return not fetches._threads

    assert pages(fetches.submit(DEAD, fails)) == []
    wait_until(is_over)
    assert fetches.is_avoided(DEAD) and fetches.submit(DEAD, answers).result() == ()
    for outcome in (fails, answers):
        clock.now += 6.0
        assert not fetches.is_avoided(DEAD)
        ends = threading.Event()
        probe = fetches.submit(DEAD, waits(ends, outcome))
        assert fetches.is_avoided(DEAD) and fetches.submit(DEAD, answers).result() == ()
        ends.set()
        probe.result()
        wait_until(is_over)
        assert fetches.is_avoided(DEAD) == (outcome is fails)
    assert pages(fetches.submit(DEAD, answers)) == [PAGE]
    wait_until(is_over)
    assert not fetches._peers, "nothing is remembered of a peer that answers"


def test_an_error_of_ours_counts_as_a_failure(fetches: PeerFetches, caplog: pytest.LogCaptureFixture) -> None:
    def breaks() -> Fetched:
        raise RuntimeError("a bug")

    assert pages(fetches.submit(DEAD, breaks)) == []
    assert fetches.is_avoided(DEAD) and "a bug" in caplog.text


def test_as_many_wait_as_may(fetches: PeerFetches, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = threading.Event()
    try:
        busy = [fetches.submit(LIVELY, waits(ends, answers)) for _ in range(PER_PEER)]
        wait_until(lambda: not fetches._peers[LIVELY].waiting)
        monkeypatch.setattr(peer_fetches, "MOST_WAITING", 3)
        left = [fetches.submit(LIVELY, answers) for _ in range(5)]
        assert [future.done() for future in left] == [False] * 3 + [True] * 2
    finally:
        ends.set()
    assert [pages(future) for future in busy + left] == [[PAGE]] * (PER_PEER + 3) + [[]] * 2


def test_peers_that_failed_are_forgotten_when_there_are_many(fetches: PeerFetches) -> None:
    for port in range(300):
        assert pages(fetches.submit(("host", port), fails)) == []
        wait_until(lambda: not fetches._threads)
    assert len(fetches._peers) <= 128
    assert pages(fetches.submit(LIVELY, answers)) == [PAGE]
