"""One engine with the demo model, behind a real server: for all tests of endpoints."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import uvicorn
from anyio.from_thread import BlockingPortal, start_blocking_portal

from jaxvllm.config import EngineConfig
from jaxvllm.server.app import create_app
from jaxvllm.server.config import ServerConfig
from jaxvllm.server.http.http_door import guarded
from jaxvllm.server.http.listener import listen
from jaxvllm.server.service import Service
from jaxvllm.worker.async_llm import AsyncLLM
from jaxvllm.worker.observer import Observer
from tests.waiting import PATIENCE, PAUSE

if TYPE_CHECKING:
    from tests.server.scripted import Apps, Says

# Small shapes: few programs to compile. 200 pages hold six of the longest requests.
ENGINE: dict[str, Any] = dict(
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=512,
    row_buckets=(8,),
    token_buckets=(64,),
    num_pages=200,
    max_logprobs=25,
)


@dataclass(frozen=True)
class Event:
    """One server-sent event."""

    name: str | None
    data: Any  # "[DONE]" as it is


class Losses(Observer):
    """An observer that remembers which requests were aborted."""

    def __init__(self) -> None:
        self.request_ids: list[str] = []

    def on_loss(self, request_id: str, params: object, reason: str) -> None:
        self.request_ids.append(request_id)


@dataclass(frozen=True)
class Server:
    """A server that runs, and what the test may look at beside its answers."""

    url: str
    llm: AsyncLLM
    portal: BlockingPortal  # into its event loop
    client: httpx.Client
    losses: Losses

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def answer(self, path: str, **body: Any) -> Any:
        """The JSON of an answer that must be one."""
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def error(self, path: str, **body: Any) -> tuple[int, Any]:
        """Status and error of an answer that must be one."""
        response = self.post(path, **body)
        assert response.status_code >= 400, response.text
        return response.status_code, response.json()["error"]

    def events(self, path: str, **body: Any) -> list[Event]:
        """All events of a stream."""
        with self.client.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"] == "text/event-stream"
            return list(events_of("".join(response.iter_text())))

    def until_idle(self) -> None:
        """Waits until nothing is left of any request: neither in this process nor a page in the engine."""

        async def wait() -> None:
            async with asyncio.timeout(PATIENCE):
                while self.llm.num_requests or any("owned" in pool.states for pool in await self.llm.pages()):
                    await asyncio.sleep(PAUSE)

        self.portal.call(wait)

    def ask(
        self,
        config: ServerConfig,
        path: str,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        **body: Any,
    ) -> httpx.Response:
        """The answer of another server, without a socket, over the same engine."""

        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(application(self.llm, config), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.request(method, path, json=body or None, headers=headers)

        return self.portal.call(asyncio.wait_for, run(), PATIENCE)

    def cut_stream(self, path: str, **body: Any) -> list[Event]:
        """The events of a stream that began, and was cut by a request_timeout: the shortest in which one begins."""
        timeout = 0.05
        while timeout < PATIENCE:
            response = self.ask(ServerConfig(request_timeout=timeout), path, **body, stream=True)
            if response.status_code == 200:
                return list(events_of(response.text))
            assert response.status_code == 504, response.text
            timeout *= 2
        raise AssertionError(f"no stream began in {timeout} s")


def application(llm: AsyncLLM, config: ServerConfig) -> Any:
    """What `jaxvllm.server.serve` serves."""
    return guarded(create_app(Service(llm, config)), config, ())


def events_of(text: str) -> Iterator[Event]:
    """The events in the body of a stream; comments are none."""
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            fields = dict(line.split(": ", 1) for line in lines)
            data = fields["data"]
            yield Event(fields.get("event"), data if data == "[DONE]" else json.loads(data))


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    with start_blocking_portal() as portal:
        llm = AsyncLLM.from_config(EngineConfig.from_options(**ENGINE))
        losses = Losses()
        llm.observe(losses)
        portal.call(llm.start)
        try:
            with listen("127.0.0.1", 0) as listener:
                url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                app = application(llm, ServerConfig())
                options = dict(log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=int(PATIENCE))
                server = uvicorn.Server(uvicorn.Config(app, **options))
                serving = portal.start_task_soon(server.serve, [listener])
                with httpx.Client(base_url=url, timeout=PATIENCE) as client:
                    yield Server(url, llm, portal, client, losses)
                server.should_exit = True
                serving.result()
        finally:
            portal.call(llm.close)


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """The server; whatever a test does, nothing is left of it in the engine afterwards."""
    yield shared_server
    shared_server.until_idle()


@pytest.fixture(scope="module")
def apps() -> "Apps":
    return {}


@pytest.fixture
def says(server: Server, apps: "Apps") -> "Says":
    """Makes a script from the parts of a stream."""
    from tests.server.scripted import Script  # which needs this module

    return partial(Script, server, apps)
