"""Limits of a request: its size, the time that it may take to arrive, and JSON as its only format."""

import asyncio
from collections.abc import Iterable

from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxvllm.server.errors import ApiError
from jaxvllm.server.http.auth import BODY_HEADERS
from jaxvllm.server.http.strict_json import JsonError, check_json

# The largest head: request line and headers. Cookies and tokens of a company's proxies take 8 KiB, and never 64 KiB.
MAX_HEAD_BYTES = 64 * 2**10
# The time for the body to arrive: 8 MB at 2 Mbit/s.
BODY_SECONDS = 30.0
# The bytes of a too large body that are read and discarded: a client that is still sending would never see the error.
DISCARDED_BYTES = 64 * 2**20
# The most bytes of all bodies that are in memory at once: 4,096 connections could bring 32 GB.
MAX_HELD_BYTES = 2**30
# The largest body that is checked directly, within 3 ms. A larger one is checked in a thread.
SMALL_BODY = 2**16
_JSON = b"application/json"
# Headers that decide who the client is, what it wants, and where the body ends. Each may be there only once.
_SINGLE_HEADERS = frozenset(
    {
        b"authorization",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"host",
        b"transfer-encoding",
        b"x-api-key",
    }
)


class StrictHead:
    """ASGI middleware that passes on only requests whose head all proxies and servers interpret in the same way.

    It answers 400 when Host is missing or a header that must be unique is repeated, because a proxy may have obeyed the
    other one. It answers 431 when the head is too large.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                _check_head(scope)
        except ApiError as error:
            await error.response(scope)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class RequestLimits:
    """ASGI middleware that reads the whole body and passes on only strict JSON within the limits.

    It answers 413 when a body is too large, 408 (and closes the connection) when it does not arrive, 415 when it is not
    JSON, 400 when `check_json` refuses it, and 503 while all bodies together take too much memory.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_body_bytes: int,
        body_seconds: float = BODY_SECONDS,
        max_held_bytes: int = MAX_HELD_BYTES,
    ):
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._body_seconds = body_seconds
        self._max_held_bytes = max_held_bytes
        self._num_held = 0  # bytes of the bodies of all current requests
        self._checking = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        parts: list[bytes] = []
        try:
            try:
                passed_on = await self._receive(scope, receive, parts)
            except ApiError as error:
                response = error.response(scope)
                if error.status == 408:
                    response.headers["connection"] = "close"
                await response(scope, receive, send)
                return
            if passed_on is not None:
                await self._app(scope, passed_on, send)
        finally:
            self._num_held -= sum(map(len, parts))

    async def _receive(self, scope: Scope, receive: Receive, parts: list[bytes]) -> Receive | None:
        """Reads the body into `parts`. Returns a `receive` that delivers it, or None if the client disconnects."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if not any(name in headers for name in BODY_HEADERS):
            return receive
        self._check_announced(headers)
        if not await self._read(receive, parts):
            return None
        parts[:] = [b"".join(parts)]
        body = parts[0]
        if body:
            _check_kind(headers)
            await self._check_json(body)
        return _replay(body, receive)

    def _check_announced(self, headers: dict[bytes, bytes]) -> None:
        if headers.get(b"transfer-encoding", b"chunked").strip().lower() != b"chunked":
            raise ApiError(400, "transfer-encoding must be chunked")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            raise ApiError(400, "content-length is not a number")
        # The number of digits is checked first, because Python refuses to read a number of 5,000 digits.
        if len(length) > 18 or int(length) > max(self._max_body_bytes, DISCARDED_BYTES):
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_body_bytes} bytes: shorten it, or split the request")

    async def _check_json(self, body: bytes) -> None:
        try:
            if len(body) <= SMALL_BODY:
                check_json(body)
            else:
                # Only one body is checked at a time: each check stops the event loop for up to 0.1 s, and the loop must
                # run between two of them.
                async with self._checking:
                    await run_in_threadpool(check_json, body)
        except JsonError as error:
            raise ApiError(400, str(error), param=error.param) from None

    async def _read(self, receive: Receive, parts: list[bytes]) -> bool:
        """Reads the body into `parts`. Returns False when the client disconnects before it is complete."""
        size = 0
        try:
            async with asyncio.timeout(self._body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    part = message.get("body", b"")
                    size += len(part)
                    is_last = not message.get("more_body", False)
                    if size > self._max_body_bytes:
                        self._num_held -= sum(map(len, parts))
                        parts.clear()
                        if is_last or size > DISCARDED_BYTES:
                            raise self._too_large()
                    else:
                        parts.append(part)
                        self._num_held += len(part)
                        if self._num_held > self._max_held_bytes:
                            raise ApiError(503, "the server has too many large requests at once: try again later")
                    if is_last:
                        return True
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self._body_seconds:g} seconds") from None


def _check_head(scope: Scope) -> None:
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    if scope["http_version"] == "1.1" and not any(name == b"host" for name, _ in headers):
        raise ApiError(400, "the Host header is missing")
    names = [name for name, _ in headers if name in _SINGLE_HEADERS]
    if len(names) > len(set(names)):
        name = next(name for name in names if names.count(name) > 1).decode()
        raise ApiError(400, f"the request has {names.count(name.encode())} headers {name}: send one")
    size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    if size + sum(len(name) + len(value) + 4 for name, value in headers) > MAX_HEAD_BYTES:
        raise ApiError(431, f"the request's head is larger than {MAX_HEAD_BYTES} bytes")


def _check_kind(headers: dict[bytes, bytes]) -> None:
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding != b"identity":
        raise ApiError(415, "content-encoding is not supported: send the body without it")
    kind, _, parameters = headers.get(b"content-type", b"").partition(b";")
    if kind.strip().lower() != _JSON:
        raise ApiError(415, "content-type must be application/json")
    if b"charset" in parameters.lower() and b"utf-8" not in parameters.lower():
        raise ApiError(415, "the charset of JSON must be utf-8")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that delivers `body` first, and then later messages: that the client has disconnected."""
    replayed = False

    async def receive_again() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again
