"""Forwards requests to servers, and answers to clients, without what belongs to one connection."""

from collections.abc import AsyncIterable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Self

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxvllm.server.errors import ApiError
from jaxvllm.server.http import request_id
from jaxvllm.server.http.disconnect import send_unless_gone
from jaxvllm.server.http.request_id import RequestId

# Headers that belong to one connection (RFC 9110, 7.6.1), or that are written anew. `Expect` was obeyed here already.
_OF_CONNECTION = frozenset(
    (
        b"connection",
        b"content-length",
        b"expect",
        b"host",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        request_id.HEADER,
    )
)
# Answers may be silent for as long as a request waits in a queue. A server that is gone closes the connection.
CONNECT_SECONDS = 5.0

type Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class ForwardedRequest:
    """A client's request, as any server may get it. Its header values are the client's bytes."""

    method: str
    target: bytes  # path and query, as the client has written them
    headers: Headers
    body: bytes

    @classmethod
    async def read(cls, request: Request) -> Self:
        """Reads a request, which `HttpDoor` has checked. All servers get its X-Request-Id."""
        headers = [*_without_connection(request.headers.raw), (request_id.HEADER, RequestId.of(request).text.encode())]
        query = request.scope["query_string"]
        target = request.scope["raw_path"] + (b"?" + query if query else b"")
        return cls(request.method, target, headers, await request.body())

    def header(self, name: bytes) -> str | None:
        """Returns the value of a header, or None if there is none."""
        return next((value.decode("latin-1") for each, value in self.headers if each == name), None)

    async def send(
        self, client: httpx.AsyncClient, server: str, seconds: float | None = None, is_streamed: bool = False
    ) -> httpx.Response:
        """Sends it to the server at a URL, and waits `seconds` at most for each part of the answer.

        Raises ApiError for a request that cannot be sent to any server, and httpx.TransportError if the server is at
        fault.
        """
        timeout = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
        base = httpx.URL(server)
        try:
            request = httpx.Request(
                self.method,
                base.copy_with(raw_path=base.raw_path.rstrip(b"/") + self.target),
                # Not by `client.build_request`, which would add a client's own headers, and cookies of other answers.
                headers=self.headers,
                content=self.body,
                extensions={"timeout": timeout.as_dict()},
            )
            return await client.send(request, stream=is_streamed)
        except (httpx.InvalidURL, httpx.LocalProtocolError, UnicodeError):  # raised here, whatever server it is for
            raise ApiError(400, "the path or a header has characters that no server takes: leave them out") from None


class ForwardedAnswer(Response):
    """A server's answer, which is sent part by part as `parts` come. Closes `stack` at the end, however it ends."""

    def __init__(self, answer: httpx.Response, parts: AsyncIterable[bytes], stack: AsyncExitStack):
        self.status_code = answer.status_code
        self.background = None
        self.raw_headers = _without_connection(answer.headers.raw)
        self._parts = parts
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            await send_unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for part in self._parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except httpx.TransportError:
            return  # closes the connection without the body's end: a part of it must not be taken for the whole
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _without_connection(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Returns headers in lower case, without those of one connection and those that its Connection names."""
    lower = [(name.lower(), value) for name, value in headers]
    named = [value for name, value in lower if name == b"connection"]
    dropped = _OF_CONNECTION | {token.strip().lower() for value in named for token in value.split(b",")}
    return [(name, value) for name, value in lower if name not in dropped]
