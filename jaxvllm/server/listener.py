"""The socket that the server listens on, and as many connections as this machine allows."""

import contextlib
import ipaddress
import logging
import resource
import socket
import time
from typing import Any

from jaxvllm.server.config import ServerConfig

BACKLOG = 2048
# A connection is a file. The usual limit of 1,024 is less than `ConnectionLimits.max_connections`.
OPEN_FILES = 65536
# Low numbers are free again once idle connections are closed, and say nothing: so long a high one counts.
CROWDED_SECONDS = 1.0
# Between two lines in the log that say that files are short.
WARNING_SECONDS = 60.0


# Of the open files so many are not for connections: the server has 20 others when it is idle, opens some for a moment
# (files of the playground, a new engine), and takes a few connections more than it keeps, to refuse them.
RESERVED_FILES = 40
# Of these so many are for no connection at all.
SPARE_FILES = 10

logger = logging.getLogger(__name__)


class Listener(socket.socket):
    """A socket that leaves the process some of the `max_files` that it may open.

    Without them asyncio would try 2,048 times in a row to accept, log a traceback each time, and wait for a second. A
    new file has the lowest number that is free, so a high one tells that many are open. From then on it accepts one
    connection in each turn of the event loop, so that idle ones can be closed in between. The last files of all,
    which TLS handshakes that never end can reach, are not used: such a connection is closed at once.
    """

    def __init__(self, family: int, kind: int, protocol: int, max_files: int):
        super().__init__(family, kind, protocol)
        self._max_files = max_files
        self._is_paused = False
        self._crowded_until = self._warn_from = 0.0  # monotonic seconds

    def accept(self) -> tuple[socket.socket, Any]:
        """As `socket.accept`. BlockingIOError also when other work should go first: the event loop comes back."""
        if self._is_paused:
            self._is_paused = False
            raise BlockingIOError
        try:
            connection, address = super().accept()
        except BlockingIOError:
            raise
        except OSError:  # the whole machine may have no files left
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

    def _warn(self, now: float) -> None:
        if now >= self._warn_from:
            self._warn_from = now + WARNING_SECONDS
            logger.warning(
                "all but %d of %d files are open: new connections are closed. Raise the limit (ulimit -n)",
                SPARE_FILES,
                self._max_files,
            )


def listen(host: str, port: int, max_files: int = OPEN_FILES) -> socket.socket:
    """A socket that listens; clients may connect from now on. OSError, in words for the user, when it cannot."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise OSError(f"host {host!r} is not known here: {error.strerror}") from None
    # localhost is ::1 too, which is not there in many containers.
    family, kind, protocol, _, address = min(addresses, key=lambda found: found[0] is not socket.AF_INET)
    listener = Listener(family, kind, protocol, max_files)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # a port that another one binds but does not listen on is found in use here
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or --host") from None
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket, config: ServerConfig) -> str:
    """Where a browser finds the server."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_open_to_strangers(listener: socket.socket) -> bool:
    """Whether other machines may reach it."""
    host: str = listener.getsockname()[0]
    return not ipaddress.ip_address(host.partition("%")[0]).is_loopback


def raise_file_limit() -> int:
    """Raises the limit of open files of this process, as far as it may, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return OPEN_FILES if soft == resource.RLIM_INFINITY else soft
