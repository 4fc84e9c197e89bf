"""What a server answers before its engine has ever been ready. `test_lifecycle.py` sees a whole start."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest

from jaxvllm.server.config import ServerConfig
from jaxvllm.worker import wire
from jaxvllm.worker.async_llm import AsyncLLM
from jaxvllm.worker.engine_client import EngineState
from tests.server.conftest import application

BODY = {"prompt": "Once", "max_tokens": 4}


def run(test: Callable[[AsyncLLM, httpx.AsyncClient], Awaitable[None]], request_timeout: float = 600.0) -> None:
    """Runs `test` with an engine that nothing starts, and a client of its server."""

    async def run() -> None:
        llm = AsyncLLM()
        transport = httpx.ASGITransport(application(llm, ServerConfig(request_timeout=request_timeout)))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            await test(llm, client)

    asyncio.run(run())


def test_it_is_alive_and_not_healthy_and_says_what_it_waits_for() -> None:
    async def test(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
        assert (await client.get("/live")).status_code == 200
        for path in ("/health", "/ready"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["status"]) == (503, "starting")
        health = await client.get("/health")
        assert health.json()["reason"] == "the model demo is not ready: the engine is starting"
        assert health.headers["retry-after"]

    run(test)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/invocations"])
def test_a_request_that_waits_too_long_is_told_to_try_again(path: str) -> None:
    async def test(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
        answer = await client.post(path, json={})
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert "request_timeout of 0.01 s" in answer.json()["error"]["message"]

    run(test, request_timeout=0.01)


@pytest.mark.parametrize(
    ("state", "reason"), [(EngineState.FOLLOWING, "process 0"), (EngineState.CLOSED, "the engine is closed")]
)
def test_who_waits_is_answered_once_there_will_be_no_engine(state: EngineState, reason: str) -> None:
    async def test(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
        waiting = asyncio.create_task(client.post("/v1/completions", json=BODY))
        assert (await client.get("/load")).status_code == 200
        assert not waiting.done()
        if state is EngineState.CLOSED:
            await llm.close()
        else:
            llm._read(wire.Follows())
        assert llm.state is state
        answer = await waiting
        assert answer.status_code == 503 and reason in answer.json()["error"]["message"]
        assert reason in (await client.get("/health")).json()["reason"]

    run(test)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models", 200),
        ("GET", "/v1/completions", 405),
        ("HEAD", "/v1/completions", 405),
        ("POST", "/v1/x", 404),
    ],
)
def test_no_answer_of_any_kind_comes_before_the_start(method: str, path: str, status: int) -> None:
    """Scripts for vLLM take any answer for the sign that requests are taken."""

    async def test(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
        answer = await client.request(method, path)
        assert answer.status_code == 503 and (method == "HEAD" or "request_timeout of 0.01 s" in answer.text)
        llm._read(wire.Away("the engine is started again"))
        assert (await client.request(method, path)).status_code == status

    run(test, request_timeout=0.01)


def test_an_engine_that_is_started_again_lets_nobody_wait() -> None:
    async def test(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
        llm._read(wire.Away("the engine is started again"))
        answer = await client.post("/v1/completions", json=BODY)
        assert answer.status_code == 503 and answer.headers["retry-after"]

    run(test)
