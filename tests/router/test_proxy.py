"""The router before servers that answer, refuse, stall and end: no request is lost that another server could answer."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jaxvllm.router.config import RouterConfig
from jaxvllm.router.proxy import Proxy
from jaxvllm.server.http.http_door import HttpDoor
from jaxvllm.server.http.listener import listen
from tests.waiting import until

TICKET = {"do_remote_prefill": True, "signature": "signed"}
BODY = {"prompt": "Hello", "max_tokens": 3, "temperature": 0.5}


@dataclass
class Server:
    """A server that says what it was asked, and behaves as `mode` says."""

    name: str
    mode: str = "answers"
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    is_left: bool = False  # whether a client went away while it waited

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/ready", self._ready), Route("/{path:path}", self._answer, methods=["POST"])])

    async def _ready(self, request: Request) -> Response:
        return Response(status_code=503 if self.mode == "starts" else 200)

    async def _answer(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.asked.append(body)
        self.headers.append(dict(request.headers))
        if self.mode == "starts":
            return JSONResponse({"error": {"message": "starting"}}, 503)
        if self.mode == "refuses":
            return JSONResponse({"error": {"message": "no such field"}}, 400)
        if self.mode == "stalls":
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.is_left = True
                raise
        if body.get("stream"):
            return StreamingResponse(self._events(), media_type="text/event-stream")
        answer: dict[str, Any] = {"from": self.name}
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            answer["kv_transfer_params"] = TICKET
        if self.mode == "breaks":
            return StreamingResponse(self._events(), media_type="application/json")
        response = JSONResponse(answer, headers={"set-cookie": "a=1", "connection": "x-of-hop", "x-of-hop": "1"})
        response.headers.append("set-cookie", "b=2")
        return response

    async def _events(self) -> AsyncIterator[bytes]:
        yield f'data: {{"from": "{self.name}"}}\n\n'.encode()
        if self.mode == "breaks":
            raise ConnectionResetError  # uvicorn closes the connection
        yield b"data: [DONE]\n\n"


@asynccontextmanager
async def served(app: Any, sock: socket.socket) -> AsyncIterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=0))
    with sock:
        serving = asyncio.create_task(server.serve([sock]))
        try:
            await until(lambda: server.started)
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


@asynccontextmanager
async def router(
    *,
    backend: tuple[Server, ...] = (),
    prefill: tuple[Server, ...] = (),
    decode: tuple[Server, ...] = (),
    **options: Any,
) -> AsyncIterator[tuple[httpx.AsyncClient, Proxy]]:
    """A client of a router before these servers. A server whose mode is "gone" does not listen."""
    async with AsyncExitStack() as stack:
        for server in (*backend, *prefill, *decode):
            if server.mode == "gone":
                with listen("127.0.0.1", 0) as sock:
                    server.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            else:
                server.url = await stack.enter_async_context(served(server.app(), listen("127.0.0.1", 0)))
        urls = {"backend": backend, "prefill": prefill, "decode": decode}
        given = {name: tuple(server.url for server in servers) for name, servers in urls.items()}
        # Whether a server is ready is seen once, when the router starts, so that no test waits for a probe.
        config = RouterConfig(**given, **{"probe_seconds": 1000.0, "port": 0} | options)
        proxy = Proxy(config)
        door = stack.enter_context(HttpDoor.opened(config))
        await stack.enter_async_context(proxy.running())
        await stack.enter_async_context(door.server(proxy.app).running(door.listener))
        yield await stack.enter_async_context(httpx.AsyncClient(base_url=door.url, timeout=60)), proxy


def run(test: Callable[[], Any]) -> None:
    asyncio.run(test())


def test_requests_go_round_and_keep_their_bodies_and_headers() -> None:
    async def test() -> None:
        servers = Server("a"), Server("b")
        async with router(backend=servers) as (client, _):
            answers = [
                await client.post("/v1/completions", json=BODY, headers={"authorization": "Bearer k"}) for _ in range(4)
            ]
            assert [answer.json()["from"] for answer in answers] == ["a", "b", "a", "b"]
            assert servers[0].asked == [BODY, BODY]
            assert servers[0].headers[0]["authorization"] == "Bearer k"
            assert len(servers[0].headers[0]["x-request-id"]) >= 9

    run(test)


def test_a_session_stays_with_its_server() -> None:
    async def test() -> None:
        servers = Server("a"), Server("b"), Server("c")
        async with router(backend=servers, routing_policy="session") as (client, _):
            for session in "xyz":
                headers = {"x-session-id": session}
                answers = [await client.post("/v1/completions", json=BODY, headers=headers) for _ in range(3)]
                assert len({answer.json()["from"] for answer in answers}) == 1

    run(test)


@pytest.mark.parametrize("mode", ["gone", "starts"])
def test_another_server_takes_over_before_an_answer_begins(mode: str) -> None:
    async def test() -> None:
        servers = Server("a", mode), Server("b")
        async with router(backend=servers) as (client, _):
            for _ in range(3):
                assert (await client.post("/v1/completions", json=BODY)).json() == {"from": "b"}
            assert (await client.get("/health")).status_code == 200

    run(test)


def test_without_any_server_the_answer_says_so() -> None:
    async def test() -> None:
        async with router(backend=(Server("a", "gone"),)) as (client, _):
            assert (await client.get("/health")).status_code == 503, "nobody has said that the server is ready"
            answer = await client.post("/v1/completions", json=BODY)
            assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")
            assert (await client.get("/health")).status_code == 503
            assert (await client.get("/live")).status_code == 200

    run(test)


def test_a_stream_whose_server_ends_says_so_and_is_not_complete() -> None:
    async def test() -> None:
        async with router(backend=(Server("a", "breaks"),)) as (client, _):
            answer = await client.post("/v1/completions", json=BODY | {"stream": True})
            first, last = answer.text.split("\n\n")[:2]
            assert first == 'data: {"from": "a"}'
            assert "has ended" in json.loads(last.removeprefix("data: "))["error"]["message"]
            assert "[DONE]" not in answer.text
            assert 'jaxvllm_router_answers_total{outcome="broken"} 1.0' in (await client.get("/metrics")).text

    run(test)


def test_an_answer_that_is_cut_is_not_taken_for_a_whole_one() -> None:
    async def test() -> None:
        async with router(backend=(Server("a", "breaks"),)) as (client, _):
            with pytest.raises(httpx.RemoteProtocolError):
                await client.post("/v1/completions", json=BODY)

    run(test)


def test_headers_are_passed_on_but_not_those_of_a_connection_or_of_others() -> None:
    async def test() -> None:
        server = Server("a")
        async with router(backend=(server,)) as (client, _):
            url = str(client.base_url)
            for _ in range(2):  # the second client must not have what the first one was given
                async with httpx.AsyncClient(base_url=url, timeout=60) as one:
                    headers = {"accept-encoding": "identity", "connection": "x-of-hop", "x-of-hop": "1", "x-a": "1"}
                    answer = await one.post("/v1/completions", json=BODY, headers=headers)
                assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
                assert "x-of-hop" not in answer.headers
                assert len(answer.headers.get_list("x-request-id")) == 1
            for seen in server.headers:
                assert seen["x-a"] == "1" and seen["accept-encoding"] == "identity"
                assert not seen.keys() & {"cookie", "x-of-hop"}

    run(test)


def test_a_router_that_ends_takes_no_more_requests_and_finishes_those_it_has() -> None:
    async def test() -> None:
        server = Server("a", "stalls")
        async with router(backend=(server,)) as (client, proxy):
            asking = asyncio.create_task(client.post("/v1/completions", json=BODY))
            await until(lambda: server.asked)
            proxy.drain()
            refused = await client.post("/v1/completions", json=BODY)
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert [(await client.get(path)).status_code for path in ("/ready", "/health")] == [503, 200]
            assert proxy.num_open == 1
            server.gate.set()
            assert (await asking).json()["from"] == "a"
            await proxy.idle()

    run(test)


def test_a_prompt_is_computed_by_one_server_and_the_answer_by_another() -> None:
    async def test() -> None:
        first, second = Server("p"), Server("d")
        async with router(prefill=(first,), decode=(second,)) as (client, _):
            asked = BODY | {"stream": True, "stream_options": {"include_usage": True}, "stop": ["x"], "min_tokens": 2}
            answer = await client.post("/v1/completions", json=asked)
            assert answer.text.startswith('data: {"from": "d"}') and answer.text.endswith("data: [DONE]\n\n")
            [of_first], [of_second] = first.asked, second.asked
            assert of_first.pop("kv_transfer_params")["do_remote_decode"] is True
            assert of_first == {"prompt": "Hello", "max_tokens": 1, "temperature": 0.5, "stream": False}
            assert of_second == asked | {"kv_transfer_params": TICKET}
            assert first.headers[0]["x-request-id"] == second.headers[0]["x-request-id"]

    run(test)


@pytest.mark.parametrize("mode", ["gone", "starts", "refuses", "stalls"])
def test_where_no_prompt_is_computed_the_other_server_does_all(mode: str) -> None:
    async def test() -> None:
        first, second = Server("p", mode), Server("d")
        async with router(prefill=(first,), decode=(second,), prefill_timeout=0.2) as (client, _):
            assert (await client.post("/v1/chat/completions", json=BODY)).json() == {"from": "d"}
            assert second.asked == [BODY]

    run(test)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", BODY | {"n": 2}),
        ("/v1/completions", BODY | {"prompt": ["one", "two"]}),
        ("/v1/completions", BODY | {"kv_transfer_params": TICKET}),
        ("/v1/embeddings", BODY),
    ],
    ids=str,
)
def test_some_requests_are_for_one_server_only(path: str, body: dict[str, Any]) -> None:
    async def test() -> None:
        first, second = Server("p"), Server("d")
        async with router(prefill=(first,), decode=(second,)) as (client, _):
            assert (await client.post(path, json=body)).json() == {"from": "d"}
            assert (first.asked, second.asked) == ([], [body])

    run(test)


def test_a_client_that_goes_away_is_not_worked_for() -> None:
    async def test() -> None:
        first, second = Server("p", "stalls"), Server("d")
        async with router(prefill=(first,), decode=(second,)) as (client, proxy):
            asking = asyncio.create_task(client.post("/v1/completions", json=BODY))
            await until(lambda: first.asked)
            asking.cancel()
            assert proxy._prefill is not None
            await until(lambda: proxy._prefill is not None and proxy._prefill.upstreams[0].num_running == 0)
            first.gate.set()
            assert second.asked == []

    run(test)


def test_a_long_body_is_refused() -> None:
    async def test() -> None:
        server = Server("a")
        async with router(backend=(server,), max_body_bytes=100) as (client, _):
            answer = await client.post("/v1/completions", json=BODY | {"prompt": "x" * 100})
            assert (answer.status_code, server.asked) == (413, [])

    run(test)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give servers"),
        ({"prefill": ("http://a",)}, "need each other"),
        ({"backend": ("http://a",), "prefill": ("http://b",), "decode": ("http://c",)}, "not both kinds"),
        ({"backend": ("a:8000",)}, "a server is http://HOST:PORT"),
        ({"backend": ("http://a",), "routing_policy": "prefix"}, "kv_events has 0 endpoints for 1 servers"),
        ({"backend": ("http://a",), "port": 70000}, "port must be"),
        ({"backend": ("http://a",), "probe_seconds": 0}, "probe_seconds must be above 0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RouterConfig(**options)
