"""Pages cross between engines. A peer that dies, stalls or lies costs time and nothing else, and holds end."""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zmq

from jaxvllm.core.kv_transfer_config import KVTransferConfig
from jaxvllm.core.request import GenerationRequest, Prompt, QueueKey, Request
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.engine.page_exchange import make_connector
from jaxvllm.kv_transfer import peer_connector, transports
from jaxvllm.kv_transfer.page_format import Page, PageArray, PageFormat
from jaxvllm.kv_transfer.page_memory import PageMemory
from jaxvllm.kv_transfer.page_server import PageServer
from jaxvllm.kv_transfer.peer_connector import PeerConnector, PeerOptions
from jaxvllm.kv_transfer.peer_messages import ANSWERS_AHEAD, PAGES_PER_ANSWER, Pages, Want, decode_message, encode
from jaxvllm.kv_transfer.tickets import Ticket
from jaxvllm.kv_transfer.transports import TcpTransport
from jaxvllm.server.http.listener import listen
from tests.kv_transfer.conftest import NAME, assert_same, some_page
from tests.waiting import PATIENCE, wait_until

SECRET = "the secret of this test"
OPTIONS = PeerOptions("engine", SECRET, silence_seconds=0.5)
NUM_PAGES = 37  # more than two answers


def asked(params: dict[str, Any] | None, num_tokens: int = 4 * NUM_PAGES + 1) -> Request:
    prompt = Prompt(None, np.arange(num_tokens, dtype=np.int32))
    request = GenerationRequest("r", prompt, SamplingParams(max_tokens=1), kv_transfer_params=params)
    return Request(request, 0, (), num_tokens + 1, QueueKey(0, 0))


def hashes_of(request: Request) -> list[bytes]:
    return request.hashes(4)[:NUM_PAGES]


@pytest.fixture
def connect(form: PageFormat) -> Iterator[Callable[..., PeerConnector]]:
    made: list[PeerConnector] = []

    def make(options: PeerOptions = OPTIONS, of: PageFormat = form, memory: PageMemory | None = None) -> PeerConnector:
        kept = PageMemory(1 << 30) if memory is None else memory
        made.append(PeerConnector(options, kept, of.page_size, TcpTransport(of)))
        return made[-1]

    yield make
    for connector in made:
        connector.close()


def offered(producer: PeerConnector, form: PageFormat, count: int = NUM_PAGES) -> dict[str, Any]:
    """What the answer of a producer says, which has `count` of the pages."""
    request = asked({"do_remote_decode": True})
    hashes = hashes_of(request)
    params = producer.finished(request, hashes)
    for number, digest in enumerate(hashes[:count]):
        assert producer.wants(request, digest)
        producer.save(digest, some_page(form, number))
    assert params is not None
    return dict(params)


def fetched(consumer: PeerConnector, params: dict[str, Any], first: int = 0) -> list[Page]:
    request = asked(params)
    wanted = hashes_of(request)[first:]
    count = consumer.num_pages(request, wanted)
    return list(consumer.load(request, wanted[:count]).result(timeout=20)) if count else []


def test_replicas_of_a_host_listen_at_ports_of_their_own(form: PageFormat) -> None:
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    extra = {"secret": SECRET}
    config = KVTransferConfig("peer", kv_port=port - 1, kv_connector_extra_config=extra)
    connector = make_connector(config, form, (), rank=1)
    assert isinstance(connector, PeerConnector)
    try:
        assert connector.server.port == port
    finally:
        connector.close()


def test_a_port_that_can_end_the_engine_is_open_to_others_with_a_warning(
    form: PageFormat, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transports, "DeviceTransport", lambda form, like, host: TcpTransport(form))
    monkeypatch.setattr(peer_connector, "PeerConnector", lambda *_: None)
    extra = {"secret": SECRET, "transport": "device"}
    for address in ("127.0.0.1", "127.1.2.3", "localhost", "::1", "10.0.0.7", "127.0.0.1.example", "host"):
        caplog.clear()
        make_connector(KVTransferConfig("peer", kv_ip=address, kv_connector_extra_config=extra), form, ())
        is_local = address in ("127.0.0.1", "127.1.2.3", "localhost", "::1")
        assert ("can end this engine" in caplog.text) == (not is_local)


def test_pages_arrive_as_they_were(connect: Callable[..., PeerConnector], form: PageFormat) -> None:
    producer, consumer = connect(), connect()
    params = offered(producer, form)
    pages = fetched(consumer, params, first=2)
    assert len(pages) == NUM_PAGES - 2
    for number, page in enumerate(pages, 2):
        assert_same(page, some_page(form, number))
    wait_until(lambda: not producer.server._offers, lambda: "the pages are still held")


def test_the_page_server_serves_on_after_a_piece_of_work_that_fails(
    connect: Callable[..., PeerConnector],
    form: PageFormat,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = PageMemory(1 << 30)
    producer, consumer = connect(memory=memory), connect()

    def fails(digests: Iterable[bytes]) -> None:
        raise KeyError("of this test")

    with monkeypatch.context() as patch:
        patch.setattr(memory, "let_go", fails)
        producer.server.offer("expired", "", (), seconds=0.0)
        wait_until(lambda: "of this test" in caplog.text)
    assert len(fetched(consumer, offered(producer, form))) == NUM_PAGES


def test_pages_that_are_still_to_come_are_waited_for(connect: Callable[..., PeerConnector], form: PageFormat) -> None:
    producer, consumer = connect(), connect(replace(OPTIONS, silence_seconds=10))
    request = asked({"do_remote_decode": True})
    params = producer.finished(request, hashes_of(request))
    with ThreadPoolExecutor(1) as threads:
        future: Future[list[Page]] = threads.submit(fetched, consumer, dict(params or {}))
        for number, digest in enumerate(hashes_of(request)):
            producer.save(digest, some_page(form, number))
        assert len(future.result()) == NUM_PAGES


@pytest.mark.parametrize(
    "forged",
    [
        {"remote_host": "10.1.2.3"},
        {"remote_port": 1},
        {"remote_request_id": "0" * 32},
        {"remote_num_tokens": 4},
        {"signature": "0" * 64},
        {"signature": None},
        {"signature": "é"},
        {"remote_port": "1"},
        {"remote_port": True},
        {"remote_prompt": "0" * 64},
        {"remote_expires": 1 << 40},
    ],
    ids=str,
)
def test_a_ticket_that_was_changed_is_not_followed(
    connect: Callable[..., PeerConnector], form: PageFormat, forged: dict[str, Any]
) -> None:
    producer, consumer = connect(), connect()
    assert fetched(consumer, offered(producer, form) | forged) == []
    assert len(producer.server._offers) == 1


def test_a_ticket_of_others_with_another_secret_is_not_followed(
    connect: Callable[..., PeerConnector], form: PageFormat
) -> None:
    producer, consumer = connect(replace(OPTIONS, secret="another secret than this one")), connect()
    assert fetched(consumer, offered(producer, form)) == []


def test_another_model_gets_no_pages(connect: Callable[..., PeerConnector], form: PageFormat) -> None:
    producer, consumer = connect(), connect(of=replace(form, model="another"))
    assert fetched(consumer, offered(producer, form)) == []


def test_pages_of_which_nothing_came_of_end_with_their_deadline(
    connect: Callable[..., PeerConnector], form: PageFormat
) -> None:
    memory = PageMemory(0)
    producer = connect(replace(OPTIONS, hold_seconds=0.3), memory=memory)
    offered(producer, form)
    wait_until(lambda: not producer.server._offers, lambda: "the pages are still held")
    assert len(memory) == 0


def test_a_memory_full_of_held_pages_offers_no_more(connect: Callable[..., PeerConnector], form: PageFormat) -> None:
    producer = connect(memory=PageMemory(1))
    offered(producer, form)
    request = asked({"do_remote_decode": True})
    assert producer.finished(request, hashes_of(request)) is None


def test_a_request_of_nobody_else_is_neither_offered_nor_saved(connect: Callable[..., PeerConnector]) -> None:
    connector = connect()
    for params in (None, {}, {"do_remote_decode": False, "do_remote_prefill": False}):
        request = asked(params)
        assert connector.finished(request, hashes_of(request)) is None
        assert not connector.wants(request, hashes_of(request)[0])
        assert connector.num_pages(request, hashes_of(request)) == 0


def test_a_dead_peer_costs_its_silence(connect: Callable[..., PeerConnector], form: PageFormat) -> None:
    producer, consumer = PeerConnector(OPTIONS, PageMemory(1 << 30), 4, TcpTransport(form)), connect()
    params = offered(producer, form)
    producer.close()
    assert fetched(consumer, params) == []


def test_a_dead_peer_delays_nobody_who_asks_another(connect: Callable[..., PeerConnector], form: PageFormat) -> None:
    """It accepts connections and never answers, and its silence is longer than this test."""
    producer, consumer = connect(), connect(replace(OPTIONS, silence_seconds=PATIENCE))
    honest = offered(producer, form)
    with listen("127.0.0.1", 0) as dead:
        ticket = replace(Ticket.read(honest), remote_port=dead.getsockname()[1])
        request = asked(ticket.signed(SECRET))
        stuck = [consumer.load(request, hashes_of(request)) for _ in range(80)]
        assert len(fetched(consumer, honest)) == NUM_PAGES
        assert not any(future.done() for future in stuck)
        consumer.close()  # waits for no silence
        assert all(list(future.result()) == [] for future in stuck)


def test_a_peer_that_was_silent_is_not_asked_again_at_once(
    connect: Callable[..., PeerConnector], form: PageFormat
) -> None:
    producer, consumer = connect(), connect(replace(OPTIONS, silence_seconds=0.1))
    params = offered(producer, form)
    with listen("127.0.0.1", 0) as dead:
        request = asked(replace(Ticket.read(params), remote_port=dead.getsockname()[1]).signed(SECRET))
        consumer._fetches._pause_seconds = PATIENCE
        assert consumer.num_pages(request, hashes_of(request)) == NUM_PAGES
        assert list(consumer.load(request, hashes_of(request)).result()) == []
        assert consumer.num_pages(request, hashes_of(request)) == 0
        assert consumer.load(request, hashes_of(request)).done()
    assert len(fetched(consumer, params)) == NUM_PAGES  # others are


def test_a_ticket_that_has_expired_is_not_followed(connect: Callable[..., PeerConnector], form: PageFormat) -> None:
    producer, consumer = connect(), connect()
    ticket = replace(Ticket.read(offered(producer, form)), remote_expires=int(time.time()) - 1)
    request = asked(ticket.signed(SECRET))
    assert consumer.num_pages(request, hashes_of(request)) == 0
    assert consumer.load(request, hashes_of(request)).done()  # where it expired between the two
    assert len(producer.server._offers) == 1


def ask(
    socket: "zmq.Socket[bytes]", params: dict[str, Any], hashes: list[bytes], form: PageFormat, number: int
) -> None:
    ticket = Ticket.read(params)
    socket.send(encode(Want(number, ticket.remote_request_id, params["signature"], form.fingerprint, hashes)))


def test_a_peer_that_never_reads_makes_little_wait_for_it() -> None:
    """It asks as often as it likes. Others are answered meanwhile, and its connection ends."""
    form = PageFormat("large pages", (PageArray(2, 8, 64, 64, np.dtype(np.float32)),))
    memory, page = PageMemory(1 << 30), some_page(form, 0)
    hashes = hashes_of(asked(None))[:PAGES_PER_ANSWER]
    for digest in hashes:
        memory.put(digest, page)
    server = PageServer(memory, TcpTransport(form), "127.0.0.1", 0, unread_seconds=0.1)
    unread: list[tuple[bytes, zmq.MessageTracker, int]] = []  # all answers with pages, as they were handed to ZeroMQ
    most, add = [0], server._unread.add

    def count(receiver: bytes, tracker: zmq.MessageTracker, size: int) -> None:
        add(receiver, tracker, size)
        unread.append((receiver, tracker, size))
        most.append(sum(one[0] == receiver and not one[1].done for one in unread))

    server._unread.add = count  # type: ignore[method-assign]
    with zmq.Context() as context, context.socket(zmq.DEALER) as deaf, context.socket(zmq.DEALER) as honest:
        for socket in (deaf, honest):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE))
        deaf.setsockopt(zmq.RCVHWM, 1)
        deaf.setsockopt(zmq.RCVBUF, 4096)
        for socket in (deaf, honest):
            socket.connect(f"tcp://127.0.0.1:{server.port}")
        for number in range(20):  # 4 MB each
            server.offer(str(number), "signature", hashes, PATIENCE)
            deaf.send(encode(Want(number, str(number), "signature", form.fingerprint, hashes)))
        wait_until(lambda: len(unread) >= ANSWERS_AHEAD)
        server.offer("honest", "signature", hashes, PATIENCE)
        honest.send(encode(Want(0, "honest", "signature", form.fingerprint, hashes)))
        assert len(honest.recv_multipart()) == 1 + len(hashes)
        assert max(most) == ANSWERS_AHEAD
        wait_until(lambda: all(tracker.done for _, tracker, _ in unread))  # though nobody has read them
    server.close()


def test_pages_are_not_given_again_and_again(connect: Callable[..., PeerConnector], form: PageFormat) -> None:
    """jax cannot take back what was given from device to device and not pulled."""
    producer = connect()
    params, hashes = offered(producer, form), hashes_of(asked(None))[:PAGES_PER_ANSWER]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://127.0.0.1:{producer.server.port}")
        got = []
        for number in range(9):
            ask(socket, params, hashes, form, number)
            got.append(len(socket.recv_multipart()) - 1)
    assert got == [len(hashes)] * 4 + [0] * 5  # 64 of 2 x 37


def test_what_is_no_question_disturbs_nobody(connect: Callable[..., PeerConnector], form: PageFormat) -> None:
    producer, consumer = connect(), connect()
    params = offered(producer, form)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://127.0.0.1:{producer.server.port}")
        for frames in ([b""], [b"\xc1"], [b"a", b"b"], [b"\x93" + b"\xff" * 40], [b"x" * (1 << 17)]):
            socket.send_multipart(frames)
        time.sleep(0.05)
    assert len(fetched(consumer, params)) == NUM_PAGES


# What a liar answers to the question `number` of which `count` pages are wanted.
type Lie = Callable[[PageFormat, int, int], list[bytes]]
LIES: dict[str, Lie] = {
    "silence": lambda form, number, count: [],
    "no answer at all": lambda form, number, count: [b"\xc1"],
    "pages of another model": lambda form, number, count: [
        encode(Pages(number)),
        *[replace(form, model="x").encode(NAME, some_page(form, 0))] * count,
    ],
    "pages of other names": lambda form, number, count: [
        encode(Pages(number)),
        *[form.encode(NAME, some_page(form, 0))] * count,
    ],
    "pages that are too short": lambda form, number, count: [
        encode(Pages(number)),
        *[form.encode(NAME, some_page(form, 0))[:-1]] * count,
    ],
    "pages that are too long": lambda form, number, count: [encode(Pages(number)), *[b"x" * (1 << 20)] * count],
    "too many pages": lambda form, number, count: [
        encode(Pages(number)),
        *[form.encode(NAME, some_page(form, 0))] * (count + 1),
    ],
    "another number for ever": lambda form, number, count: [encode(Pages(number + 100))],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_peer_that_lies_is_not_believed(connect: Callable[..., PeerConnector], form: PageFormat, lie: str) -> None:
    producer, consumer = connect(), connect()
    request = asked({"do_remote_decode": True})
    true = producer.finished(request, hashes_of(request))
    assert true is not None
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        # It has the secret, too: nobody else is asked at all.
        ticket = replace(Ticket.read(true), remote_port=port)
        with ThreadPoolExecutor(1) as threads:
            future = threads.submit(fetched, consumer, ticket.signed(SECRET))
            while not future.done():
                if socket.poll(50):
                    sender, data = socket.recv_multipart()
                    message = decode_message(data)
                    if hasattr(message, "hashes"):
                        if frames := LIES[lie](form, message.number, len(message.hashes)):
                            socket.send_multipart([sender, *frames])
            assert future.result() == []
