"""KV events over ZeroMQ: numbered, asked for again, and never a burden for the engine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from jaxvllm import LLM
from jaxvllm.core.kv_events import (
    END_OF_REPLAY,
    AllBlocksCleared,
    AnyKVEvent,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    hash_key,
    page_keys,
)
from jaxvllm.core.kv_events_config import KVEventsConfig
from jaxvllm.engine import kv_event_replayer
from jaxvllm.engine.kv_event_publisher import KVEventPublisher, open_publishers
from tests.engine.tiny import GREEDY, assert_idle, greedy_tokens, one_program, tiny_llm
from tests.waiting import PATIENCE, wait_until

TIMEOUT = int(PATIENCE * 1000)
decode = msgspec.msgpack.Decoder(KVEventBatch).decode


def config_in(directory: Path, **options: object) -> KVEventsConfig:
    given = {"endpoint": f"ipc://{directory}/events", "replay_endpoint": f"ipc://{directory}/replay"} | options
    return KVEventsConfig.read({"enable_kv_cache_events": True} | given)


@contextmanager
def published(config: KVEventsConfig) -> Iterator[KVEventPublisher]:
    [publisher] = open_publishers(config, 1, page_size=2)
    try:
        yield publisher
    finally:
        publisher.close()


class Peer:
    """A subscriber, and a client that asks for batches again."""

    def __init__(self, context: zmq.Context, config: KVEventsConfig, rank: int = 0, topic: bytes = b""):
        endpoint, replay = config.of_replica(rank)
        self.subscriber = context.socket(zmq.SUB)
        self.subscriber.setsockopt(zmq.RCVTIMEO, TIMEOUT)
        self.subscriber.setsockopt(zmq.RCVHWM, 1)
        self.subscriber.connect(endpoint)
        self.subscriber.subscribe(topic)
        self.asker = context.socket(zmq.DEALER)
        self.asker.setsockopt(zmq.RCVTIMEO, TIMEOUT)
        if replay is not None:
            self.asker.connect(replay)

    def close(self) -> None:
        self.subscriber.close(linger=0)
        self.asker.close(linger=0)

    def read(self) -> tuple[int, KVEventBatch]:
        _, number, payload = self.subscriber.recv_multipart()
        return int.from_bytes(number, "big"), decode(payload)

    def replay(self, first: int) -> list[tuple[int, KVEventBatch]]:
        self.asker.send_multipart([b"", first.to_bytes(8, "big")])
        batches = []
        while True:
            empty, _, number, payload = self.asker.recv_multipart()
            assert empty == b""
            if number == END_OF_REPLAY:
                return batches
            batches.append((int.from_bytes(number, "big"), decode(payload)))


type Telling = tuple[LLM, list[Peer]]
type Join = Callable[..., Peer]


@contextmanager
def joining() -> Iterator[Join]:
    """Makes peers, and closes them."""
    peers: list[Peer] = []

    def join(config: KVEventsConfig, rank: int = 0, topic: bytes = b"") -> Peer:
        peers.append(Peer(context, config, rank, topic))
        return peers[-1]

    with zmq.Context() as context:
        yield join
        for peer in peers:
            peer.close()


@pytest.fixture
def join() -> Iterator[Join]:
    with joining() as join:
        yield join


def publish(publisher: KVEventPublisher, byte: int) -> None:
    publisher.log.removed(0, bytes([byte] * 32))
    publisher.flush()


def joined(publisher: KVEventPublisher, peer: Peer) -> int:
    """Publishes until `peer` gets something: ZeroMQ subscribes in the background. Returns the next number."""

    def arrives() -> bool:
        publish(publisher, 0)
        return bool(peer.subscriber.poll(10))

    wait_until(arrives)
    while peer.read()[0] < publisher._next - 1:
        pass
    return publisher._next


def test_a_subscriber_gets_numbered_batches_of_its_topic(tmp_path: Path, join: Join) -> None:
    config = config_in(tmp_path, topic="kv@pod@demo")
    with published(config) as publisher:
        peer = join(config, topic=b"kv@")
        first = joined(publisher, peer)
        publisher.flush()  # nothing happened: there is no batch
        for byte in (1, 2):
            publish(publisher, byte)
        for index in range(2):
            topic, number, payload = peer.subscriber.recv_multipart()
            assert (topic, int.from_bytes(number, "big")) == (b"kv@pod@demo", first + index)
            batch = decode(payload)
            assert batch.data_parallel_rank == 0
            [event] = batch.events
            assert isinstance(event, BlockRemoved)
            assert event.block_hashes == [int.from_bytes(bytes([index + 1] * 8), "big")]


def test_batches_may_be_asked_for_again(tmp_path: Path, join: Join) -> None:
    config = config_in(tmp_path, buffer_steps=5)
    with published(config) as publisher:
        peer = join(config)
        assert peer.replay(0) == []
        for byte in range(8):
            publish(publisher, byte)
        assert [number for number, _ in peer.replay(0)] == [3, 4, 5, 6, 7], "the latest are kept"
        assert [number for number, _ in peer.replay(6)] == [6, 7]
        assert peer.replay(8) == []
        peer.asker.send_multipart([b"", b"odd"])  # not answered, and no harm done
        assert len(peer.replay(7)) == 1


def test_a_whole_buffer_fits_into_an_answer(tmp_path: Path, join: Join) -> None:
    # More than ZeroMQ queues for a peer by default.
    config = config_in(tmp_path, buffer_steps=3000)
    with published(config) as publisher:
        for byte in range(3000):
            publish(publisher, byte % 256)
        peer = join(config)
        for _ in range(3):
            assert [number for number, _ in peer.replay(0)] == list(range(3000))


def test_a_peer_that_never_reads_its_answers_costs_little_and_delays_nobody(tmp_path: Path, join: Join) -> None:
    config = config_in(tmp_path, buffer_steps=500)
    with published(config) as publisher:
        for _ in range(500):
            for _ in range(5000):  # 45 kB
                publisher.log.removed(0, b"\xff" * 32)
            publisher.flush()
        deaf, reader = join(config), join(config)
        deaf.asker.setsockopt(zmq.RCVHWM, 1)
        for _ in range(20):
            deaf.asker.send_multipart([b"", bytes(8)])
        for _ in range(2):
            assert [number for number, _ in reader.replay(0)] == list(range(500))
        assert publisher._replayer is not None
        wait_until(lambda: len(publisher._replayer._answers) == 1)
        [(number, end)] = publisher._replayer._answers.values()
        assert number < 200 and end == 500, "more than sockets and marks hold was sent"


def test_as_many_bytes_are_kept_as_may_be(tmp_path: Path, join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_replayer, "MOST_KEPT_BYTES", 1000)
    config = config_in(tmp_path, buffer_steps=500)
    with published(config) as publisher:
        for byte in range(100):
            publish(publisher, byte)
        numbers = [number for number, _ in join(config).replay(0)]
        assert numbers == list(range(numbers[0], 100)) and 80 < numbers[0] < 99


def test_a_subscriber_that_does_not_read_loses_batches_and_stops_nobody(tmp_path: Path, join: Join) -> None:
    config = config_in(tmp_path, hwm=2)
    with published(config) as publisher:
        slow, quick = (join(config) for _ in range(2))
        first = max(joined(publisher, slow), joined(publisher, quick))
        # Far more than sockets, pipes and marks hold: the publisher drops what is too much.
        publisher.log.removed(0, bytes(32))
        large = [bytes(32)] * 20_000
        for _ in range(60):
            for digest in large:
                publisher.log.removed(0, digest)
            publisher.flush()
        numbers = [slow.read()[0]]
        while slow.subscriber.poll(200):
            numbers.append(slow.read()[0])
        assert len([number for number in numbers if number >= first]) < 60, "nothing was lost"
        missed = next(number for number in range(first, first + 60) if number not in numbers)
        assert [number for number, _ in slow.replay(missed)] == list(range(missed, first + 60))


def test_an_endpoint_in_use_is_told_and_leaves_nothing_open(tmp_path: Path) -> None:
    socket = zmq.Context.instance().socket(zmq.PUB)
    port = socket.bind_to_random_port("tcp://*", min_port=20_000, max_port=60_000)
    try:
        config = config_in(tmp_path, endpoint=f"tcp://*:{port - 1}", replay_endpoint=None)
        with pytest.raises(ValueError, match=rf"endpoint tcp://\*:{port} of kv_events_config cannot be used .*in use"):
            open_publishers(config, 2, page_size=2)  # the second replica's
        with published(config):  # the first one's is free again
            pass
    finally:
        socket.close(linger=0)


@pytest.fixture(scope="module")
def telling(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Telling]:
    """An engine of two replicas that tells what they have cached, and somebody who asks each of them."""
    config = config_in(tmp_path_factory.mktemp("kv"))
    with (
        joining() as join,
        one_program(),
        tiny_llm(tiny_checkpoint, mesh="2x1", kv_events_config=str(config), warm_up="background") as llm,
    ):
        yield llm, [join(config, rank) for rank in range(2)]


def events_of(peer: Peer, first: int = 0) -> list[AnyKVEvent]:
    return [event for _, batch in peer.replay(first) for event in batch.events]


def test_an_engine_tells_what_its_requests_leave(telling: Telling, llm: LLM) -> None:
    told, peers = telling
    prompts = [list(range(3, 60)), list(range(20, 80))]
    tokens = greedy_tokens(told, prompts)
    assert tokens == greedy_tokens(llm, prompts), "telling changed the tokens"
    keys = []
    for rank, peer in enumerate(peers):
        assert {batch.data_parallel_rank for _, batch in peer.replay(0)} == {rank}
        events = events_of(peer)
        assert all(isinstance(event, BlockStored) for event in events)
        keys.append([key for event in events for key in event.block_hashes])
    # The KV of the last token is never computed.
    whole = [np.array([*prompt, *output[:-1]], np.int32) for prompt, output in zip(prompts, tokens, strict=True)]
    assert sorted(keys) == sorted(page_keys(one, told.engine.config.page_size) for one in whole)


def test_a_reset_and_a_broken_step_are_told(telling: Telling, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, peers = telling
    llm.engine.reset_prefix_cache()
    assert [events_of(peer)[-1] for peer in peers] == [AllBlocksCleared()] * 2
    counts = [len(peer.replay(0)) for peer in peers]
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.replicas[0].runner, "collect", lambda step: 1 / 0)
        patch.setattr(llm.engine.replicas[1].runner, "collect", lambda step: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            greedy_tokens(llm, [list(range(3, 60))])
    after = [events_of(peer, first) for peer, first in zip(peers, counts, strict=True)]
    assert [events[-1] for events in after] == [AllBlocksCleared()] * 2
    assert any(isinstance(event, BlockStored) for events in after for event in events[:-1])
    assert_idle(llm)


def test_an_aborted_request_is_told_at_once(telling: Telling) -> None:
    llm, peers = telling
    counts = [len(peer.replay(0)) for peer in peers]
    engine = llm.engine
    engine.submit(engine.check("to-abort", list(range(100, 160)), GREEDY))
    while not engine.stats().num_output_tokens or not engine.outputs:
        engine.step()
    for _ in range(40):
        engine.step()
    engine.abort("to-abort")
    told = [
        key
        for peer, first in zip(peers, counts, strict=True)
        for event in events_of(peer, first)
        if isinstance(event, BlockStored)
        for key in event.block_hashes
    ]
    caches = [replica.scheduler.cache for replica in engine.replicas]
    new = {hash_key(digest) for cache in caches for digest in cache.pool._page_of_hash}
    assert set(told) <= new and len(told) > 60 // engine.config.page_size
    while engine.has_work:
        engine.step()


def test_a_port_in_use_is_told_before_the_model_is_loaded() -> None:
    socket = zmq.Context.instance().socket(zmq.PUB)
    port = socket.bind_to_random_port("tcp://*", min_port=20_000, max_port=60_000)
    try:
        with pytest.raises(ValueError, match="cannot be used"):
            LLM("/nowhere", kv_events_config=f'{{"enable_kv_cache_events": true, "endpoint": "tcp://*:{port}"}}')
    finally:
        socket.close(linger=0)
