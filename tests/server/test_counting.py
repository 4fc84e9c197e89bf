"""Every answer is counted, under the template of its endpoint."""

import asyncio

import httpx
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from jaxvllm.server.auth import Auth
from jaxvllm.server.counting import Counting
from jaxvllm.server.metrics import Metrics


def test_answers_and_streams() -> None:
    metrics, app = Metrics("jaxvllm", "demo"), FastAPI()
    seen: list[str] = []

    @app.get("/things/{name}")
    async def thing(name: str) -> str:
        return name

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def events() -> object:
            seen.append(metrics.render()[0].decode())
            yield b"data: x\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")  # type: ignore[arg-type]

    counted = Counting(Auth(app, ["key"]), metrics)

    async def run() -> None:
        transport = httpx.ASGITransport(counted)
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers={"x-api-key": "key"}) as client:
            for path in ("/things/a", "/things/b", "/nothing", "/stream"):
                await client.get(path)
            await client.get("/things/a", headers={"x-api-key": "wrong"})

    asyncio.run(run())
    text = metrics.render()[0].decode()
    for path, status, count in [("/things/{name}", 200, 2), ("none", 404, 1), ("none", 401, 1), ("/stream", 200, 1)]:
        assert f'http_requests_total{{model_name="demo",path="{path}",status="{status}"}} {count}.0' in text, text
    assert 'num_http_streams{model_name="demo"} 1.0' in seen[0]
    assert 'num_http_streams{model_name="demo"} 0.0' in text
