"""The page server of an engine that computes prompts for others: a thread that gives them these prompts' pages."""

import hmac
import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

import msgspec
import zmq

from jaxvllm.kv_transfer.page_memory import PageMemory
from jaxvllm.kv_transfer.peer_messages import PAGES_PER_ANSWER, Done, Pages, Want, decode_message, encode
from jaxvllm.kv_transfer.transports import PageTransport

logger = logging.getLogger(__name__)

# How often the thread looks at what waits for pages that the device still copies, and at deadlines.
_TICK_MILLISECONDS = 2
_IDLE_MILLISECONDS = 200
# A consumer may ask a moment before the pages are there, since the answer that names them does not wait for them.
_PATIENCE_SECONDS = 5.0
# Bytes of a question. More is nobody's honest question.
_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class Offer:
    """Pages that are held for one request, until they were fetched or the deadline has come."""

    signature: str
    hashes: tuple[bytes, ...]
    deadline: float


@dataclass(frozen=True)
class _Waiting:
    """A question whose pages are still to come."""

    sender: bytes
    want: Want
    until: float


class PageServer:
    """Gives pages of a `PageMemory` to those who show the signature of a request's ticket."""

    def __init__(self, memory: PageMemory, transport: PageTransport, host: str, port: int):
        """Listens on `host`. With `port` 0 the system chooses one: see `port`. Raises OSError if that cannot be."""
        self._memory = memory
        self._transport = transport
        self._lock = threading.Lock()
        self._offers: dict[str, Offer] = {}
        self._waiting: list[_Waiting] = []
        self._closed = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
        self._socket.setsockopt(zmq.SNDTIMEO, 0)
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
        """Ends the thread. Whoever waits for an answer gets none."""
        self._closed.set()
        self._thread.join()
        self._context.destroy()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        while not self._closed.is_set():
            if poller.poll(_TICK_MILLISECONDS if self._waiting else _IDLE_MILLISECONDS):
                sender, *frames = self._socket.recv_multipart()
                try:
                    self._hear(sender, frames)
                except Exception:
                    logger.exception("a question for pages could not be answered")
            now = time.monotonic()
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                self._answer(one, now)
            self._expire(now)

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
        if offer is None or not hmac.compare_digest(offer.signature.encode(), message.signature.encode()):
            return None
        return offer

    def _answer(self, waiting: _Waiting, now: float) -> None:
        want = waiting.want
        offer = self._offer_of(want)
        if offer is None:
            self._send(waiting.sender, Pages(want.number, "nothing is held for such a request: its time may be over"))
        elif want.fingerprint != self._transport.fingerprint:
            self._send(waiting.sender, Pages(want.number, "the engines have another model, dtype or shape of pages"))
        elif len(want.hashes) > PAGES_PER_ANSWER or not set(want.hashes) <= set(offer.hashes):
            self._send(waiting.sender, Pages(want.number, "these are not the pages of that request"))
        elif self._memory.count(want.hashes) < len(want.hashes) and now < waiting.until:
            self._waiting.append(waiting)
        else:
            found = map(self._memory.get, want.hashes)
            pages = [page for page in takewhile(lambda page: page is not None, found) if page is not None]
            reason = "" if len(pages) == len(want.hashes) else "the other pages did not come in time"
            self._send(waiting.sender, Pages(want.number, reason), self._transport.give(pages))

    def _send(self, receiver: bytes, answer: Pages, frames: list[bytes] | None = None) -> None:
        try:
            self._socket.send_multipart([receiver, encode(answer), *(frames or [])], copy=False)
        except zmq.ZMQError as error:  # it has gone, or does not read
            logger.warning("an answer with pages could not be sent: %s", error)

    def _expire(self, now: float) -> None:
        for request_id in [name for name, offer in list(self._offers.items()) if offer.deadline <= now]:
            logger.warning("pages of request %s were held and not fetched in time", request_id)
            self._end(request_id)

    def _end(self, request_id: str) -> None:
        with self._lock:
            offer = self._offers.pop(request_id, None)
        if offer is not None:
            self._memory.let_go(offer.hashes)
