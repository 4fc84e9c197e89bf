"""HTTP/1.1 responses, and connections that are used again."""

import asyncio

import pytest

from jaxvllm.bench.http_client import ConnectionPool, ResponseReader
from tests.waiting import IdleClockLoop

CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX: y\r\n\r\n"
    b"5\r\nhello\r\n1;ext=1\r\n \r\nA\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n"
)
SIZED = b"HTTP/1.1 404 Not Found\r\ncontent-length: 5\r\nConnection: close\r\n\r\nnever"
EMPTY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.0 200 OK\r\n\r\nall of it"


@pytest.mark.parametrize(
    ("response", "status", "body", "reusable"),
    [
        (CHUNKED, 200, b"hello 0123456789", True),
        (SIZED, 404, b"never", False),
        (EMPTY, 200, b"", True),
        (UNTIL_CLOSE, 200, b"all of it", False),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_response_does_not_depend_on_how_it_was_cut(response, status, body, reusable, size):
    reader = ResponseReader()
    pieces = []
    for at in range(0, len(response), size):
        assert not reader.done, "done before the end"
        pieces.append(reader.feed(response[at : at + size]))
    if response is UNTIL_CLOSE:
        reader.end()
    assert reader.done
    assert (reader.status, b"".join(pieces), reader.reusable) == (status, body, reusable)


@pytest.mark.parametrize("response", [b"", b"HTTP/1.1 200", CHUNKED[:-2], SIZED[:-1]])
def test_a_response_that_broke_off_is_an_error(response):
    reader = ResponseReader()
    reader.feed(response)
    with pytest.raises(ValueError):
        reader.end()


def test_what_is_not_http_is_an_error():
    with pytest.raises(ValueError, match="does not speak HTTP/1"):
        ResponseReader().feed(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")


class Heard:
    def __init__(self):
        self.body = b""

    def receive(self, status, data, now):
        self.body += data


class Peer:
    """A server that answers with given bytes, one answer a request, and closes after those that are None."""

    def __init__(self, *answers):
        self._answers = list(answers)
        self.num_connections = 0

    async def __call__(self, reader, writer):
        self.num_connections += 1
        while await reader.read(1000):
            answer = self._answers.pop(0)
            if answer is None:
                break
            writer.write(answer)
            if answer in (UNTIL_CLOSE, CHUNKED[:-9]):
                break
        writer.close()

    async def ask(self, times):
        async with await asyncio.start_server(self, "127.0.0.1", 0) as server:
            pool = ConnectionPool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            bodies = []
            for _ in range(times):
                heard = Heard()
                await pool.exchange(b"request", heard)
                bodies.append(heard.body)
                await asyncio.sleep(0.01)  # for a connection that is being closed
            pool.close()
            return bodies


def test_connections_are_used_again_unless_they_were_closed():
    peer = Peer(CHUNKED, EMPTY, CHUNKED, SIZED, CHUNKED, UNTIL_CLOSE, EMPTY)
    hello, never, all_of_it = b"hello 0123456789", b"never", b"all of it"
    assert asyncio.run(peer.ask(7), loop_factory=IdleClockLoop) == [hello, b"", hello, never, hello, all_of_it, b""]
    assert peer.num_connections == 3


def test_a_used_connection_that_is_closed_before_an_answer_is_replaced():
    peer = Peer(CHUNKED, None, CHUNKED)
    assert len(asyncio.run(peer.ask(2), loop_factory=IdleClockLoop)) == 2
    assert peer.num_connections == 2


@pytest.mark.parametrize("answers", [[None], [CHUNKED, CHUNKED[:-9]], [b"nonsense\r\n\r\n"]])
def test_what_failed_on_a_new_connection_or_in_part_is_not_asked_again(answers):
    peer = Peer(*answers, CHUNKED)
    with pytest.raises((ConnectionError, ValueError)):
        asyncio.run(peer.ask(len(answers)), loop_factory=IdleClockLoop)
    assert peer.num_connections == 1
