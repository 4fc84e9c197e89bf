"""The same attacks on everything that answers HTTP: the server, and the router before two servers.

Clients, servers and router share a loop, and its clock stands still while any of them works: `IdleClockLoop`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import httpx
import pytest

from jaxvllm.config import EngineConfig
from jaxvllm.router.config import RouterConfig
from jaxvllm.router.proxy import Proxy
from jaxvllm.server.app import create_app
from jaxvllm.server.config import ServerConfig
from jaxvllm.server.http import connection, request_limits
from jaxvllm.server.http.connection import ConnectionLimits
from jaxvllm.server.http.http_door import HttpDoor, guarded
from jaxvllm.server.http.http_server import HttpServer
from jaxvllm.server.http.listener import RESERVED_FILES, listen
from jaxvllm.server.http.request_limits import RequestLimits
from jaxvllm.server.service import Service
from jaxvllm.worker.async_llm import AsyncLLM
from tests.faults.server import read_answer
from tests.router.test_proxy import Server, served
from tests.waiting import IdleClockLoop, until

type Kind = Literal["server", "router"]
# What a valid request gets: the server's engine is never ready in time, and the router's servers answer.
VALID = {"server": 503, "router": 200}
# What a path or a method that does not exist gets: the server answers nothing below /v1/ before its engine is ready.
REFUSED = {status: (status, VALID["server"]) for status in (404, 405)}
BODY = b'{"prompt": "x"}'


@dataclass
class Door:
    """A server or a router, and the port where it listens."""

    kind: Kind
    port: int
    server: HttpServer
    proxy: Proxy | None = None

    async def said(self, data: bytes) -> tuple[int, bytes]:
        """The status and the body that answer `data`, or (0, b"") when the connection is closed without an answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            answer = await read_answer(reader)
        finally:
            writer.close()
        return (0, b"") if answer is None else (answer.status, answer.body)


@asynccontextmanager
async def opened(kind: Kind, **options: Any) -> AsyncIterator[Door]:
    async with AsyncExitStack() as stack:
        if kind == "server":
            config = ServerConfig(port=0, **{"request_timeout": 30, **options})
            door = stack.enter_context(HttpDoor.opened(config))
            server = door.server(create_app(Service(AsyncLLM.from_config(EngineConfig()), config)))
            proxy = None
        else:
            behind = [await stack.enter_async_context(served(Server(n).app(), listen("127.0.0.1", 0))) for n in "pd"]
            to = RouterConfig(prefill=(behind[0],), decode=(behind[1],), port=0, probe_seconds=1000, **options)
            door = stack.enter_context(HttpDoor.opened(to))
            proxy = Proxy(to)
            await stack.enter_async_context(proxy.running())
            server = door.server(proxy.app)
        await stack.enter_async_context(server.running(door.listener))
        yield Door(kind, door.listener.getsockname()[1], server, proxy)


def post(body: bytes = BODY, more: bytes = b"", path: bytes = b"/v1/completions", host: bytes = b"localhost") -> bytes:
    """A request with a body, and its connection's last."""
    head = b"POST %s HTTP/1.1\r\nhost: %s\r\nconnection: close\r\n" % (path, host)
    if b"content-type" not in more:
        head += b"content-type: application/json\r\n"
    return head + more + b"content-length: %d\r\n\r\n" % len(body) + body


@dataclass(frozen=True)
class Attack:
    """Bytes, and the statuses that may answer them; 0 is the end of the connection without an answer."""

    name: str
    data: bytes
    status: tuple[int, ...]

    async def __call__(self, door: Door) -> None:
        status, body = await door.said(self.data)
        assert status in self.status, (status, body[:200])
        assert b"Traceback" not in body


def attack(name: str, data: bytes, *status: int) -> Attack:
    return Attack(name, data, status)


async def closes(door: Door, data: bytes) -> None:
    """A client that sends `data` and waits until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    try:
        writer.write(data)
        async with asyncio.timeout(200):
            await reader.read()
    finally:
        writer.close()


async def silent(door: Door) -> None:
    await closes(door, b"")


async def idle_after_an_answer(door: Door) -> None:
    await closes(door, post().replace(b"connection: close\r\n", b""))


QUICK = [
    attack("a valid request", post(), *VALID.values()),
    attack("a name that a page has pointed here", post(host=b"evil.example"), 403),
    attack("the address of another network", post(host=b"10.0.0.1:80"), 403),
    attack("no Host", post().replace(b"host: localhost\r\n", b""), 400),
    attack("two Hosts", post(more=b"host: evil.example\r\n"), 400),
    attack("two keys", post(more=b"authorization: Bearer a\r\nauthorization: Bearer b\r\n"), 400),
    attack("10,000 headers", post(more=b"x-a: a\r\n" * 10_000), 431),
    attack("an endless header", post(more=b"x-a: " + b"a" * 100_000 + b"\r\n"), 431),
    attack("an endless path", post(path=b"/" + b"a" * 100_000), 400, 431),
    attack("no HTTP", b"\x16\x03\x01 hello\r\n\r\n", 400),
    attack("two content lengths", post(more=b"content-length: 1\r\n"), 400),
    attack("a length of 15 digits", post().replace(b"content-length: 15", b"content-length: 9" + b"9" * 14), 413),
    attack("a coding beside chunked", post(more=b"transfer-encoding: gzip, chunked\r\n"), 400),
    attack("a body that is too large", post(b'"' + b"x" * 30_000 + b'"'), 413),
    attack("lists nested 9,000 deep", post(b"[" * 9000), 400),
    attack("objects nested 900 deep", post(b'{"a":' * 900 + b"1" + b"}" * 900), 400),
    attack("NaN", post(b'{"temperature": NaN}'), 400),
    attack("half a surrogate pair", post(b'{"prompt": "\\ud83d"}'), 400),
    attack("text as content type", post(more=b"content-type: text/plain\r\n"), 415),
    attack("a compressed body", post(more=b"content-encoding: gzip\r\n"), 415),
    attack("a header that is no ASCII", post(more="x-a: café\r\n".encode("latin-1")), *VALID.values()),
    attack("a header in UTF-8", post(more="x-a: 東京\r\n".encode()), *VALID.values()),
    attack("a control character in a header", post(more=b"x-a: a\x01b\r\n"), 400),
    attack("a header that Connection names", post(more=b"connection: x-a\r\nx-a: a\r\n"), *VALID.values()),
    attack("line breaks in a path", post(path=b"/v1/a%0d%0ahost:%20evil"), *REFUSED[404], 200),
    attack("a path that leaves its folder", post(path=b"/../../%2e%2e/etc/passwd"), 404, 200),
    attack("a path that is another host", post(path=b"//evil.example/v1"), 404, 200),
    attack("an X-Request-Id with a line break", post(more=b"x-request-id: a%0d%0ab c\r\n"), *VALID.values()),
    attack("a method that nobody has", post().replace(b"POST", b"BREW"), 400),
    attack("a method for other servers", post().replace(b"POST", b"PUT"), *REFUSED[405]),
]
SLOW = [
    attack("half a head", post()[:30], 408),
    attack("half a body", post()[:-5], 408),
    silent,
    idle_after_an_answer,
]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test(), loop_factory=IdleClockLoop)  # type: ignore[arg-type]


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has doors wait for seconds, not for a minute: each tenth of a second of three servers costs 15 ms."""
    limits = partial(ConnectionLimits, head_seconds=1, message_seconds=3, keep_alive_seconds=2)
    monkeypatch.setattr(connection, "ConnectionLimits", limits)
    monkeypatch.setattr(request_limits, "RequestLimits", partial(RequestLimits, body_seconds=2))


@pytest.mark.usefixtures("short_times")
@pytest.mark.parametrize("kind", ["server", "router"])
def test_attacks_cost_nobody_anything(kind: Kind) -> None:
    """They come all at once, and each has its answer. Afterwards all is as before."""

    async def test() -> None:
        async with opened(kind, max_body_bytes=20_000) as door:

            async def suffer(one: Callable[[Door], Awaitable[None]]) -> None:
                try:
                    await one(door)
                except BaseException as error:
                    error.add_note(str(getattr(one, "name", one)))
                    raise

            async with asyncio.TaskGroup() as group:
                for one in (*QUICK, *SLOW):
                    group.create_task(suffer(one))
            await until(lambda: not door.server.server_state.connections)
            assert (await door.said(post()))[0] == VALID[kind]
            if door.proxy is not None:
                assert door.proxy._prefill is not None
                for upstream in (*door.proxy._main.upstreams, *door.proxy._prefill.upstreams):
                    assert upstream.is_ready and not upstream.num_failed and not upstream.num_running, upstream.name
                assert not door.proxy.num_open

    run(test)


@pytest.mark.parametrize("kind", ["server", "router"])
def test_keys_are_asked_for(kind: Kind) -> None:
    async def test() -> None:
        async with opened(kind, api_key=("its-key",), allowed_origins=("https://app.example",)) as door:
            asked = {
                401: [post(), post(more=b"authorization: Bearer wrong\r\n"), post(path=b"/metrics")],
                VALID[kind]: [
                    post(more=b"authorization: Bearer its-key\r\n"),
                    post(more=b"x-api-key: its-key\r\n", host=b"evil.example"),
                ],
            }
            for status, requests in asked.items():
                for one in requests:
                    assert (await door.said(one))[0] == status, one
            head = b"OPTIONS /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            asks = b"origin: https://app.example\r\naccess-control-request-method: POST\r\n\r\n"
            assert (await door.said(head + asks))[0] == 200, "a page of that origin may ask"

    run(test)


@pytest.mark.parametrize("data", [b"a\x0bb", b"a\x0cb"], ids=repr)
def test_what_no_server_can_be_sent_is_the_clients_fault(data: bytes) -> None:
    """llhttp refuses such bytes in a request, and another parser may not."""

    async def test() -> None:
        async with opened("router") as door:
            assert door.proxy is not None and door.proxy._prefill is not None
            app = guarded(door.proxy.app, door.proxy.config, ())
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
                answer = await client.post("/v1/completions", json={"prompt": "x"}, headers={"x-a": data})
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
            for upstream in (*door.proxy._main.upstreams, *door.proxy._prefill.upstreams):
                assert upstream.is_ready and not upstream.num_failed

    run(test)


def test_a_proxy_has_files_for_both_connections_of_each_client() -> None:
    config = RouterConfig(backend=("http://127.0.0.1:1",), port=0)
    with HttpDoor.opened(config) as door:
        few = replace(door, max_files=RESERVED_FILES + 100)
        limits = [few.server(Proxy(config).app, files_each=each).server_state.limits for each in (1, 2)]
    assert [one.max_connections for one in limits] == [100, 50]
