"""Reads the KV events of a replica in another process, on this host or another one."""

import asyncio
import logging

import msgspec
import zmq
import zmq.asyncio

from jaxvllm.core.kv_events import END_OF_REPLAY
from jaxvllm.core.prefix_index import KVEventReader

logger = logging.getLogger(__name__)

# The longest wait for the next batch of those that were asked for again: a publisher without a replay endpoint, or one
# that is being started, does not answer.
REPLAY_SECONDS = 5.0


async def follow_kv_events(
    reader: KVEventReader, endpoint: str, replay_endpoint: str | None = None, topic: str = ""
) -> None:
    """Gives `reader` what the publisher at `endpoint` publishes, until this is cancelled.

    What was published before, and what was lost on the way, is asked for at `replay_endpoint`. Without it, or where the
    publisher does not have it any more, `reader` goes on without it.
    """
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB, socket_class=zmq.asyncio.Socket) as events:
        events.connect(endpoint)
        events.subscribe(topic)
        await _replay(reader, context, replay_endpoint)
        while True:
            _, number, payload = await events.recv_multipart()
            if not _receive(reader, number, payload):
                await _replay(reader, context, replay_endpoint)
                _receive_anyway(reader, number, payload)


async def _replay(reader: KVEventReader, context: zmq.asyncio.Context, endpoint: str | None) -> None:
    """Gives `reader` the batches from its next one on, as far as the publisher has them."""
    if endpoint is None:
        return
    with context.socket(zmq.DEALER, socket_class=zmq.asyncio.Socket) as asker:
        asker.setsockopt(zmq.LINGER, 0)
        asker.setsockopt(zmq.RCVHWM, 0)
        asker.connect(endpoint)
        first = reader.replay_from
        await asker.send_multipart([b"", first.to_bytes(8, "big")])
        try:
            while True:
                async with asyncio.timeout(REPLAY_SECONDS):
                    _, _, number, payload = await asker.recv_multipart()
                if number == END_OF_REPLAY:
                    return
                if not _receive(reader, number, payload):
                    if reader.next_number < first:  # the publisher is another one
                        break
                    _receive_anyway(reader, number, payload)
        except TimeoutError:
            logger.warning("%s does not answer: KV events are missing until it does", endpoint)
            return
    await _replay(reader, context, endpoint)


def _receive_anyway(reader: KVEventReader, number: bytes, payload: bytes) -> None:
    if not _receive(reader, number, payload):
        reader.skip_to(int.from_bytes(number, "big"))
        _receive(reader, number, payload)


def _receive(reader: KVEventReader, number: bytes, payload: bytes) -> bool:
    try:
        return reader.receive(int.from_bytes(number, "big"), payload)
    except msgspec.DecodeError as error:
        logger.warning("KV events that cannot be read were ignored: %s", error)
        return True
