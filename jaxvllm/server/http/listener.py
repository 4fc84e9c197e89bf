"""The socket that the server listens on. It accepts no more connections than this machine has files for."""

import contextlib
import ipaddress
import logging
import resource
import socket
import time
from typing import Any

from jaxvllm.server.http.http_config import HttpConfig

BACKLOG = 2048
# The limit of open files to ask for. Each connection is a file, and the usual limit of 1,024 is less than
# `ConnectionLimits.max_connections`.
OPEN_FILES = 65536
# The time for which one high file number means that many files are open. Once idle connections are closed, new files
# get low numbers, which say nothing.
CROWDED_SECONDS = 1.0
# The time between two warnings in the log that files are short.
WARNING_SECONDS = 60.0


# The number of files that are not for connections. An idle server has 20 of them open, opens some more for a moment
# (files of the playground, a new engine), and accepts a few connections beyond the limit in order to refuse them.
RESERVED_FILES = 40
# The number of reserved files that no connection may use at all.
SPARE_FILES = 10

logger = logging.getLogger(__name__)


class Listener(socket.socket):
    """A listening socket that leaves some of the `max_files` to the rest of the process.

    If no file were left, asyncio would try 2,048 times in a row to accept, log a traceback each time, and wait for a
    second. A new file gets the lowest free number, so a high number means that many files are open. From then on this
    socket accepts one connection in each turn of the event loop, so that idle ones can be closed in between. TLS
    handshakes that never end could still take the last files: a connection that gets one is closed at once.
    """

    def __init__(self, family: int, kind: int, protocol: int, max_files: int, file: int | None = None):
        super().__init__(family, kind, protocol, file)
        self._max_files = max_files
        self._is_paused = False
        self._crowded_until = self._warn_from = 0.0  # monotonic seconds

    def accept(self) -> tuple[socket.socket, Any]:
        """Does `socket.accept`. Raises BlockingIOError also to let the event loop do other work first."""
        if self._is_paused:
            self._is_paused = False
            raise BlockingIOError
        try:
            connection, address = self._next()
        except BlockingIOError:
            raise
        except OSError:  # for example, the whole machine has no files left
            self._is_paused = True
            raise
        number, now = connection.fileno(), time.monotonic()
        if number >= self._max_files - SPARE_FILES:
            connection.close()
            self._warn(now)
            raise BlockingIOError
        if number >= self._max_files - RESERVED_FILES:
            self._crowded_until = now + CROWDED_SECONDS
        self._is_paused = now < self._crowded_until
        return connection, address

    def _next(self) -> tuple[socket.socket, Any]:
        return super().accept()

    def _warn(self, now: float) -> None:
        if now >= self._warn_from:
            self._warn_from = now + WARNING_SECONDS
            logger.warning(
                "all but %d of %d files are open: new connections are closed. Raise the limit (ulimit -n)",
                SPARE_FILES,
                self._max_files,
            )


def listen(host: str, port: int, max_files: int = OPEN_FILES) -> socket.socket:
    """Returns a listening socket, to which clients may connect from now on.

    Raises OSError with a message for the user when it cannot listen.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise OSError(f"host {host!r} is not known here: {error.strerror}") from None
    # IPv4 is preferred: localhost is also ::1, which many containers do not have.
    family, kind, protocol, _, address = min(addresses, key=lambda found: found[0] is not socket.AF_INET)
    listener = Listener(family, kind, protocol, max_files)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # fails for a port that another socket is bound to without listening
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or --host") from None
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket, config: HttpConfig) -> str:
    """Returns the server's URL for a browser."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_open_to_strangers(listener: socket.socket) -> bool:
    """Returns whether other machines may be able to connect."""
    host: str = listener.getsockname()[0]
    return not ipaddress.ip_address(host.partition("%")[0]).is_loopback


def raise_file_limit() -> int:
    """Raises this process's limit of open files as far as it is allowed to, and returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return OPEN_FILES if soft == resource.RLIM_INFINITY else soft
