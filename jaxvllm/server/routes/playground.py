"""The playground at `/`, its files, and `GET /playground/state`, which shows what the engine is doing."""

import asyncio
import hashlib
import mimetypes
import time
from collections import deque
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from jaxvllm.engine.page_view import PageState, PoolView
from jaxvllm.engine.stats import StepReport
from jaxvllm.server.errors import ApiError
from jaxvllm.server.exchange import answer
from jaxvllm.server.routes.documented import COMMON, GENERATES
from jaxvllm.server.service import Service
from jaxvllm.worker import wire
from jaxvllm.worker.engine_client import EngineClient
from jaxvllm.worker.observer import Observer

FILES = Path(__file__).parents[1] / "playground"
PAGE = "index.html"
# Scripts may come neither from other servers nor from the page itself, so a model's text can never become a script.
SAFE = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # the browser asks each time whether the file has changed
}
NUM_STEPS = 256
# The engine copies the state of its pages between two steps, which takes time for each page. So all clients together
# get a new copy at most this often.
FRESH_SECONDS = 0.2
# The time to wait for an engine that is busy with a step. After that an error is better.
ANSWER_SECONDS = 5.0
_NUMBERS = {PageState.FREE: 0, PageState.OWNED: 1, PageState.CACHED: 2, PageState.TRASH: 3}


def router(service: Service) -> APIRouter:
    """Returns a router with these endpoints."""
    routes = APIRouter(tags=["Playground"])
    files = {path.name: _File(path) for path in FILES.iterdir() if path.is_file()}
    steps = StepHistory()
    service.llm.observe(steps)
    pools = _Pools(service.llm)

    @routes.get("/", response_class=Response, responses=_HTML)
    async def playground(request: Request) -> Response:
        """Returns the playground's page."""
        return files[PAGE].response(request)

    @routes.get("/playground/static/{name}", response_class=Response, responses=_HTML | {404: GENERATES[404]})
    async def static(name: str, request: Request) -> Response:
        """Returns one of the playground's files."""
        if name not in files:
            raise ApiError(404, "the playground has no such file")
        return files[name].response(request)

    @routes.get("/playground/state", response_class=Response, responses=COMMON | {503: GENERATES[503]} | _STATE)
    async def state() -> Response:
        """Returns what the engine is doing: the state and owners of every page, and the latest steps."""
        views = await pools.latest()
        stats = service.llm.stats
        shown = {
            "page_size": service.llm.facts.page_size,
            "replicas": [_replica(view) for view in views],
            "stats": {
                "running": sum(len(view.requests) for view in views),
                "waiting": 0 if stats is None else stats.num_waiting,
                "pages": service.llm.facts.num_pages,
                "pages_owned": sum(view.states.count(PageState.OWNED) for view in views),
            },
            "has_drafts": service.llm.config.speculative_config is not None,
            "steps": list(steps.latest),
        }
        return answer(shown)

    return routes


class StepHistory(Observer):
    """The latest steps of the engine, as the playground draws them."""

    def __init__(self, latest: deque[dict[str, Any]] | None = None, engine: int = 0) -> None:
        self.latest: deque[dict[str, Any]] = deque(maxlen=NUM_STEPS) if latest is None else latest
        self._engine = engine

    def of_engine(self, index: int) -> "StepHistory":
        """Implements `Observer.of_engine`: all engines share one history."""
        return StepHistory(self.latest, index)

    def on_pulse(self, pulse: wire.Pulse) -> None:
        """Implements `Observer.on_pulse`."""
        # An engine of several has one replica.
        self.latest.extend(_step(step, self._engine + step.replica) for step in pulse.steps)


class _Pools:
    """The page pools. All clients share a copy, which is renewed at most every `FRESH_SECONDS`."""

    def __init__(self, llm: EngineClient):
        self._llm = llm
        self._views: list[PoolView] = []
        self._taken_at = 0.0

    async def latest(self) -> list[PoolView]:
        """Returns a recent copy. Raises ApiError when the engine is busy, EngineUnavailableError when it is down."""
        if time.monotonic() - self._taken_at > FRESH_SECONDS:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    self._views = await self._llm.pages()
            except TimeoutError:
                raise ApiError(503, "the engine does not answer: it is busy with a long step") from None
            self._taken_at = time.monotonic()
        return self._views


class _File:
    """A file of the playground, as it was when the server started."""

    def __init__(self, path: Path):
        self._content = path.read_bytes()
        self._tag = f'"{hashlib.sha256(self._content).hexdigest()[:16]}"'
        self._type = mimetypes.guess_type(path.name)[0] or "application/octet-stream"

    def response(self, request: Request) -> Response:
        headers = SAFE | {"etag": self._tag}
        if request.headers.get("if-none-match") == self._tag:
            return Response(status_code=304, headers=headers)
        return Response(self._content, headers=headers, media_type=self._type)


def _step(step: StepReport, replica: int) -> dict[str, Any]:
    return {
        "t": round(time.monotonic(), 3),  # the time of the report, which is up to a second after the step's end
        "replica": replica,
        "decode": step.num_decode,
        "prefill": step.num_prefill,
        "bucket": step.bucket_tokens,
        "host_ms": round(1e3 * step.host_seconds / step.num_steps, 3),
        "device_ms": round(1e3 * step.device_seconds / step.num_steps, 3),
    }


def _replica(view: PoolView) -> dict[str, Any]:
    return {
        "states": [_NUMBERS[state] for state in view.states],
        "requests": [
            {
                "id": request_id,
                "pages": [page.page for page in pages],
                "shared": [page.page for page in pages if page.num_owners > 1],
                "tokens": sum(len(page.token_ids) for page in pages),
            }
            for request_id, pages in view.requests.items()
        ],
    }


_HTML: dict[int | str, dict[str, Any]] = {
    200: {"description": "The file", "content": {"text/html": {"schema": {"type": "string"}}}},
    304: {"description": "The file has not changed"},
}
_STATE: dict[int | str, dict[str, Any]] = {
    200: {"description": "The state for the playground. Its shape may change", "content": {"application/json": {}}}
}
