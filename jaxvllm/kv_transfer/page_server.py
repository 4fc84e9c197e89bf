"""The page server of an engine that computes prompts for others: a thread that gives them these prompts' pages."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import msgspec
import zmq

from jaxvllm.kv_transfer.page_memory import PageMemory
from jaxvllm.kv_transfer.peer_messages import ANSWERS_AHEAD, PAGES_PER_ANSWER, Done, Pages, Want, decode_message, encode
from jaxvllm.kv_transfer.tickets import same_text
from jaxvllm.kv_transfer.transports import PageTransport

logger = logging.getLogger(__name__)

# How often the thread looks at what waits for pages that the device still copies, and at deadlines.
_TICK_MILLISECONDS = 2
_IDLE_MILLISECONDS = 200
# A consumer may ask a moment before the pages are there, since the answer that names them does not wait for them.
_PATIENCE_SECONDS = 5.0
# Bytes of a question. More is nobody's honest question.
_MOST_BYTES = 1 << 16
# Questions that wait for pages, in all. An honest consumer has `ANSWERS_AHEAD` of them.
_MOST_WAITING = 1024
# Bytes of answers that no peer has read yet. What is more waits until some were read, or `_PATIENCE_SECONDS`.
_MOST_UNREAD_BYTES = 256 << 20
# A connection whose peer has read nothing for so long ends, and with it all that waits for that peer.
UNREAD_SECONDS = 30.0
# How often each page of an offer may be given: to a consumer, and to another one if the first has died.
_MOST_TIMES = 2


@dataclass
class Offer:
    """Pages that are held for one request, until they were fetched or the deadline has come."""

    signature: str
    hashes: tuple[bytes, ...]
    deadline: float
    num_given: int = 0  # pages, each as often as it was given


def _survive[*Values](work: Callable[[*Values], None], *values: *Values) -> None:
    """Calls `work`. An exception is logged: the thread serves all requests, and one of them must not end it."""
    try:
        work(*values)
    except Exception:
        logger.exception("the page server could not finish a piece of work")


@dataclass(frozen=True)
class _Waiting:
    """A question whose pages are still to come."""

    sender: bytes
    want: Want
    until: float


class UnreadAnswers:
    """The answers that ZeroMQ still keeps, because the peers have not read them. A peer that never reads gets no more.

    Without this each connection could make 1000 answers of 16 pages wait: 2 GB of small pages, and more of large ones.
    """

    def __init__(self, most_bytes: int = _MOST_UNREAD_BYTES):
        self._most_bytes = most_bytes
        self._kept: list[tuple[bytes, zmq.MessageTracker, int]] = []

    def has_room(self, sender: bytes) -> bool:
        """Returns whether another answer for `sender` may be made."""
        self._kept = [one for one in self._kept if not one[1].done]
        num_unread = sum(receiver == sender for receiver, _, _ in self._kept)
        return num_unread < ANSWERS_AHEAD and sum(size for _, _, size in self._kept) < self._most_bytes

    def add(self, receiver: bytes, tracker: zmq.MessageTracker, size: int) -> None:
        """Takes note of an answer that was handed to ZeroMQ."""
        self._kept.append((receiver, tracker, size))


class PageServer:
    """Gives pages of a `PageMemory` to those who show the signature of a request's ticket."""

    def __init__(
        self,
        memory: PageMemory,
        transport: PageTransport,
        host: str,
        port: int,
        unread_seconds: float = UNREAD_SECONDS,
    ):
        """Listens on `host`. With `port` 0 the system chooses one: see `port`. Raises OSError if that cannot be.

        `unread_seconds`: a peer that reads nothing for so long loses its connection.
        """
        self._memory = memory
        self._transport = transport
        self._lock = threading.Lock()
        self._offers: dict[str, Offer] = {}
        self._waiting: list[_Waiting] = []
        self._unread = UnreadAnswers()
        self._closed = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
        self._socket.setsockopt(zmq.SNDTIMEO, 0)
        self._socket.setsockopt(zmq.TCP_MAXRT, int(1000 * unread_seconds))
        self._socket.copy_threshold = 0  # or ZeroMQ would copy small frames, and not tell when they are gone
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy()
            raise OSError(f"kv_port {port} on kv_ip {host} cannot be listened on: {error}") from error
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._thread = threading.Thread(target=self._run, name="jaxvllm-page-server", daemon=True)
        self._thread.start()

    def offer(self, request_id: str, signature: str, hashes: Iterable[bytes], seconds: float) -> None:
        """Holds the pages of these hashes, also those that are still to come, for `seconds` at most."""
        offer = Offer(signature, tuple(hashes), time.monotonic() + seconds)
        self._memory.hold(offer.hashes)
        with self._lock:
            former = self._offers.get(request_id)
            self._offers[request_id] = offer
        if former is not None:
            self._memory.let_go(former.hashes)

    def close(self) -> None:
        """Ends the thread. Engines that wait for an answer get none."""
        self._closed.set()
        self._thread.join()
        self._context.destroy()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        while not self._closed.is_set():
            if poller.poll(_TICK_MILLISECONDS if self._waiting else _IDLE_MILLISECONDS):
                sender, *frames = self._socket.recv_multipart()
                _survive(self._hear, sender, frames)
            now = time.monotonic()
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                _survive(self._answer, one, now)
            _survive(self._expire, now)

    def _hear(self, sender: bytes, frames: list[bytes]) -> None:
        try:
            message = decode_message(frames[0] if len(frames) == 1 else b"")
        except msgspec.MsgspecError:
            logger.warning("something came that is no question for pages")
            return
        if isinstance(message, Done):
            if self._offer_of(message) is not None:
                self._end(message.request_id)
            return
        self._answer(_Waiting(sender, message, time.monotonic() + _PATIENCE_SECONDS), time.monotonic())

    def _offer_of(self, message: Want | Done) -> Offer | None:
        offer = self._offers.get(message.request_id)
        return offer if offer is not None and same_text(offer.signature, message.signature) else None

    def _answer(self, waiting: _Waiting, now: float) -> None:
        want = waiting.want
        offer = self._offer_of(want)
        if offer is None:
            self._send(waiting.sender, Pages(want.number, "nothing is held for such a request: its time may be over"))
        elif not self._transport.is_ready:
            if not self._waits(waiting, now):
                self._send(waiting.sender, Pages(want.number, "this engine still reads its weights to name them"))
        elif want.fingerprint != self._transport.fingerprint:
            self._send(waiting.sender, Pages(want.number, "the engines have another model, dtype or shape of pages"))
        elif len(want.hashes) > PAGES_PER_ANSWER or not set(want.hashes) <= set(offer.hashes):
            self._send(waiting.sender, Pages(want.number, "these are not the pages of that request"))
        elif offer.num_given + len(want.hashes) > _MOST_TIMES * len(offer.hashes):
            self._send(waiting.sender, Pages(want.number, "these pages were given already"))
        elif self._memory.count(want.hashes) < len(want.hashes) and self._waits(waiting, now):
            pass
        elif not self._unread.has_room(waiting.sender):
            if not self._waits(waiting, now):
                logger.warning("a question for pages is refused: answers that peers do not read take the memory")
                self._send(waiting.sender, Pages(want.number, "answers that were not read take the memory"))
        else:
            found = map(self._memory.get, want.hashes)
            pages = [page for page in takewhile(lambda page: page is not None, found) if page is not None]
            reason = "" if len(pages) == len(want.hashes) else "the other pages did not come in time"
            offer.num_given += len(pages)
            frames = self._transport.give(want.hashes[: len(pages)], pages)
            self._send(waiting.sender, Pages(want.number, reason), frames)

    def _waits(self, waiting: _Waiting, now: float) -> bool:
        """Lets a question wait that cannot be answered yet. Returns whether it may."""
        num_asked = sum(other.sender == waiting.sender for other in self._waiting)
        may_wait = now < waiting.until and num_asked < ANSWERS_AHEAD and len(self._waiting) < _MOST_WAITING
        if may_wait:
            self._waiting.append(waiting)
        return may_wait

    def _send(self, receiver: bytes, answer: Pages, frames: Sequence[bytes] = ()) -> None:
        try:
            parts = [receiver, encode(answer), *frames]
            tracker = self._socket.send_multipart(parts, copy=False, track=True)
        except zmq.ZMQError as error:  # it has gone, or does not read
            logger.warning("an answer with pages could not be sent: %s", error)
            return
        if frames and tracker is not None:
            self._unread.add(receiver, tracker, sum(map(len, frames)))

    def _expire(self, now: float) -> None:
        for request_id in [name for name, offer in list(self._offers.items()) if offer.deadline <= now]:
            logger.warning("pages of request %s were held and not fetched in time", request_id)
            self._end(request_id)

    def _end(self, request_id: str) -> None:
        with self._lock:
            offer = self._offers.pop(request_id, None)
        if offer is not None:
            self._memory.let_go(offer.hashes)
