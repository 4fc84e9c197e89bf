"""Every answer is counted, under the template of its endpoint."""

import asyncio

import httpx
from fastapi import APIRouter, FastAPI
from fastapi.responses import StreamingResponse

from jaxvllm.server.config import ServerConfig
from jaxvllm.server.http.http_door import guarded
from jaxvllm.server.metrics.counting import Counting
from jaxvllm.server.metrics.prometheus import Metrics


def test_answers_and_streams() -> None:
    metrics, app = Metrics("jaxvllm", "demo"), FastAPI()
    seen: list[str] = []

    @app.get("/things/{name}")
    async def thing(name: str) -> str:
        return name

    included = APIRouter()

    @included.post("/included/{name}")
    async def include(name: str) -> str:
        return name

    app.include_router(included)

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def events() -> object:
            seen.append(metrics.render()[0].decode())
            yield b"data: x\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")  # type: ignore[arg-type]

    counted = Counting(guarded(app, ServerConfig(max_body_bytes=100), ["key"]), metrics, app.routes)

    async def run() -> None:
        transport = httpx.ASGITransport(counted)
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers={"x-api-key": "key"}) as client:
            for path in ("/things/a", "/things/b", "/nothing", "/stream"):
                await client.get(path)
            # Refused before the router.
            await client.get("/things/a", headers={"x-api-key": "wrong"})
            await client.get("/made/up", headers={"x-api-key": "wrong"})
            await client.post("/included/a", content=b"{}" * 100)
            await client.post("/included/b", content=b"{}")
            await client.post("/included/c", content=b"{", headers={"content-type": "application/json"})
            await client.post("/things/c", headers=[("authorization", "Bearer key"), ("authorization", "Bearer x")])
            await client.get("/things/a", headers={"x": "y" * 70_000})
            await client.post("/things/a")

    asyncio.run(run())
    text = metrics.render()[0].decode()
    for path, status, count in [
        ("/things/{name}", 200, 2),
        ("none", 404, 1),
        ("none", 401, 1),
        ("/stream", 200, 1),
        ("/things/{name}", 401, 1),
        ("/included/{name}", 413, 1),
        ("/included/{name}", 415, 1),
        ("/included/{name}", 400, 1),
        ("/things/{name}", 400, 1),
        ("/things/{name}", 431, 1),
        ("/things/{name}", 405, 1),
    ]:
        assert f'http_requests_total{{model_name="demo",path="{path}",status="{status}"}} {count}.0' in text, text
    assert 'num_http_streams{model_name="demo"} 1.0' in seen[0]
    assert 'num_http_streams{model_name="demo"} 0.0' in text
