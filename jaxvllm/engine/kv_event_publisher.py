"""`KVEventPublisher`: tells routers, over ZeroMQ, which pages one replica's prefix cache can find."""

import logging
import time
from contextlib import ExitStack

import msgspec
import zmq

from jaxvllm.core.kv_events import KVEventBatch, KVEventLog
from jaxvllm.core.kv_events_config import KVEventsConfig
from jaxvllm.engine.kv_event_replayer import REPLAYS_AHEAD, KVEventReplayer

logger = logging.getLogger(__name__)

# Peers send the topics that they want and the numbers of batches, so nothing larger is taken from them.
MAX_PEER_BYTES = 1024
# A connection over TCP whose peer has read nothing for so long ends, and what waits for that peer is free.
UNREAD_SECONDS = 30.0

_encode = msgspec.msgpack.Encoder().encode


class KVEventPublisher:
    """Publishes what its `log` collected. A subscriber that is slow, gone or wrong costs the engine nothing.

    A message has three frames, as in vLLM: the topic, the number of the batch (8 bytes, big-endian, from 0 in each
    process of the engine), and the batch. A batch that a subscriber missed may be asked for at the replay endpoint, by
    the frames `b""` and its number: the answer is that batch and all later ones that are still kept, each with
    the frames of the publication after an empty one, and at last a message with the number -1.
    """

    def __init__(self, config: KVEventsConfig, rank: int, page_size: int):
        """Opens the sockets of the replica `rank`. Raises ValueError for an endpoint that cannot be used."""
        self.log = KVEventLog(page_size)
        self._rank = rank
        self._topic = config.topic.encode()
        self._next = 0
        endpoint, replay = config.of_replica(rank)
        self._context = zmq.Context()
        self._replayer: KVEventReplayer | None = None  # None: nobody can ask, so nothing is kept
        with ExitStack() as undo:
            undo.callback(self._context.destroy, linger=0)
            self._publications = self._socket(zmq.PUB, config.hwm, endpoint)
            if "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc:"):  # as vLLM decides
                _bind(self._publications, endpoint, "endpoint")
            else:
                self._publications.connect(endpoint)
            if replay is not None:
                replays = self._socket(zmq.ROUTER, REPLAYS_AHEAD, replay)
                _bind(replays, replay, "replay_endpoint")
                self._replayer = KVEventReplayer(replays, self._topic, config.buffer_steps)
            undo.pop_all()
        logger.info("KV events of replica %d at %s%s", rank, endpoint, "" if replay is None else f", again at {replay}")

    def flush(self) -> None:
        """Publishes the events since the last call as one batch, if there are any."""
        if not (events := self.log.take()):
            return
        # Sent from here: a publisher never waits (it drops what is too much for a subscriber), and a thread would have
        # to share the interpreter with the engine's.
        payload = _encode(KVEventBatch(time.time(), events, self._rank))
        if self._replayer is not None:
            self._replayer.keep(self._next, payload)
        self._publications.send_multipart((self._topic, self._next.to_bytes(8, "big"), payload))
        self._next += 1

    def close(self) -> None:
        """Closes the sockets. What subscribers have not read by then may be lost."""
        self._publications.close(linger=0)
        self._context.term()  # ends the thread, which closes its socket
        if self._replayer is not None:
            self._replayer.join()

    def _socket(self, kind: int, high_water_mark: int, endpoint: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, high_water_mark)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PEER_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.TCP_MAXRT, int(1000 * UNREAD_SECONDS))
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        return socket


def open_publishers(
    config: KVEventsConfig, num_replicas: int, page_size: int, first_rank: int = 0
) -> tuple[KVEventPublisher, ...]:
    """Opens the sockets of all replicas, whose ranks begin at `first_rank`.

    Raises ValueError when an endpoint is wrong.
    """
    with ExitStack() as undo:
        opened: list[KVEventPublisher] = []
        for rank in range(first_rank, first_rank + num_replicas):
            opened.append(KVEventPublisher(config, rank, page_size))
            undo.callback(opened[-1].close)
        undo.pop_all()
    return tuple(opened)


def _bind(socket: zmq.Socket[bytes], endpoint: str, name: str) -> None:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"{name} {endpoint} of kv_events_config cannot be used ({error}): choose another") from error
