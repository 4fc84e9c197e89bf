"""`HttpServer`: uvicorn with our connections and without its signal handlers."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp

from jaxvllm.server.http.connection import Connection, ConnectionLimits, OpenConnections
from jaxvllm.server.http.http_config import HttpConfig

# The time to finish sending answers when the server ends. Most of them are error events.
LAST_ANSWERS_SECONDS = 2
# The time for aborted connections to close.
CLOSING_SECONDS = 0.5


class HttpServer(uvicorn.Server):
    """Serves `app`, watches its connections, and does not handle signals. Raises ValueError for a bad certificate."""

    def __init__(self, app: ASGIApp, config: HttpConfig, limits: ConnectionLimits):
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
        """Checks all connections once a second. uvicorn calls it ten times a second."""
        if counter % 10 == 0:
            for connection in list(self.server_state.connections):
                assert isinstance(connection, Connection)
                connection.check(connection.loop.time())
        return await super().on_tick(counter)

    @contextlib.asynccontextmanager
    async def running(self, listener: socket.socket) -> AsyncIterator[asyncio.Task[None]]:
        """Serves inside the context. Afterwards it ends all connections, and gives their answers a little time."""
        serving = asyncio.create_task(self.serve([listener]))
        try:
            yield serving
        finally:
            self.should_exit = True
            await asyncio.wait((serving,), timeout=LAST_ANSWERS_SECONDS)
            self.hurry()
            # uvicorn also waits for TLS handshakes that clients began: for a minute, and `hurry` cannot end them.
            await asyncio.wait((serving,), timeout=CLOSING_SECONDS)
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving

    def hurry(self) -> None:
        """Ends every connection now, even while an answer is being sent."""
        self.force_exit = True
        for connection in list(self.server_state.connections):
            assert isinstance(connection, Connection)
            connection.transport.abort()
