"""`KVEventReplayer`: keeps the latest batches of KV events, and sends those that a subscriber missed once more."""

import logging
import threading
from collections import OrderedDict, deque

import zmq

from jaxvllm.core.kv_events import END_OF_REPLAY

logger = logging.getLogger(__name__)

# Batches of an answer that wait in ZeroMQ for one peer, which has not read them. More are sent when it has.
REPLAYS_AHEAD = 64
# Bytes of the batches that are kept. One of a long prompt has some 10 KB, so 10,000 of these are less.
MOST_KEPT_BYTES = 256 << 20
# Answers under way. A peer has one, and its next question replaces it.
MOST_ANSWERS = 256
# How often the thread looks whether peers have read, while answers are under way.
_TICK_MILLISECONDS = 1


class KVEventReplayer:
    """Answers questions for earlier batches, in a thread. Each answer goes on when its peer has read.

    So a peer that never reads costs `REPLAYS_AHEAD` batches. What is no longer kept when its turn comes is left out, as
    it is for a question that comes late.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", topic: bytes, most_kept: int):
        """Takes over the ROUTER `socket`, which the thread closes when its context ends."""
        self._topic = topic
        self._most_kept = most_kept
        self._lock = threading.Lock()  # of what is kept, which the engine's thread adds to
        self._kept: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0
        # The next number of each answer, and the first that it no longer has.
        self._answers: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # tells when a peer has not read, or has gone
        self._thread = threading.Thread(target=self._run, args=(socket,), name="kv-replay", daemon=True)
        self._thread.start()

    def keep(self, number: int, payload: bytes) -> None:
        """Keeps the batch `number`, and forgets the oldest that are too many."""
        with self._lock:
            self._kept.append((number, payload))
            self._num_bytes += len(payload)
            while len(self._kept) > self._most_kept or (self._num_bytes > MOST_KEPT_BYTES and len(self._kept) > 1):
                self._num_bytes -= len(self._kept.popleft()[1])

    def join(self) -> None:
        """Waits until the thread has ended, which it does when the socket's context ends."""
        self._thread.join()

    def _run(self, socket: "zmq.Socket[bytes]") -> None:
        with socket:
            try:
                while True:
                    if socket.poll(_TICK_MILLISECONDS if self._answers else None):
                        self._hear(socket.recv_multipart())
                    for peer in list(self._answers):
                        self._go_on(socket, peer)
            except zmq.ContextTerminated:
                pass

    def _hear(self, request: list[bytes]) -> None:
        if len(request) != 3 or request[1] or len(request[2]) != 8:
            logger.warning("a request for KV events was ignored: it must be an empty frame and a number of 8 bytes")
            return
        with self._lock:
            end = self._kept[-1][0] + 1 if self._kept else 0
        if len(self._answers) == MOST_ANSWERS and request[0] not in self._answers:
            self._answers.popitem(last=False)
            logger.warning("an answer with KV events ends, because %d others have begun since", MOST_ANSWERS)
        self._answers[request[0]] = (int.from_bytes(request[2], "big"), end)

    def _go_on(self, socket: "zmq.Socket[bytes]", peer: bytes) -> None:
        """Sends as many batches of an answer as its peer has room for."""
        number, end = self._answers[peer]
        try:
            while (found := self._next(number, end)) is not None:
                batch, payload = found
                frames = (peer, b"", self._topic, batch.to_bytes(8, "big"), payload)
                socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
                number = batch + 1
            socket.send_multipart((peer, b"", b"", END_OF_REPLAY, b""), zmq.DONTWAIT)
        except zmq.Again:  # it has not read
            self._answers[peer] = (number, end)
        except zmq.ZMQError as error:
            if error.errno == zmq.ETERM:
                raise
            del self._answers[peer]  # it has gone
        else:
            del self._answers[peer]

    def _next(self, number: int, end: int) -> tuple[int, bytes] | None:
        """Returns the first kept batch from `number` on, before `end`."""
        with self._lock:
            if not self._kept:
                return None
            at = max(number - self._kept[0][0], 0)
            return self._kept[at] if at < len(self._kept) and self._kept[at][0] < end else None
