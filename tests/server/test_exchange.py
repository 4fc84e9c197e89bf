"""Streams that are slow, that fail on the way, and whose client leaves."""

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import pytest

from jaxvllm.server.exchange import KEEP_ALIVE, KEEP_ALIVE_SECONDS, EventStream, as_api_error, error_event
from jaxvllm.worker.engine_client import EngineDiedError
from tests.waiting import IdleClockLoop


class Generation:
    """Only its end matters here."""

    closed = False

    async def close(self) -> None:
        self.closed = True


def run(events: AsyncIterator[bytes], leaves_after: float = 3600) -> tuple[Generation, list[bytes], bool]:
    """The generation, the bodies that were sent, and whether the response came to its end."""
    return asyncio.run(_run(events, leaves_after), loop_factory=IdleClockLoop)


async def _run(events: AsyncIterator[bytes], leaves_after: float) -> tuple[Generation, list[bytes], bool]:
    generation, sent = Generation(), []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(leaves_after)
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    stream = EventStream(generation, events, error_event, "cmpl-1")  # type: ignore[arg-type]
    await stream({"type": "http"}, receive, send)
    bodies = [message["body"] for message in sent if message["type"] == "http.response.body"]
    return generation, bodies, not sent[-1].get("more_body", True)


def test_silence_is_filled_with_comments() -> None:
    async def events() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        await asyncio.sleep(5.5 * KEEP_ALIVE_SECONDS)
        yield b"data: 2\n\n"

    generation, bodies, ended = run(events())
    assert bodies[0] == b"data: 1\n\n" and bodies[-2:] == [b"data: 2\n\n", b""]
    assert bodies[1:-2] == [KEEP_ALIVE] * 5 and KEEP_ALIVE.startswith(b":")
    assert ended and generation.closed


def test_what_fails_on_the_way_is_an_event() -> None:
    async def events() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        raise EngineDiedError("the engine is gone")

    generation, bodies, ended = run(events())
    assert bodies[0] == b"data: 1\n\n" and bodies[1].startswith(b"event: error\ndata: ")
    assert b"the engine is gone" in bodies[1] and ended and generation.closed


def test_a_client_that_leaves_ends_the_generation() -> None:
    cleaned = []

    async def events() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"data: 1\n\n"
                await asyncio.sleep(0.01)
        finally:
            cleaned.append(True)

    generation, bodies, ended = run(events(), leaves_after=0.1)
    assert bodies and not ended and generation.closed and cleaned


def test_an_error_of_ours_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    error = as_api_error(KeyError("/root/secret"), "cmpl-17")
    assert error.status == 500 and "secret" not in error.message
    assert "secret" in caplog.text and "request cmpl-17 failed" in caplog.text
