"""Answers HTTP requests with a generation: as a whole when it is done, or as a stream of server-sent events."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from jaxvllm.core.errors import ContextLengthError, OverloadedError, ParameterError, UnsupportedParameterError
from jaxvllm.core.request import GenerationRequest
from jaxvllm.core.sampling_params import RequestOutputKind
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.server.argument_check import ForcedCall
from jaxvllm.server.errors import ApiError, PromptTooLongError
from jaxvllm.server.generation import Generation
from jaxvllm.server.http.disconnect import send_unless_gone, unless_gone
from jaxvllm.server.http.request_id import RequestId
from jaxvllm.server.service import Service
from jaxvllm.worker.engine_client import EngineDiedError, EngineUnavailableError

logger = logging.getLogger(__name__)

# After this long without an event a comment is sent, so that no proxy on the way takes the connection for dead.
KEEP_ALIVE_SECONDS = 15.0
KEEP_ALIVE = b": keep-alive\n\n"
# Proxies refuse responses whose headers are larger than 4 or 8 KB together.
MAX_HEADER_CHARS = 2048
# vLLM's name, and that of its router.
SESSION_HEADER = "x-session-id"
DONE = b"data: [DONE]\n\n"
EVENT_STREAM = "text/event-stream"

encode = msgspec.json.Encoder().encode

type Events = AsyncIterator[bytes]


def event(data: Any, name: str | None = None) -> bytes:
    """Encodes one server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encode(data) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """Returns the end of a stream that failed: an event that OpenAI's clients raise as an exception, and [DONE]."""
    return event(error.body(), "error") + DONE


async def whole_answer(request: GenerationRequest, make: Callable[[], Any]) -> Response:
    """Returns `answer(make())` for requests like `request`.

    It runs in a thread if there are log-probabilities, of which half a million take 0.7 s, or vectors.
    """
    params = request.params
    if not params.wants_logprobs and params.prompt_logprobs is None and request.pooling is None:
        return answer(make())
    return await run_in_threadpool(lambda: answer(make()))


def answer(body: Any) -> Response:
    """Returns a JSON response of `body`, unchecked. The response's pydantic model is only for the docs and tests."""
    return Response(encode(body), media_type="application/json")


def as_api_error(error: Exception, request_id: str) -> ApiError:
    """Converts `error`, which an endpoint did not handle, to the error that the client gets."""
    match error:
        case ApiError():
            return error
        case OverloadedError() | EngineUnavailableError():
            return ApiError(503, str(error))
        case EngineDiedError():
            return ApiError(500, str(error))
        case TimeoutError():
            return ApiError(504, "the request took longer than the server's request_timeout, and was aborted")
        case ContextLengthError():
            return PromptTooLongError(error)
        case ParameterError() | UnsupportedParameterError():
            return ApiError(400, str(error), param=error.param)
        case ValueError() | NotImplementedError():
            return ApiError(400, str(error))
    logger.error("request %s failed", request_id, exc_info=error)
    return ApiError(500, "the server failed at this request: see its log")


class EventStream(Response):
    """A response of server-sent events. It closes their generation when they end or the client disconnects."""

    def __init__(
        self, generation: Generation, events: Events, error_event: Callable[[ApiError], bytes], request_id: str
    ):
        self.status_code = 200
        self.background = None
        self._generation = generation
        self._events = events
        self._error_event = error_event
        self._request_id = request_id  # for the log
        self._sent_at = _now()
        self.init_headers({"content-type": EVENT_STREAM, "cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send_unless_gone(receive, self._send(send), self._keep_alive(send))
        finally:
            await self._generation.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for data in self._events:
                self._sent_at = _now()
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:  # the status has been sent already
            data = self._error_event(as_api_error(error, self._request_id))
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            if _now() - self._sent_at > KEEP_ALIVE_SECONDS / 2:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})


async def respond(
    request: Request,
    service: Service,
    requests: Sequence[GenerationRequest],
    whole: Callable[[list[RequestOutput]], Any],
    events: Callable[[Generation], Events] | None = None,
    error_event: Callable[[ApiError], bytes] = error_event,
    forced_calls: Callable[[], Sequence[ForcedCall]] = tuple,
) -> Response:
    """Answers the HTTP `request`, for which the engine completes `requests`.

    If it streams, the answer consists of the `events` of the generation, otherwise it is `whole` of the last outputs.
    Endpoints that never stream have no `events`.
    What the request asked for and cannot be enforced is in the header x-warnings, as a JSON list. So is what the
    `forced_calls` of the answer break of it; a stream tells that in a comment at its end.
    """
    params = requests[0].params
    if (session_id := request.headers.get(SESSION_HEADER)) and requests[0].session_id is None:
        requests = [replace(one, session_id=session_id) for one in requests]
    generation = await unless_gone(request, Generation.start(service, requests))
    broken: list[str] = []
    response: Response
    if events is not None and params.output_kind is RequestOutputKind.DELTA:
        sent = events(generation)
        if generation.warnings:
            sent = _with_check(sent, lambda: service.argument_check.warnings(forced_calls()))
        response = EventStream(generation, sent, error_event, RequestId.of(request).text)
    else:
        async with generation:
            outputs = await unless_gone(request, generation.results())
            response = await whole_answer(requests[0], lambda: whole(outputs))
            if generation.warnings:
                broken = await unless_gone(request, service.argument_check.warnings(forced_calls()))
    if generation.warnings:
        response.headers["x-warnings"] = _as_header(broken + generation.warnings)
    return response


async def _with_check(events: Events, check: Callable[[], Awaitable[list[str]]]) -> Events:
    """Yields `events` and, if the calls in them break a rule, a comment that says so. Clients skip comments."""
    async for data in events:
        yield data
    if broken := await check():
        yield b": x-warnings " + _as_header(broken).encode() + b"\n\n"


def _as_header(texts: Sequence[str]) -> str:
    """Returns `texts` as a JSON list in ASCII, without those that are too many for a header."""
    listed: list[str] = []
    for text in texts:
        if len(json.dumps([*listed, text])) > MAX_HEADER_CHARS:
            break
        listed.append(text)
    return json.dumps(listed)


def _now() -> float:
    # The event loop's clock, which asyncio.sleep uses too.
    return asyncio.get_running_loop().time()
