"""The proxy itself: an ASGI application that passes requests on to servers, and their answers back."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
from prometheus_client import CollectorRegistry, Counter, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxvllm.router.config import RouterConfig
from jaxvllm.router.forwarding import ForwardedAnswer, ForwardedRequest
from jaxvllm.router.pool import UNKNOWN, ServerPool, Upstream
from jaxvllm.router.prefixes import CachedPrefixes, PromptPrefixes
from jaxvllm.server.drainable import Drainable
from jaxvllm.server.error_handlers import add_error_handlers
from jaxvllm.server.errors import ApiError
from jaxvllm.server.http.disconnect import unless_gone

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
SESSION_ID = b"x-session-id"


class Proxy(Drainable):
    """Passes requests on. Where there are prefill servers, a prompt is computed by one of these first.

    A request whose server is gone before its answer began goes to another. An answer that has begun ends with an error:
    the text so far is the client's already. A prompt that no prefill server computes is computed by the decode server.
    """

    config: RouterConfig

    def __init__(self, config: RouterConfig):
        super().__init__(config)
        self._main = ServerPool(config.backend or config.decode, config.routing_policy)
        self._prefill = ServerPool(config.prefill, config.routing_policy) if config.prefill else None
        self._prefixes = CachedPrefixes(config.event_endpoints) if config.kv_events else None
        self._client = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), trust_env=False)
        self._registry = CollectorRegistry()

        def counter(name: str, told: str) -> Counter:
            return Counter(f"jaxvllm_router_{name}", told, ("outcome",), registry=self._registry)

        self._prefills = counter("prefills", "Prompts that a prefill server was asked for, by what became of them.")
        self._answers = counter("answers", "Answers, by how they ended.")
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/live", self._live),
                Route("/metrics", self._metrics),
                Route("/{path:path}", self._pass_on, methods=["GET", "POST", "DELETE"]),
            ]
        )
        add_error_handlers(self.app, _as_api_error)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Looks at the servers inside the context. Requests may be passed on only there."""
        pools = [pool for pool in (self._main, self._prefill) if pool is not None]
        # Nothing is answered before it is known which servers are ready.
        await asyncio.gather(*(pool.look(self._client) for pool in pools))
        tasks = [asyncio.create_task(pool.probe(self._client, self.config.probe_seconds)) for pool in pools]
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
        """Answers whether requests can be answered; prefill servers are not needed for that."""
        return Response(status_code=200 if self._main.is_ready else 503)

    async def _ready(self, request: Request) -> Response:
        """Answers whether new requests are taken."""
        return Response(status_code=200 if self._main.is_ready and not self.draining else 503)

    async def _live(self, request: Request) -> Response:
        """Answers that this process is alive."""
        return Response()

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _pass_on(self, request: Request) -> Response:
        async with AsyncExitStack() as stack:
            stack.enter_context(self.opened())
            forwarded = await ForwardedRequest.read(request)
            is_split = request.method == "POST" and request.url.path in SPLIT_PATHS
            upstream, answer = await unless_gone(request, self._ask(forwarded, is_split, stack))
            return ForwardedAnswer(answer, self._parts(upstream, answer), stack.pop_all())

    async def _ask(
        self, request: ForwardedRequest, is_split: bool, stack: AsyncExitStack
    ) -> tuple[Upstream, httpx.Response]:
        """Returns a server that answers, and the beginning of its answer. The server counts as busy in `stack`.

        Raises ApiError when no server answers.
        """
        prompt = UNKNOWN
        if is_split:
            if self._prefixes is not None and (reader := self._main.first_ready) is not None:
                prompt = await self._prefixes.read(self._client, reader.name, request)
            if self._prefill is not None:
                request = replace(request, body=await self._with_prompt_computed(request, prompt))
        tried: list[Upstream] = []
        while (upstream := self._main.choose(request.header(SESSION_ID), tried, prompt)) is not None:
            tried.append(upstream)
            async with AsyncExitStack() as asking:
                asking.enter_context(upstream.busy())
                try:
                    with upstream.computing(prompt.num_tokens - prompt.num_cached(upstream.name)):
                        answer = await request.send(self._client, upstream.name, is_streamed=True)
                except httpx.TransportError as error:
                    upstream.failed(error)
                    continue
                asking.push_async_callback(answer.aclose)
                if answer.status_code == 503 and self._main.choose(None, tried) is not None:  # it starts, or it ends
                    continue
                stack.push_async_callback(asking.pop_all().aclose)
                return upstream, answer
        self._answers.labels("unavailable").inc()
        raise ApiError(503, "no server is ready: try again in a moment")

    async def _parts(self, upstream: Upstream, answer: httpx.Response) -> AsyncIterator[bytes]:
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
                raise
            ended = ApiError(500, "the server that wrote this answer has ended: send the request again")
            yield b"data: " + json.dumps(ended.body()).encode() + b"\n\n"
        finally:
            self._answers.labels(outcome).inc()

    async def _with_prompt_computed(self, request: ForwardedRequest, prompt: PromptPrefixes) -> bytes:
        """Has a prefill server compute the prompt of a request, and returns what to ask a decode server then.

        Where that cannot be, it is the request's own body, and the decode server computes the prompt, or says what is
        wrong.
        """
        assert self._prefill is not None
        asked = _read(request.body)
        if asked is None:
            return request.body
        first = replace(request, body=json.dumps(_first_half(asked)).encode())
        tried: list[Upstream] = []
        while (upstream := self._prefill.choose(request.header(SESSION_ID), tried, prompt)) is not None:
            tried.append(upstream)
            missing = prompt.num_tokens - prompt.num_cached(upstream.name)
            try:
                with upstream.busy(), upstream.computing(missing):
                    answer = await first.send(self._client, upstream.name, self.config.prefill_timeout)
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
        return request.body


def _read(body: bytes) -> dict[str, Any] | None:
    """Returns the request of a body whose prompt another server may compute, or None for any other body."""
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
    """Returns the request that only computes the prompt of `asked`."""
    left_out = ("stream", "stream_options", "max_completion_tokens", "min_tokens", "stop", "logprobs", "top_logprobs")
    kept = {name: value for name, value in asked.items() if name not in left_out}
    return kept | {"max_tokens": 1, "stream": False, "kv_transfer_params": PREFILL_PARAMS}


def _as_api_error(error: Exception, request_id: str) -> ApiError:
    """Converts an error of a request to the error that the client gets."""
    if isinstance(error, ApiError):
        return error
    logger.error("request %s failed", request_id, exc_info=error)
    return ApiError(500, "the router failed at this request: see its log")
