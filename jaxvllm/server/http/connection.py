"""A client's connection, with limits to the time that the server waits: for heads, for bodies and for reading."""

import asyncio
import logging
import re
from dataclasses import dataclass

from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from jaxvllm.server.errors import ApiError
from jaxvllm.server.http.listener import RESERVED_FILES, WARNING_SECONDS
from jaxvllm.server.http.request_id import HEADER, RequestId
from jaxvllm.server.http.request_limits import BODY_SECONDS, MAX_HEAD_BYTES

# Java's client offers HTTP/2 with every request, and then llhttp takes the body for data of another protocol. We speak
# only HTTP/1.1, so the header is renamed to a meaningless one of the same length. No JSON body can have such a line.
_OFFER = re.compile(rb"\r\nUpgrade:", re.IGNORECASE)
# The time to read and refuse the request of a connection beyond the most that may be open.
REFUSAL_SECONDS = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits to what connections may cost the server."""

    max_connections: int = 4096  # open at once; the server must be able to open as many files
    head_seconds: float = 10.0  # time for request line and headers, from the first byte
    message_seconds: float = BODY_SECONDS + 5  # time for the body; the middleware that reads it times out before that
    # Time that a connection may be idle. It is above the 60 s of the usual proxies, so that they close first: a request
    # that is sent while the other side closes is lost.
    keep_alive_seconds: int = 75
    write_seconds: float = 30.0  # time in which the client reads no byte although there are some to read
    max_head_bytes: int = MAX_HEAD_BYTES  # size of an incomplete head; `RequestLimits` checks complete ones


class OpenConnections(ServerState):
    """The state that the connections of one server share: their limits, and which of them are idle."""

    def __init__(self, limits: ConnectionLimits):
        super().__init__()
        self.limits = limits
        self.idle: dict[Connection, None] = {}  # longest idle first; a connection without a complete head is idle
        self._warn_from = 0.0  # time of the loop's clock from which the next warning may be logged

    def make_room(self) -> bool:
        """Closes the connection that has been idle longest. Returns False when none is idle."""
        now = asyncio.get_running_loop().time()
        if now >= self._warn_from:
            self._warn_from = now + WARNING_SECONDS
            logger.warning(
                "%d connections are open, which is the most: idle ones are closed for new ones, and if none is idle, "
                "new ones get 503. Raise the limit of open files (ulimit -n) if it is below %d",
                self.limits.max_connections,
                ConnectionLimits.max_connections + RESERVED_FILES,
            )
        # A connection that is still sending its last answer is not idle.
        connection = next((one for one in self.idle if not one.transport.get_write_buffer_size()), None)
        if connection is None:
            return False
        del self.idle[connection]
        connection.transport.close()
        return True


class Connection(HttpToolsProtocol):
    """uvicorn's connection with time limits: `check` ends it when the client is too slow. Its errors are JSON."""

    server_state: OpenConnections

    @property
    def limits(self) -> ConnectionLimits:
        return self.server_state.limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_refused = len(self.connections) > self.limits.max_connections and not self.server_state.make_room()
        if not self._is_refused:
            self.server_state.idle[self] = None
        self._in_head = False
        self._in_message = False
        # Bytes of an incomplete message since the last bytes of a body: of its head, chunk sizes and trailers.
        self._overhead_bytes = 0
        self._answered: RequestResponseCycle | None = None
        # The error that ends the connection once the requests before it are answered. Nothing more is read.
        self._last_error: ApiError | None = None
        # The time by which the client must act; None while the server must act.
        self._due: float | None = None
        self._wait_for_client(REFUSAL_SECONDS if self._is_refused else self.limits.head_seconds)
        self._unsent = 0
        self._sent_at = self.loop.time()

    def check(self, now: float) -> None:
        """Ends the connection if the client is late. To be called about once a second, with the loop's time."""
        if self._due is not None and now > self._due:
            if self._in_head:
                self._end_with(ApiError(408, f"the head did not arrive within {self.limits.head_seconds:g} seconds"))
            elif self.cycle is not None and not self.cycle.response_complete:
                self.transport.abort()  # the body is late, and the application no longer reads it
            else:
                self.transport.close()
            self._due = None
        # The buffer shrinks whenever the client reads: above 64 KiB it is not refilled until it is below 16 KiB.
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent < self._unsent:
            self._sent_at = now
        elif now - self._sent_at > self.limits.write_seconds:
            self.transport.abort()
        self._unsent = unsent

    # ---- called by uvicorn and its parser ----

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._end_with(ApiError(503, "too many connections are open: try again later"))
            return
        if self._last_error is not None:
            return
        was_in_message = self._in_message
        self._overhead_bytes += len(data)
        super().data_received(_OFFER.sub(b"\r\nX-Offer:", data))
        if was_in_message and self._in_message and self._overhead_bytes > self.limits.max_head_bytes:
            self._end_with(ApiError(431, f"the head is larger than {self.limits.max_head_bytes} bytes"))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.server_state.idle.pop(self, None)
        # uvicorn notifies only the latest request. When requests are pipelined, an earlier one is being answered.
        if self._answered is not None:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        if cycle.scope["http_version"] == "1.0":
            app = _without_chunks(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._in_message = True
        self._overhead_bytes = 0
        if self.pipeline:
            self._due = None  # reading stops until the requests before it are answered
        else:
            self._wait_for_client(self.limits.head_seconds)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # otherwise it is a trailer, which is ignored and must not be taken for a header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():  # `_OFFER` was split over two reads; what follows is not parsed as HTTP
            self._end_with(ApiError(400, "this server speaks HTTP/1.1 only: leave out Upgrade"))
            return
        super().on_headers_complete()
        self._in_head = False
        self.server_state.idle.pop(self, None)
        if self.pipeline:
            self._due = None  # its body stays unread until the requests before it are answered
        else:
            self._wait_for_client(self.limits.message_seconds)

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._overhead_bytes = 0

    def on_message_complete(self) -> None:
        if self.transport.is_closing() or self._last_error is not None:
            return
        super().on_message_complete()
        self._in_message = False
        self._due = None
        if self.cycle.response_complete:  # it was answered before it was complete, so the connection is idle from now
            self._wait_for_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._last_error is not None:
            if not self._is_answering:
                self._end_with(self._last_error)
        elif self.cycle.more_body:
            self._wait_for_client(self.limits.message_seconds)
        elif self.cycle.response_complete:
            self._wait_for_request()

    def send_400_response(self, msg: str) -> None:
        self._end_with(ApiError(400, "this is not valid HTTP/1.1"))

    # ---- called by this class ----

    def _wait_for_client(self, seconds: float) -> None:
        self._due = self.loop.time() + seconds

    def _wait_for_request(self) -> None:
        self.server_state.idle[self] = None
        # uvicorn's own timer stops at any byte, but not every byte begins a request: a line break does not.
        self._wait_for_client(self.limits.head_seconds if self._in_head else self.limits.keep_alive_seconds)

    def _end_with(self, error: ApiError) -> None:
        """Answers the requests that have arrived completely, in their order, sends `error`, and closes the connection.

        If the answer to the wrong request is being sent already, it is cut short and no error is sent.
        """
        if self.transport.is_closing():
            return
        if self.pipeline and self._in_message and not self._in_head:
            self.pipeline.popleft()  # drops the newest request: its body is wrong, and its answer has not begun
        if self._is_answering:
            assert self._answered is not None
            if not self._answered.more_body:
                self._last_error, self._due = error, None
                return
        else:
            response = error.response()
            response.headers[HEADER.decode()] = RequestId.read(()).text
            response.headers["connection"] = "close"
            head = [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
            self.transport.write(b"".join((STATUS_LINE[error.status], *head, b"\r\n", bytes(response.body))))
        self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self._answered is not None and not self._answered.response_complete


def _without_chunks(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """Wraps `app` for an HTTP/1.0 client, which knows no chunks: the body ends where the connection ends.

    uvicorn closes the connection at the end, but would still send chunks for a body without a length.
    """
    cycle.chunked_encoding = False

    async def answer(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async def send_plain(message: ASGISendEvent) -> None:
            if message["type"] == "http.response.body":
                cycle.expected_content_length = len(message.get("body", b""))  # so that uvicorn's check of it passes
            await send(message)

        await app(scope, receive, send_plain)

    return answer
