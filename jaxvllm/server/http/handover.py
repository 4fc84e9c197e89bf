"""Connections that one process accepts and hands over to others, which answer them."""

import asyncio
import logging
import socket
from collections import deque
from typing import Any

from jaxvllm.server.http.listener import Listener

logger = logging.getLogger(__name__)

# The time until it is tried again where the machine has no file left for another connection.
NO_FILES_SECONDS = 1.0
# The time until it is tried again where no process takes another connection. Some 270 can be on the way to each.
FULL_SECONDS = 0.01
# What a process sends when it is ready, and what each connection comes with: a message must have a byte.
BYTE = b"\0"


class Handover:
    """Accepts the connections of a listening socket, and hands them to processes in turn.

    Processes that accept from a shared socket themselves do not share: the first one to wake takes all connections that
    wait (50 of 50 at times), and has them as long as the clients keep them. In turn, each has as many as the others.
    Connections wait while no process is ready. It needs a running event loop.
    """

    def __init__(self, listener: socket.socket):
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._receivers: deque[socket.socket] = deque()
        self._waiting: socket.socket | None = None  # accepted, while no process takes it
        self._later: asyncio.TimerHandle | None = None

    async def serve(self, receiver: socket.socket) -> None:
        """Hands connections to the process that has the other end of `receiver`, once it is ready, until cancelled."""
        if not await self._loop.sock_recv(receiver, len(BYTE)):
            return  # it died before it was ready
        self._receivers.append(receiver)
        self._resume()
        try:
            await asyncio.Event().wait()
        finally:
            self._receivers.remove(receiver)
            if not self._receivers:
                self._stop()

    def _resume(self) -> None:
        self._stop()
        self._loop.add_reader(self._listener, self._accept)
        if self._waiting is not None:  # nothing may follow it that would wake the reader
            self._accept()

    def _stop(self) -> None:
        self._loop.remove_reader(self._listener)
        if self._later is not None:
            self._later.cancel()
            self._later = None

    def _pause(self, seconds: float) -> None:
        self._stop()
        self._later = self._loop.call_later(seconds, self._resume)

    def _accept(self) -> None:
        if self._waiting is None:
            try:
                self._waiting, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.warning("cannot accept a connection: %s", error.strerror)
                self._pause(NO_FILES_SECONDS)
                return
        for _ in range(len(self._receivers)):
            receiver = self._receivers[0]
            self._receivers.rotate(-1)
            try:
                socket.send_fds(receiver, [BYTE], [self._waiting.fileno()])
            except OSError:  # it has died, or has many on the way to it
                continue
            self._waiting.close()
            self._waiting = None
            return
        self._pause(FULL_SECONDS)


class Received(Listener):
    """The end of a socket pair at which another process hands over connections, as a listening socket."""

    def __init__(self, file: int, max_files: int):
        super().__init__(-1, -1, -1, max_files, file)

    def listen(self, backlog: int = 0, /) -> None:
        """Tells the other process that this one is ready. asyncio calls it when it is about to accept."""
        self.send(BYTE)

    def _next(self) -> tuple[socket.socket, Any]:
        _, files, _, _ = socket.recv_fds(self, len(BYTE), 1)
        if not files:  # the kernel closed a connection for which this process has no file
            raise BlockingIOError
        connection = socket.socket(fileno=files[0])
        connection.set_inheritable(False)
        try:
            return connection, connection.getpeername()
        except OSError:  # the client has left already
            connection.close()
            raise BlockingIOError from None
