"""Connections to the server under load. They are as cheap as Python allows, because they share the server's machine.

A connection is one asyncio protocol without layers, and takes a third of httpx's time for a chunk of a stream
(docs/benchmarking.md has the figures). It parses HTTP/1.1 responses as they arrive (RFC 9112).
"""

import asyncio
import ssl
import time
from typing import Protocol
from urllib.parse import urlsplit


class ResponseReader:
    """Extracts the bytes of the body from the bytes of a socket. Raises ValueError for data that is not HTTP.

    `status` is 0 until the head has arrived. `done` becomes true when the body is complete; without a length, that is
    when the connection ends. `reusable` says whether the connection may carry another request.
    """

    def __init__(self) -> None:
        self.status = 0
        self.done = False
        self.reusable = False
        self._rest = b""
        self._is_chunked = False
        self._remaining: int | None = None  # bytes that a body with a length lacks; None: it has no length

    def feed(self, data: bytes) -> bytes:
        """Returns the bytes of the body that `data` completes. A body that is sent in chunks comes in whole chunks."""
        self._rest += data
        if not self.status and not self._read_head():
            return b""
        if self._is_chunked:
            return self._read_chunks()
        body, self._rest = self._rest[: self._remaining], b""
        if self._remaining is not None:
            self._remaining -= len(body)
            self.done = self._remaining == 0
        return body

    def end(self) -> None:
        """Takes note that the connection has ended. Raises ValueError when the response is incomplete."""
        if not self.status or self._is_chunked or self._remaining is not None:
            raise ValueError("the connection ended within the response" if self.status else "no response")
        self.done = True

    def _read_head(self) -> bool:
        head, blank, self._rest = self._rest.partition(b"\r\n\r\n")
        if not blank:
            self._rest = head
            return False
        first, *lines = head.split(b"\r\n")
        version, _, status = first.partition(b" ")
        if not (version.startswith(b"HTTP/1.") and status[:3].isdigit()):
            raise ValueError(f"the server does not speak HTTP/1: {first[:80]!r}")
        if status.startswith(b"1"):  # an interim response, such as 100 Continue
            return self._read_head()
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        self._is_chunked = fields.get(b"transfer-encoding", b"").lower().endswith(b"chunked")
        if not self._is_chunked and b"content-length" in fields:
            self._remaining = int(fields[b"content-length"])
            self.done = self._remaining == 0
        framed = self._is_chunked or self._remaining is not None
        self.reusable = framed and version == b"HTTP/1.1" and fields.get(b"connection", b"").lower() != b"close"
        self.status = int(status[:3])
        return True

    def _read_chunks(self) -> bytes:
        """Returns the bytes of all complete chunks. Chunks are small here: one or a few events."""
        rest, at, pieces = self._rest, 0, []
        while (end := rest.find(b"\r\n", at)) >= 0:
            size = int(rest[at:end].partition(b";")[0], 16)
            if size == 0:
                self.done = rest.find(b"\r\n\r\n", end) >= 0  # trailers, if any, are skipped
                break
            stop = end + 2 + size
            if len(rest) < stop + 2:
                break
            pieces.append(rest[end + 2 : stop])
            at = stop + 2
        self._rest = rest[at:]
        return b"".join(pieces)


class Receiver(Protocol):
    """Takes the body of a response as it arrives."""

    def receive(self, status: int, data: bytes, now: float) -> None:
        """Takes the next bytes. `now` is the time.perf_counter() at which the socket delivered them."""


class ReusedConnection(asyncio.Protocol):
    """A connection for one exchange after the other. A failed one raises ConnectionError or ValueError."""

    def __init__(self) -> None:
        self.is_open = True
        self.heard = False  # whether the current exchange has received any byte
        self._transport: asyncio.Transport | None = None
        self._response = ResponseReader()
        self._receiver: Receiver | None = None
        self._finished: asyncio.Future[None] | None = None

    async def exchange(self, request: bytes, receiver: Receiver) -> None:
        """Sends the request and waits until the response is complete. If cancelled, it closes the connection."""
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
            self._transport.abort()  # closes at once, so that the server sees that nobody reads

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._receiver is None:  # the server sends data without a request
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
    """Connections to one server. Each is used again when its response is complete."""

    def __init__(self, base_url: str):
        address = urlsplit(base_url)
        assert address.hostname is not None, "Server has checked it"
        self._ssl = ssl.create_default_context() if address.scheme == "https" else None
        self._host = address.hostname
        self._port = address.port or (443 if self._ssl else 80)
        self._idle: list[ReusedConnection] = []

    async def exchange(self, request: bytes, receiver: Receiver) -> None:
        """Sends a request and receives its response. Raises OSError or ValueError when that fails."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_open:
                continue
            try:
                await self._exchange(connection, request, receiver)
                return
            except ConnectionError:
                # The server may close an idle connection at the moment when it is used again, which is no error.
                if connection.heard:
                    raise
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(ReusedConnection, self._host, self._port, ssl=self._ssl)
        await self._exchange(connection, request, receiver)

    async def _exchange(self, connection: ReusedConnection, request: bytes, receiver: Receiver) -> None:
        await connection.exchange(request, receiver)
        if connection.is_open:
            self._idle.append(connection)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
