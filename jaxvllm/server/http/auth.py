"""API keys. Every path needs a key unless it is listed here as open."""

import hmac
from collections.abc import Iterable
from hashlib import sha256

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxvllm.server.errors import ApiError

# Health checks, and the page that asks for a key: a browser must load it before it has a key to send.
OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/"})
OPEN_FOLDER = "/playground/static/"
# A request without these headers has no body (RFC 9112, 6.3).
BODY_HEADERS = (b"content-length", b"transfer-encoding")


class Keys:
    """The keys that open something. Where there are none, it is open to all."""

    def __init__(self, keys: Iterable[str]):
        self._digests = [_digest(key.encode()) for key in keys]

    def open_to(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Returns whether a request with these headers may come in."""
        # The digests have the same length, and all of them are compared, so the time reveals nothing about a key.
        found = [
            hmac.compare_digest(_digest(key), digest)
            for name, value in headers
            if (key := _key_in(name, value)) is not None
            for digest in self._digests
        ]
        return not self._digests or any(found)


class Auth:
    """ASGI middleware that answers requests without one of the keys with 401, even for paths that do not exist.

    Clients send a key as `Authorization: Bearer KEY`, or as `x-api-key: KEY`, which is Anthropic's way.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], open_metrics: bool = False):
        self._app = app
        self._keys = Keys(keys)
        self._open_paths = OPEN_PATHS | {"/metrics"} if open_metrics else OPEN_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close"})
        elif self._is_open(scope) or self._keys.open_to(scope["headers"]):
            await self._app(scope, receive, send)
        else:
            message = "this server needs an API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            await ApiError(401, message, code="invalid_api_key").response(scope)(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        """Returns whether the request needs no key: its path is open, and it has no body for the server to read."""
        path = scope["path"]
        is_listed = path in self._open_paths or (path.startswith(OPEN_FOLDER) and ".." not in path)
        has_body = any(name in BODY_HEADERS and value != b"0" for name, value in scope["headers"])
        return is_listed and scope["method"] in ("GET", "HEAD") and not has_body


class AdminOnly:
    """A dependency of endpoints that change the server for everybody. It refuses requests without an admin key.

    It has no effect on a server without such keys. `Auth` knows these keys, too.
    """

    def __init__(self, keys: Iterable[str]):
        self._keys = Keys(keys)

    async def __call__(self, request: Request) -> None:
        if not self._keys.open_to(request.headers.raw):
            raise ApiError(403, "this endpoint changes the server for everybody, and needs an admin key of the server")


def _key_in(name: bytes, value: bytes) -> bytes | None:
    if name == b"x-api-key":
        return value.strip()
    if name == b"authorization":
        scheme, _, key = value.strip().partition(b" ")
        return key.strip() if scheme.lower() == b"bearer" else None
    return None


def key_digest(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Returns a hash of the keys in `headers`: what is stored for one key must not be shown to another.

    All of them count, so that nobody with a key of their own can try others beside it. Requests without a key, which a
    server without keys takes, have one hash.
    """
    keys = {key for name, value in headers if (key := _key_in(name, value)) is not None}
    return _digest(b"\n".join(sorted(keys)))


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()
