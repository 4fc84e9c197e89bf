"""X-Request-Id: taken over, given out, and no obstacle to a second request that brings the same."""

import asyncio
import re

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from jaxvllm.server.config import ServerConfig
from jaxvllm.server.http.http_door import guarded
from jaxvllm.server.http.request_id import RequestId
from tests.server.conftest import Server

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
GENERATED = re.compile(r"[0-9a-f]{32}")
# Path, prefix of the answer's id, and a body that is right.
ENDPOINTS = [
    ("/v1/completions", "cmpl-", {"prompt": "Once", "max_tokens": 2}),
    ("/v1/chat/completions", "chatcmpl-", CHAT | {"max_tokens": 2}),
    ("/v1/responses", "resp_", {"input": "Hello", "max_output_tokens": 2}),
    ("/v1/messages", "msg_", CHAT | {"max_tokens": 2}),
]


def ask(path: str = "/v1/models", **headers: str) -> httpx.Response:
    """The answer of an application behind the guards, to which `key` is the key."""

    async def app(scope, receive, send):  # type: ignore[no-untyped-def]
        await PlainTextResponse(RequestId.of(Request(scope)).text)(scope, receive, send)

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(guarded(app, ServerConfig(), ["key"]))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(run())


@pytest.mark.parametrize(
    "given", ["a", "x" * 128, "7f1d9c34-8a54-4a0e", "Root=1-67891233-abcdef012345678912345678", "aGk/+w=="]
)
def test_the_clients_own_is_taken_over(given: str) -> None:
    response = ask(**{"x-api-key": "key", "x-request-id": given})
    assert response.text == given and response.headers.get_list("x-request-id") == [given]


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\tb", 'a"b', "a,b", "a;b", "{a}", "é", "a\u2028b"])
def test_one_that_is_odd_is_replaced(given: str) -> None:
    response = ask(**{"x-api-key": "key", "x-request-id": given.encode()})  # type: ignore[arg-type]
    assert GENERATED.fullmatch(response.text) and response.headers["x-request-id"] == response.text


def test_without_one_each_request_gets_its_own() -> None:
    first, second = ask(**{"x-api-key": "key"}), ask(**{"x-api-key": "key"})
    assert GENERATED.fullmatch(first.text) and first.headers["x-request-id"] == first.text != second.text


def test_refusals_have_it_too() -> None:
    response = ask(**{"x-request-id": "mine"})
    assert response.status_code == 401 and response.headers["x-request-id"] == "mine"
    response = ask(**{"x-request-id": "mine", "x": "y" * 70_000})
    assert response.status_code == 431 and response.headers["x-request-id"] == "mine"


@pytest.mark.parametrize(("path", "prefix", "body"), ENDPOINTS)
def test_answers_are_called_by_it(server: Server, path: str, prefix: str, body: dict[str, object]) -> None:
    given = server.client.post(path, json=body, headers={"x-request-id": "mine"})
    assert given.json()["id"] == f"{prefix}mine" and given.headers["x-request-id"] == "mine"
    generated = server.client.post(path, json=body)
    assert generated.json()["id"] == prefix + generated.headers["x-request-id"]


def test_streams_are_called_by_it(server: Server) -> None:
    with server.client.stream(
        "POST",
        "/v1/completions",
        json={"prompt": "Once", "max_tokens": 2, "stream": True},
        headers={"x-request-id": "s"},
    ) as response:
        assert response.headers["x-request-id"] == "s"
        assert '"id":"cmpl-s"' in response.read().decode()


def test_two_at_once_may_have_the_same(server: Server) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}
    headers = {"x-request-id": "twin"}
    with server.client.stream("POST", "/v1/completions", json=body, headers=headers) as first:
        assert first.status_code == 200
        second = server.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}, headers=headers)
        assert second.status_code == 200 and second.json()["id"] == "cmpl-twin", second.text
        assert server.llm.num_requests == 1, "both were there at once"


def test_the_bodys_request_id_names_the_answer(server: Server) -> None:
    body = {"prompt": "Once", "max_tokens": 2, "request_id": "of-the-body"}
    response = server.client.post("/v1/completions", json=body, headers={"x-request-id": "of-the-head"})
    assert response.json()["id"] == "of-the-body" and response.headers["x-request-id"] == "of-the-head"
