"""X-Request-Id: one id for a request in the logs of the client, the proxies and this server, and in the answer."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from uuid import uuid4

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
# UUIDs, base64, and the trace ids of W3C and Amazon have no other characters. The length is that of `request_id` in a
# body.
_SANE = re.compile(rb"[A-Za-z0-9._:=+/@-]{1,128}")


@dataclass(frozen=True)
class RequestId:
    """The id of one HTTP request: the client's own, or one that was generated here."""

    text: str
    is_given: bool = False  # whether the client sent it; it may send the same id with several requests

    @classmethod
    def read(cls, headers: Iterable[tuple[bytes, bytes]]) -> "RequestId":
        """Returns the id in `headers`. If there is none, or several, or one that is unsafe to log, makes a new one."""
        given = [value for name, value in headers if name == HEADER]
        if len(given) == 1 and _SANE.fullmatch(given[0]):
            return cls(given[0].decode(), is_given=True)
        return cls(uuid4().hex)

    @classmethod
    def of(cls, request: Request) -> "RequestId":
        """Returns the id that `RequestIds` gave to `request`."""
        found = request.state.request_id
        assert isinstance(found, cls)
        return found

    def names(self, prefix: str, asked: str | None = None) -> tuple[str, str]:
        """Returns the id of the answer and the id of the request in the engine. Both are `asked`, the body's, if given.

        As in vLLM, the answer's id is `prefix` and the X-Request-Id. The engine's ids must differ from each other, but
        several requests may have the same header: then each gets a random suffix.
        """
        if asked is not None:
            return asked, asked
        name = prefix + self.text
        return name, f"{name}-{uuid4().hex[:16]}" if self.is_given else name


class RequestIds:
    """ASGI middleware that gives every request its `RequestId`, and every response the header."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = RequestId.read(scope["headers"])
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (HEADER, request_id.text.encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)
