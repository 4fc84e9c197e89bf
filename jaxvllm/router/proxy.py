"""The proxy itself: an ASGI application that passes requests on to servers, and their answers back."""

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any

import httpx
from prometheus_client import CollectorRegistry, Counter, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jaxvllm.router.config import RouterConfig
from jaxvllm.router.pool import UNKNOWN, Pool, Upstream
from jaxvllm.router.prefixes import CachedPrefixes, Prompt

logger = logging.getLogger(__name__)

# The endpoints whose prompts one server may compute for another.
SPLIT_PATHS = ("/v1/completions", "/v1/chat/completions")
# The first half of such a request, with the names of vLLM's connectors.
PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# Headers that belong to one connection (RFC 9110, 7.6.1), or that are written anew.
_OF_CONNECTION = frozenset(
    ("connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade")
)
REQUEST_ID = "x-request-id"
SESSION_ID = "x-session-id"


class Proxy:
    """Passes requests on. Where there are prefill servers, a prompt is computed by one of these first.

    A request whose server is gone before its answer began goes to another. An answer that has begun ends with an error:
    the text so far is the client's already. A prompt that no prefill server computes is computed by the decode server.
    """

    def __init__(self, config: RouterConfig):
        self._config = config
        self._main = Pool(config.backend or config.decode, config.routing_policy)
        self._prefill = Pool(config.prefill, config.routing_policy) if config.prefill else None
        self._prefixes = CachedPrefixes(config.event_endpoints) if config.kv_events else None
        # Answers may be silent for as long as a request waits in a queue. A server that is gone closes the connection.
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=5.0), limits=httpx.Limits(max_connections=None), trust_env=False
        )
        self._registry = CollectorRegistry()

        def counter(name: str, told: str) -> Counter:
            return Counter(f"jaxvllm_router_{name}", told, ("outcome",), registry=self._registry)

        self._prefills = counter("prefills", "Prompts that a prefill server was asked for, by what became of them.")
        self._answers = counter("answers", "Answers, by how they ended.")
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/ready", self._health),
                Route("/metrics", self._metrics),
                Route("/{path:path}", self._pass_on, methods=["GET", "POST", "DELETE"]),
            ],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        pools = [pool for pool in (self._main, self._prefill) if pool is not None]
        tasks = [asyncio.create_task(pool.probe(self._client, self._config.probe_seconds)) for pool in pools]
        if self._prefixes is not None:
            tasks.append(asyncio.create_task(self._prefixes.follow()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.aclose()

    async def _health(self, request: Request) -> Response:
        """Whether requests can be answered; prefill servers are not needed for that."""
        return Response(status_code=200 if self._main.is_ready else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _pass_on(self, request: Request) -> Response:
        try:
            body = await self._body(request)
        except ClientDisconnect:
            return Response(status_code=499)
        if body is None:
            most = self._config.max_body_bytes
            return _error(413, f"the body is longer than {most} bytes: send a shorter one, or raise --max-body-bytes")
        headers = {name: value for name, value in request.headers.items() if name not in _OF_CONNECTION}
        headers.setdefault(REQUEST_ID, uuid.uuid4().hex)  # the same for both halves
        response: Response | None = await _unless_gone(request, self._answer(request, headers, body))
        return response or Response(status_code=499)

    async def _body(self, request: Request) -> bytes | None:
        """Reads the body; None: it is too long."""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > self._config.max_body_bytes:
                return None
        return body

    async def _answer(self, request: Request, headers: Mapping[str, str], body: bytes) -> Response:
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        prompt = UNKNOWN
        if request.method == "POST" and request.url.path in SPLIT_PATHS:
            if self._prefixes is not None and (reader := self._main.first_ready) is not None:
                prompt = await self._prefixes.read(self._client, reader.name, headers, body)
            if self._prefill is not None:
                body = await self._with_prompt_computed(path, headers, body, prompt)
        tried: list[Upstream] = []
        while (upstream := self._main.choose(headers.get(SESSION_ID), tried, prompt)) is not None:
            tried.append(upstream)
            stack = contextlib.AsyncExitStack()
            stack.enter_context(upstream.busy())
            try:
                asked = self._client.build_request(request.method, upstream.name + path, headers=headers, content=body)
                with upstream.computing(prompt.num_tokens - prompt.num_cached(upstream.name)):
                    answer = await self._client.send(asked, stream=True)
            except httpx.TransportError as error:
                upstream.failed(error)
                await stack.aclose()
                continue
            except BaseException:
                await stack.aclose()
                raise
            stack.push_async_callback(answer.aclose)
            if answer.status_code == 503 and self._main.choose(None, tried) is not None:  # it starts, or it ends
                await stack.aclose()
                continue
            kept = {name: value for name, value in answer.headers.items() if name not in _OF_CONNECTION}
            return StreamingResponse(self._parts(upstream, answer, stack), answer.status_code, kept)
        self._answers.labels("unavailable").inc()
        return _error(503, "no server is ready: try again in a moment")

    async def _parts(
        self, upstream: Upstream, answer: httpx.Response, stack: contextlib.AsyncExitStack
    ) -> AsyncIterator[bytes]:
        """Yields the parts of an answer as they come. If its server ends, a stream gets an event that says so."""
        outcome = "cancelled"
        try:
            async for part in answer.aiter_raw():
                yield part
            outcome = "complete"
        except httpx.TransportError as error:
            outcome = "broken"
            upstream.failed(error)
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                raise  # which closes the connection: a part of a body would be taken for the whole
            yield b"data: " + json.dumps(_error_body("the server that wrote this answer has ended")).encode() + b"\n\n"
        finally:
            self._answers.labels(outcome).inc()
            await asyncio.shield(stack.aclose())

    async def _with_prompt_computed(self, path: str, headers: Mapping[str, str], body: bytes, prompt: Prompt) -> bytes:
        """Has a prefill server compute the prompt of `body`, and returns what to ask a decode server then.

        Where that cannot be, it is `body` itself, and the decode server computes the prompt, or says what is wrong.
        """
        assert self._prefill is not None
        asked = _read(body)
        if asked is None:
            return body
        first = json.dumps(_first_half(asked)).encode()
        tried: list[Upstream] = []
        while (upstream := self._prefill.choose(headers.get(SESSION_ID), tried, prompt)) is not None:
            tried.append(upstream)
            missing = prompt.num_tokens - prompt.num_cached(upstream.name)
            try:
                with upstream.busy(), upstream.computing(missing):
                    answer = await self._client.post(
                        upstream.name + path, headers=headers, content=first, timeout=self._config.prefill_timeout
                    )
                params = answer.json().get("kv_transfer_params") if answer.status_code == 200 else None
            except httpx.TimeoutException:
                logger.warning("%s did not compute a prompt in time", upstream.name)
                self._prefills.labels("timeout").inc()
                break
            except (httpx.TransportError, ValueError, AttributeError) as error:
                upstream.failed(error)
                self._prefills.labels("failed").inc()
                continue
            if not isinstance(params, dict):
                self._prefills.labels("refused").inc()
                if answer.status_code >= 500:  # it may be overloaded
                    continue
                break
            self._prefills.labels("computed").inc()
            return json.dumps(asked | {"kv_transfer_params": params}).encode()
        return body


def _read(body: bytes) -> dict[str, Any] | None:
    """The request of a body whose prompt another server may compute; None: this is none."""
    try:
        asked = json.loads(body)
    except ValueError:
        return None
    if not isinstance(asked, dict) or asked.get("n") not in (None, 1) or asked.get("use_beam_search"):
        return None
    if isinstance(asked.get("prompt"), list) and asked["prompt"] and not isinstance(asked["prompt"][0], int):
        return None  # several prompts
    return asked if asked.get("kv_transfer_params") is None else None


def _first_half(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The request that only computes the prompt of `asked`."""
    left_out = ("stream", "stream_options", "max_completion_tokens", "min_tokens", "stop", "logprobs", "top_logprobs")
    kept = {name: value for name, value in asked.items() if name not in left_out}
    return kept | {"max_tokens": 1, "stream": False, "kv_transfer_params": PREFILL_PARAMS}


async def _unless_gone[T](request: Request, work: Awaitable[T]) -> T | None:
    """Returns the result of `work`, or None once the client has gone, and then the work is cancelled."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def _error_body(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "service_unavailable", "param": None, "code": None}}


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse(_error_body(message), status)
