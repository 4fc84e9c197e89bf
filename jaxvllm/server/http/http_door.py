"""`HttpDoor`: the way into every application of this project. What listens for HTTP clients does it by this class."""

import logging
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from jaxvllm.server.http.http_config import HttpConfig, read_keys
from jaxvllm.server.http.listener import RESERVED_FILES, is_open_to_strangers, listen, raise_file_limit, url_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from jaxvllm.server.http.http_server import HttpServer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HttpDoor:
    """A socket at which clients connect, and the rules that hold for all of them, whatever application answers."""

    listener: socket.socket
    config: HttpConfig
    keys: tuple[str, ...] = field(repr=False)
    is_local: bool  # no other machine can connect
    max_files: int  # that this process may have open

    @classmethod
    @contextmanager
    def opened(cls, config: HttpConfig) -> Iterator["HttpDoor"]:
        """Listens inside the context. Clients may connect at once, and wait until a server is `running`.

        Raises ValueError when a key cannot be used, and OSError when it cannot listen on the address.
        """
        keys, max_files = read_keys(config), raise_file_limit()
        with listen(config.host, config.port, max_files) as listener:
            door = cls(listener, config, keys, not is_open_to_strangers(listener), max_files)
            if not keys and not door.is_local:
                logger.warning(
                    "no --api-key is set, so every client that can reach %s may use this server: only your network and "
                    "its firewall protect it. Give --api-key-file FILE, or --host 127.0.0.1 for this machine alone",
                    door.url,
                )
            yield door

    @property
    def url(self) -> str:
        """The address for a browser."""
        return url_of(self.listener, self.config)

    def server(
        self, app: "ASGIApp", around: "Callable[[ASGIApp], ASGIApp]" = lambda app: app, files_each: int = 1
    ) -> "HttpServer":
        """Returns a server that answers with `app`, behind all guards. `around` is put around these.

        `files_each`: files that the answer to one client takes. A proxy has a second connection for each.
        """
        # Imported here, because it takes 0.2 s, and the server's engine has begun to start by then.
        from jaxvllm.server.http.connection import ConnectionLimits
        from jaxvllm.server.http.http_server import HttpServer
        from jaxvllm.server.http.root_path import RootPath

        limits = ConnectionLimits()
        most = min(limits.max_connections, max(1, (self.max_files - RESERVED_FILES) // files_each))
        answering = around(guarded(app, self.config, self.keys, self.is_local))
        if self.config.root_path:
            answering = RootPath(answering, self.config.root_path)
        return HttpServer(answering, self.config, replace(limits, max_connections=most))


def guarded(app: "ASGIApp", config: HttpConfig, keys: Iterable[str], is_local: bool = False) -> "ASGIApp":
    """Returns `app` behind its guards. No body is read of a client that has no key.

    Without keys, a server that `is_local` (no other machine can reach it) answers only requests for its own names.
    """
    from starlette.applications import Starlette
    from starlette.middleware.cors import CORSMiddleware

    from jaxvllm.server.endpoints import KnownEndpoints
    from jaxvllm.server.http.auth import Auth
    from jaxvllm.server.http.request_id import RequestIds
    from jaxvllm.server.http.request_limits import RequestLimits, StrictHead
    from jaxvllm.server.http.trusted_host import TrustedHost

    limited: ASGIApp = RequestLimits(app, config.max_body_bytes)
    if isinstance(app, Starlette):  # a path that does not exist is told before the rules for its body
        limited = KnownEndpoints(limited, app.routes, getattr(app.state, "around_refusals", lambda refusal: refusal))
    app = Auth(limited, keys, config.open_metrics)
    if config.allowed_origins:
        # Around `Auth`, because a browser asks without a key whether a page may send one, and because a page may read
        # that its key is wrong. Inside `TrustedHost`, which no origin can open.
        app = CORSMiddleware(
            app,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    if not keys and is_local and "*" not in config.allowed_host:
        app = TrustedHost(app, (config.host, *config.allowed_host))
    return RequestIds(StrictHead(app))
