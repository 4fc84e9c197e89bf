"""Clients that let a server wait, over real sockets. One server suffers all of them at once.

Server and clients share a loop, and its clock stands still while any of them works: `IdleClockLoop`.
"""

import asyncio
import errno
import json
import logging
import os
import socket
from contextlib import ExitStack, suppress

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, StreamingResponse

from jaxvllm.server.config import ServerConfig
from jaxvllm.server.http.connection import ConnectionLimits
from jaxvllm.server.http.http_server import HttpServer
from jaxvllm.server.http.listener import SPARE_FILES, is_open_to_strangers, listen, url_of
from tests.waiting import IdleClockLoop

GET = b"GET /quick HTTP/1.1\r\nhost: x\r\n\r\n"
LIMITS = ConnectionLimits(
    max_connections=40,
    head_seconds=0.5,
    message_seconds=0.5,
    keep_alive_seconds=1,
    write_seconds=1,
    max_head_bytes=1000,
)


async def aiter_of(*parts):
    for part in parts:
        yield part


class App:
    """/quick answers without reading, /late and /slow likewise but later; /body reads.

    /stream has no length, and /endless never stops.
    """

    def __init__(self):
        self.endless_has_ended = asyncio.Event()

    async def __call__(self, scope, receive, send):
        if scope["path"] == "/quick":
            await PlainTextResponse("quick")(scope, receive, send)
        elif scope["path"] == "/slow":
            await asyncio.sleep(2)
            await PlainTextResponse("slow")(scope, receive, send)
        elif scope["path"] == "/late":
            await asyncio.sleep(0.2)
            await PlainTextResponse("late")(scope, receive, send)
        elif scope["path"] == "/stream":
            await StreamingResponse(aiter_of(b"event 1\n", b"", b"event 2\n"))(scope, receive, send)
        elif scope["path"] == "/headers":
            await Request(scope, receive).body()
            await PlainTextResponse(",".join(name.decode() for name, _ in scope["headers"]))(scope, receive, send)
        elif scope["path"] == "/body":
            with suppress(ClientDisconnect):
                await PlainTextResponse(await Request(scope, receive).body())(scope, receive, send)
        else:
            try:
                await StreamingResponse(self.endless())(scope, receive, send)
            finally:
                self.endless_has_ended.set()

    async def endless(self):
        while True:
            yield b"x" * 10_000
            await asyncio.sleep(0)


class Client:
    """A raw connection."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    async def answers(self):
        """Everything until the server closes."""
        said = b""
        async with asyncio.timeout(10):
            with suppress(ConnectionResetError):  # it closed before it read all that was sent
                while part := await self.reader.read(65536):
                    said += part
        return said.decode()

    async def answer(self):
        """One response with its length."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        return (head + await self.reader.readexactly(int(length.split(b":")[1]))).decode()

    async def drip(self, data, seconds=0.1):
        """Sends `data` again and again until the server closes, and returns what that said."""
        reading = asyncio.create_task(self.answers())
        while not reading.done():
            self.writer.write(data)
            await asyncio.sleep(seconds)
        return await reading


async def silent(client):
    assert await client.answers() == ""


async def slow_head(client):
    client.writer.write(GET[:-2] + b"x: ")
    assert_is(await client.drip(b"y"), 408)


async def slow_line(client):
    assert_is(await client.drip(b"G"), 400)  # no such method


async def second_slow_head(client):
    client.writer.write(GET + GET[:10])
    assert "quick" in await client.answer()
    assert_is(await client.drip(b"y"), 408)


async def line_breaks_instead_of_a_request(client):
    client.writer.write(GET)
    assert "quick" in await client.answer()
    assert await client.drip(b"\r\n") == ""


async def idle(client):
    client.writer.write(GET)
    assert "quick" in await client.answer()
    await asyncio.sleep(0.7)  # longer than a head may take, shorter than an idle connection may
    client.writer.write(GET)
    assert "quick" in await client.answer()
    assert await client.answers() == ""


async def slow_body(client):
    client.writer.write(b"POST /body HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n")
    assert await client.drip(b"y") == ""


async def slow_body_that_nobody_reads(client):
    client.writer.write(b"POST /quick HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n")
    assert "quick" in await client.answer()
    assert await client.drip(b"y") == ""


async def late_body_that_nobody_reads(client):
    for _ in range(3):
        client.writer.write(b"POST /quick HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n")
        assert "quick" in await client.answer()
        await asyncio.sleep(0.1)
        client.writer.write(b"hello")
    assert await client.answers() == ""


async def endless_head(client):
    client.writer.write(b"GET / HTTP/1.1\r\n")
    assert_is(await client.drip(b"x: " + b"y" * 200 + b"\r\n", 0.02), 431)


async def endless_trailers(client):
    client.writer.write(b"POST /body HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n")
    assert await client.drip(b"x: " + b"y" * 200 + b"\r\n", 0.02) == ""


async def one_endless_trailer(client):
    client.writer.write(b"POST /body HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nx: ")
    assert await client.drip(b"y" * 200, 0.02) == ""


async def a_trailer_is_no_header(client):
    client.writer.write(b"POST /headers HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n")
    client.writer.write(b"authorization: x\r\n\r\n")
    assert (await client.answer()).endswith("\r\n\r\nhost,transfer-encoding")


async def chunks_of_one_byte(client):
    client.writer.write(b"POST /body HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(20):
        client.writer.write(b"1\r\nx\r\n" * 20)
        await asyncio.sleep(0.005)
    client.writer.write(b"0\r\n\r\n")
    assert "x" * 400 in await client.answer()


async def an_upgrade_in_two_pieces(client):
    client.writer.write(b"POST /body HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nUpg")
    await asyncio.sleep(0.05)
    client.writer.write(b"rade: h2c\r\ncontent-length: 55\r\n\r\n" + GET)
    answer = await client.answers()
    assert_is(answer, 400)
    assert "quick" not in answer


async def not_http(client):
    client.writer.write(b"\x16\x03\x01 hello\r\n\r\n")
    assert_is(await client.answers(), 400)


async def pipelined(client):
    post = b"POST /body HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello"
    client.writer.write(GET + post + GET)
    assert ["quick" in await client.answer(), "hello" in await client.answer()] == [True, True]
    assert (await client.answers()).endswith("quick")


async def pipelined_behind_a_slow_answer(client):
    post = b"POST /body HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhel"
    client.writer.write(GET.replace(b"quick", b"slow") + post)
    assert "slow" in await client.answer()
    client.writer.write(b"lo")
    assert "hello" in await client.answer()


async def pipelined_before_garbage(client):
    post = b"POST /body HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello"
    client.writer.write(GET.replace(b"quick", b"late") + post + GET + b"\x16\x03\x01 hello\r\n\r\n")
    answers = [await client.answer() for _ in range(3)]
    assert [answer.rpartition("\r\n\r\n")[2] for answer in answers] == ["late", "hello", "quick"]
    client.writer.write(GET)  # comes too late: nothing is read after garbage
    assert_is(await client.answers(), 400)


async def pipelined_before_a_body_of_garbage(client):
    post = b"POST /body HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    client.writer.write(GET.replace(b"quick", b"late") + GET + post + b"zz\r\nhello\r\n")
    answers = [await client.answer() for _ in range(2)]
    assert [answer.rpartition("\r\n\r\n")[2] for answer in answers] == ["late", "quick"]
    assert_is(await client.answers(), 400)


async def garbage_behind_a_slow_answer(client):
    client.writer.write(GET.replace(b"quick", b"late"))
    await asyncio.sleep(0.05)
    client.writer.write(b"nonsense\r\n\r\n")
    assert "late" in await client.answer()
    assert_is(await client.answers(), 400)


async def half_a_head_behind_a_slow_answer(client):
    client.writer.write(GET.replace(b"quick", b"slow") + GET[:10])
    assert "slow" in await client.answer()
    assert_is(await client.answers(), 408)


async def garbage_behind_the_last_request(client):
    client.writer.write(GET[:-2] + b"connection: close\r\n\r\nnonsense\r\n\r\n")
    answer = await client.answers()
    assert answer.startswith("HTTP/1.1 200") and answer.endswith("\r\n\r\nquick")


async def streams_to_http_1_0(client):
    client.writer.write(b"GET /stream HTTP/1.0\r\nhost: x\r\nconnection: keep-alive\r\n\r\n")
    head, _, body = (await client.answers()).partition("\r\n\r\n")
    assert "transfer-encoding" not in head and "content-length" not in head and "connection: close" in head
    assert body == "event 1\nevent 2\n"


async def asks_with_http_1_0(client):
    client.writer.write(GET.replace(b"1.1", b"1.0"))
    head, _, body = (await client.answers()).partition("\r\n\r\n")
    assert "content-length: 5" in head and "connection: close" in head and body == "quick"


async def asks_for_a_head_with_http_1_0(client):
    client.writer.write(b"HEAD /stream HTTP/1.0\r\n\r\n")
    head, _, body = (await client.answers()).partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200") and "transfer-encoding" not in head and not body


async def streams_to_http_1_1(client):
    client.writer.write(b"GET /stream HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    head, _, body = (await client.answers()).partition("\r\n\r\n")
    assert "transfer-encoding: chunked" in head and body == "8\r\nevent 1\n\r\n8\r\nevent 2\n\r\n0\r\n\r\n"


async def offers_http_2(client):
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
    client.writer.write(b"POST /body HTTP/1.1\r\nhost: x\r\n" + upgrade + b"content-length: 5\r\n\r\nhello")
    assert "hello" in await client.answer()
    await client.answers()


async def offers_a_websocket(client):
    upgrade = b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-key: x\r\nsec-websocket-version: 13\r\n"
    client.writer.write(GET[:-2] + upgrade + b"\r\n")
    assert "quick" in await client.answer()
    await client.answers()


async def expects_100(client):
    client.writer.write(b"POST /body HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n")
    assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.writer.write(b"hello")
    assert "hello" in await client.answer()


def assert_is(answer, status):
    head, _, body = answer.partition("\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} "), answer
    assert "connection: close" in head
    assert "x-request-id: " in head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


BAD_MANNERS = (
    silent,
    slow_head,
    slow_line,
    second_slow_head,
    line_breaks_instead_of_a_request,
    idle,
    slow_body,
    slow_body_that_nobody_reads,
    late_body_that_nobody_reads,
    endless_head,
    endless_trailers,
    one_endless_trailer,
    a_trailer_is_no_header,
    chunks_of_one_byte,
    an_upgrade_in_two_pieces,
    not_http,
    pipelined,
    pipelined_behind_a_slow_answer,
    pipelined_before_garbage,
    pipelined_before_a_body_of_garbage,
    garbage_behind_a_slow_answer,
    half_a_head_behind_a_slow_answer,
    garbage_behind_the_last_request,
    streams_to_http_1_0,
    asks_with_http_1_0,
    asks_for_a_head_with_http_1_0,
    streams_to_http_1_1,
    offers_http_2,
    offers_a_websocket,
    expects_100,
)


def test_no_client_holds_a_connection_for_long(caplog):
    caplog.set_level(logging.ERROR, "uvicorn.error")  # as `jaxvllm serve` does

    async def run():
        app = App()
        server = HttpServer(app, ServerConfig(port=0), LIMITS)
        listener = listen("127.0.0.1", 0)
        async with server.running(listener):

            async def behave_badly(manners):
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                try:
                    await manners(Client(reader, writer))
                except BaseException as error:
                    error.add_note(manners.__name__)
                    raise
                finally:
                    writer.close()

            async def does_not_read(client):
                client.writer.write(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
                await client.reader.readexactly(100)
                client.writer.transport.pause_reading()
                async with asyncio.timeout(10):
                    await app.endless_has_ended.wait()

            async with asyncio.TaskGroup() as group:
                for manners in (*BAD_MANNERS, does_not_read):
                    group.create_task(behave_badly(manners))
            async with asyncio.timeout(5):
                while server.server_state.connections:
                    await asyncio.sleep(0.1)

    asyncio.run(run(), loop_factory=IdleClockLoop)
    assert not caplog.records, "what a client does wrong fills no log"


async def connect(listener):
    return Client(*await asyncio.open_connection(*listener.getsockname()))


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def test_too_many_requests_at_once():
    """Where every connection has a request, a further one gets 503."""

    async def run():
        listener = listen("127.0.0.1", 0)
        server = HttpServer(App(), ServerConfig(port=0), ConnectionLimits(max_connections=2))
        async with server.running(listener):
            busy = [await connect(listener) for _ in range(2)]
            for client in busy:
                client.writer.write(GET.replace(b"quick", b"slow"))
            await until(lambda: len(server.server_state.tasks) == 2)
            third = await connect(listener)
            third.writer.write(GET)
            refusal = await third.answers()
            assert_is(refusal, 503)
            assert "retry-after" in refusal
            assert ["slow" in await client.answer() for client in busy] == [True, True]
            later = await connect(listener)  # in place of one that is idle now
            later.writer.write(GET)
            assert "quick" in await later.answer()
            for client in (*busy, third, later):
                client.writer.close()

    asyncio.run(run(), loop_factory=IdleClockLoop)


def test_idle_connections_make_room(caplog):
    """The connection that has been idle longest is closed: without a request, or since its last answer."""

    async def run():
        listener = listen("127.0.0.1", 0)
        server = HttpServer(App(), ServerConfig(port=0), ConnectionLimits(max_connections=4))
        async with server.running(listener):
            silent, halfway, kept, busy = clients = [await connect(listener) for _ in range(4)]
            halfway.writer.write(GET[:10])
            busy.writer.write(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
            await busy.reader.readexactly(100)
            kept.writer.write(GET)
            assert "quick" in await kept.answer()
            for idle in (silent, halfway, kept):
                new = await connect(listener)
                clients.append(new)
                new.writer.write(GET)
                assert "quick" in await new.answer()
                assert await idle.answers() == ""
                await until(lambda: len(server.server_state.connections) == 4)
            await busy.reader.readexactly(100)
            for client in clients:
                client.writer.close()

    asyncio.run(run())
    [record] = caplog.records
    assert record.levelname == "WARNING" and "4 connections are open, which is the most" in record.message


def test_the_last_files_are_for_no_connection(caplog):
    """Of a crowd one is accepted in each turn while files get short, and those that would take the last are closed."""
    with ExitStack() as stack:
        listener = stack.enter_context(listen("127.0.0.1", 0))
        clients = [stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(8)]
        highest = max(map(int, os.listdir("/dev/fd")))
        while (filler := stack.enter_context(open("/dev/null", "rb"))).fileno() <= highest:
            pass  # numbers that other tests have left free between others
        listener._max_files = filler.fileno() + 4 + SPARE_FILES
        accepted = []
        for _ in clients:
            with suppress(BlockingIOError):
                connection, _ = listener.accept()
                accepted.append(stack.enter_context(connection))
                with suppress(BlockingIOError):
                    stack.enter_context(listener.accept()[0])
                    raise AssertionError("two in one turn")
        assert len(accepted) == 3
        for connection in accepted:
            connection.send(b"x")
        assert [client.recv(1) for client in clients] == [b"x"] * 3 + [b""] * 5
        stack.enter_context(socket.create_connection(listener.getsockname()))
        accepted.pop().close()
        stack.enter_context(listener.accept()[0])
        with pytest.raises(BlockingIOError):
            listener.accept()
    [record] = caplog.records
    assert record.levelname == "WARNING" and f"all but {SPARE_FILES} of" in record.message


def test_accepting_fails_once_and_not_2048_times(monkeypatch):
    """asyncio tries again as often as connections may wait, but for a socket that says that there is none."""

    def no_files(self):
        raise OSError(errno.ENFILE, "no files")

    with listen("127.0.0.1", 0) as listener:
        monkeypatch.setattr(socket.socket, "accept", no_files)
        for _ in range(2):
            with pytest.raises(OSError, match="no files"):
                listener.accept()
            with pytest.raises(BlockingIOError):
                listener.accept()


def test_a_port_in_use_and_an_unknown_host():
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(
            OSError, match=rf"^cannot listen on 127.0.0.1:{port}: Address already in use; choose another"
        ):
            listen("127.0.0.1", port)
        assert url_of(listener, ServerConfig()) == f"http://127.0.0.1:{port}"
        assert not is_open_to_strangers(listener)
    with listen("0.0.0.0", 0) as listener:
        assert is_open_to_strangers(listener)
    with pytest.raises(OSError, match="^host 'no.such.host.invalid' is not known here"):
        listen("no.such.host.invalid", 0)


def test_a_bad_certificate(tmp_path):
    (tmp_path / "pem").write_text("no certificate")
    pem = str(tmp_path / "pem")
    with pytest.raises(ValueError, match="^ssl_certfile and ssl_keyfile cannot be used: "):
        HttpServer(App(), ServerConfig(ssl_certfile=pem, ssl_keyfile=pem), ConnectionLimits())
