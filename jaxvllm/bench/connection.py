"""Connections to the server under load, as cheap as Python allows: they share the machine with it.

One asyncio protocol per connection and no layers: a chunk of a stream costs a third of what httpx takes for it
(docs/benchmarking.md has the figures).
"""

import asyncio
import ssl
import time
from typing import Protocol
from urllib.parse import urlsplit

from jaxvllm.bench.response import ResponseReader


class Receiver(Protocol):
    """Takes the body of a response as it arrives."""

    def receive(self, status: int, data: bytes, now: float) -> None:
        """`now` is the time.perf_counter() at which the socket gave the bytes."""


class Connection(asyncio.Protocol):
    """A connection that carries one exchange after the other. ConnectionError and ValueError when one fails."""

    def __init__(self) -> None:
        self.is_open = True
        self.heard = False  # whether the current exchange got any byte
        self._transport: asyncio.Transport | None = None
        self._response = ResponseReader()
        self._receiver: Receiver | None = None
        self._finished: asyncio.Future[None] | None = None

    async def exchange(self, request: bytes, receiver: Receiver) -> None:
        """Sends the request and returns when the response is whole. Cancelled, it closes the connection."""
        assert self._transport is not None and self._finished is None
        self._response, self._receiver, self.heard = ResponseReader(), receiver, False
        self._finished = asyncio.get_running_loop().create_future()
        try:
            self._transport.write(request)
            await self._finished
        except BaseException:
            self.close()
            raise
        finally:
            self._finished = self._receiver = None
        if not self._response.reusable:
            self.close()

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()  # at once: the server is to see that nobody listens

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._receiver is None:  # a server that speaks unasked
            self.close()
            return
        self.heard = True
        try:
            if body := self._response.feed(data):
                self._receiver.receive(self._response.status, body, now)
        except Exception as error:
            self._finish(error)
            return
        if self._response.done:
            self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        try:
            if exc is None:
                self._response.end()
            self._finish(exc)
        except ValueError as error:
            self._finish(ConnectionError(str(error)))

    def _finish(self, error: Exception | None) -> None:
        if self._finished is None or self._finished.done():
            return
        if error is None:
            self._finished.set_result(None)
        else:
            self._finished.set_exception(error)


class ConnectionPool:
    """Connections to one server, each used again when its response is whole."""

    def __init__(self, base_url: str):
        address = urlsplit(base_url)
        assert address.hostname is not None, "Server has checked it"
        self._ssl = ssl.create_default_context() if address.scheme == "https" else None
        self._host = address.hostname
        self._port = address.port or (443 if self._ssl else 80)
        self._idle: list[Connection] = []

    async def exchange(self, request: bytes, receiver: Receiver) -> None:
        """One request and its response. OSError or ValueError when that fails."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_open:
                continue
            try:
                await self._exchange(connection, request, receiver)
                return
            except ConnectionError:
                # The server may close an idle connection in the moment it is used again: no fault of either.
                if connection.heard:
                    raise
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._ssl)
        await self._exchange(connection, request, receiver)

    async def _exchange(self, connection: Connection, request: bytes, receiver: Receiver) -> None:
        await connection.exchange(request, receiver)
        if connection.is_open:
            self._idle.append(connection)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
