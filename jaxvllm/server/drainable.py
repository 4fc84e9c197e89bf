"""`Drainable`: what counts its open requests, so that they can finish before it ends."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from jaxvllm.server.errors import ApiError
from jaxvllm.server.http.http_config import HttpConfig


class Drainable:
    """Counts the requests that are open, and takes no more of them once it drains. It needs no running loop."""

    def __init__(self, config: HttpConfig) -> None:
        self.config = config
        self.draining = False
        self.num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def drain(self) -> None:
        """Stops taking new requests."""
        self.draining = True

    async def idle(self) -> None:
        """Waits until no request is open."""
        await self._idle.wait()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Counts a request as open inside the context. Raises ApiError during shutdown."""
        if self.draining:
            raise ApiError(503, "the server is shutting down")
        self.num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            if not self.num_open:
                self._idle.set()
