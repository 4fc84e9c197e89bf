"""The socket that the server listens on, and as many connections as this machine allows."""

import contextlib
import ipaddress
import resource
import socket

from jaxvllm.server.config import ServerConfig

BACKLOG = 2048
# A connection is a file. The usual limit of 1,024 is less than `ConnectionLimits.max_connections`.
OPEN_FILES = 65536


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; clients may connect from now on. OSError, in words for the user, when it cannot."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise OSError(f"host {host!r} is not known here: {error.strerror}") from None
    # localhost is ::1 too, which is not there in many containers.
    family, kind, protocol, _, address = min(addresses, key=lambda found: found[0] is not socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
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


def allow_connections() -> None:
    """Raises the limit of open files of this process, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
