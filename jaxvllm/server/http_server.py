"""uvicorn as we run it."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp

from jaxvllm.server.config import ServerConfig
from jaxvllm.server.connection import Connection, ConnectionLimits, OpenConnections

# Answers that are on their way when the server ends, error events above all.
LAST_ANSWERS_SECONDS = 2
# For connections that were cut to be gone.
CLOSING_SECONDS = 0.5


class HttpServer(uvicorn.Server):
    """Serves `app`, watches its connections, and leaves signals to others. ValueError for a bad certificate."""

    def __init__(self, app: ASGIApp, config: ServerConfig, limits: ConnectionLimits):
        settings = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=config.access_log,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=limits.keep_alive_seconds,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
        )
        try:
            settings.load()
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"ssl_certfile and ssl_keyfile cannot be used: {error.strerror or error}") from None
        super().__init__(settings)
        self.server_state = OpenConnections(limits)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        if counter % 10 == 0:
            for connection in list(self.server_state.connections):
                assert isinstance(connection, Connection)
                connection.check(connection.loop.time())
        return await super().on_tick(counter)

    @contextlib.asynccontextmanager
    async def running(self, listener: socket.socket) -> AsyncIterator[asyncio.Task[None]]:
        """Serves inside; afterwards every connection ends, at the latest when its answer has had its time."""
        serving = asyncio.create_task(self.serve([listener]))
        try:
            yield serving
        finally:
            self.should_exit = True
            await asyncio.wait((serving,), timeout=LAST_ANSWERS_SECONDS)
            self.hurry()
            # It waits for TLS handshakes that clients began, too: a minute, and out of `hurry`'s reach.
            await asyncio.wait((serving,), timeout=CLOSING_SECONDS)
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving

    def hurry(self) -> None:
        """Ends every connection now, whatever is on its way."""
        self.force_exit = True
        for connection in list(self.server_state.connections):
            assert isinstance(connection, Connection)
            connection.transport.abort()
