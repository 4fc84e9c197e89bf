"""`PeerFetches`: who asks which peer for pages, and when. A peer that is dead delays nobody who asks another one."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from jaxvllm.kv_transfer.page_format import Page

logger = logging.getLogger(__name__)

# Requests whose pages are fetched from one peer at the same time, each in a thread.
PER_PEER = 4
# Requests that wait for these. Beyond that pages are computed.
MOST_WAITING = 256
# Peers that are remembered. Tickets are signed, so there are as many as there are engines with the same secret.
_MOST_PEERS = 128

type PeerAddress = tuple[str, int]  # host, port


@dataclass(frozen=True)
class Fetched:
    """The first of the pages that were asked for, and whether the peer failed, so that others had better not ask it."""

    pages: Sequence[Page]
    peer_failed: bool = False


type Fetch = Callable[[], Fetched]


@dataclass
class _Peer:
    """One peer: whether it answers, and the fetches that wait for it."""

    waiting: deque[tuple[Future[Sequence[Page]], Fetch]] = field(default_factory=deque)
    num_threads: int = 0
    failed_at: float | None = None  # None: the last fetch did not fail


class PeerFetches:
    """Runs fetches in threads, a few for each peer, and a bounded number of others waits for them.

    When a fetch from a peer fails, those that wait for the same peer end at once without pages, and it is asked for
    nothing for `pause_seconds`. Then one fetch tries again, and the peer is asked by others when that has succeeded. So
    a dead peer costs each request at most the time that one fetch takes to find out.
    """

    def __init__(self, pause_seconds: float, clock: Callable[[], float] = time.monotonic):
        self._pause_seconds = pause_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._peers: dict[PeerAddress, _Peer] = {}
        self._threads: set[threading.Thread] = set()
        self._is_closed = False

    def is_avoided(self, address: PeerAddress) -> bool:
        """Returns whether a fetch from that peer would end at once, because the peer failed a moment ago."""
        with self._lock:
            return self._avoids(self._peers.get(address))

    def submit(self, address: PeerAddress, fetch: Fetch) -> Future[Sequence[Page]]:
        """Has a thread do `fetch`, which must end by itself. The future always ends with pages; there may be none."""
        future: Future[Sequence[Page]] = Future()
        with self._lock:
            peer = self._peer(address)
            if self._is_closed or peer is None or self._avoids(peer):
                future.set_result(())
                return future
            if len(peer.waiting) == MOST_WAITING:
                logger.warning("%d requests wait for pages of %s:%d: others compute theirs", MOST_WAITING, *address)
                future.set_result(())
                return future
            peer.waiting.append((future, fetch))
            if peer.num_threads < PER_PEER:
                peer.num_threads += 1
                thread = threading.Thread(
                    target=self._run, args=(address, peer), name="jaxvllm-fetch-pages", daemon=True
                )
                self._threads.add(thread)
                thread.start()
        return future

    def close(self) -> None:
        """Ends what waits, and waits for the fetches under way."""
        with self._lock:
            self._is_closed = True
            left = [future for peer in self._peers.values() for future in _drained(peer)]
            threads = list(self._threads)
        for future in left:
            future.set_result(())
        for thread in threads:
            thread.join()

    def _avoids(self, peer: _Peer | None) -> bool:
        if peer is None or peer.failed_at is None:
            return False
        return peer.num_threads > 0 or self._clock() < peer.failed_at + self._pause_seconds

    def _peer(self, address: PeerAddress) -> _Peer | None:
        """Returns what is known of a peer, or None: too many others are being asked."""
        if address not in self._peers:
            if len(self._peers) >= _MOST_PEERS:
                idle = next((other for other, peer in self._peers.items() if not peer.num_threads), None)
                if idle is None:
                    logger.warning("pages are fetched from %d peers: other pages are computed", _MOST_PEERS)
                    return None
                del self._peers[idle]
            self._peers[address] = _Peer()
        return self._peers[address]

    def _run(self, address: PeerAddress, peer: _Peer) -> None:
        while True:
            with self._lock:
                if not peer.waiting:
                    peer.num_threads -= 1
                    if not peer.num_threads and peer.failed_at is None:
                        del self._peers[address]
                    self._threads.discard(threading.current_thread())
                    return
                future, fetch = peer.waiting.popleft()
            try:
                fetched = fetch()
            except Exception:
                logger.exception("pages of %s:%d could not be fetched", *address)
                fetched = Fetched((), peer_failed=True)
            left: list[Future[Sequence[Page]]] = []
            with self._lock:
                if fetched.peer_failed:
                    peer.failed_at = self._clock()
                    left = _drained(peer)
                else:
                    peer.failed_at = None
            for one in left:
                one.set_result(())
            future.set_result(fetched.pages)


def _drained(peer: _Peer) -> list[Future[Sequence[Page]]]:
    """Takes away all that wait for a peer, and returns their futures."""
    left = [future for future, _ in peer.waiting]
    peer.waiting.clear()
    return left
