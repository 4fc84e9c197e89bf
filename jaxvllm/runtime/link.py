"""The wire between process 0 and a process that follows it: TCP, opened by a token.

The network between the hosts is trusted: the token came over it in the clear, through jax's key-value store, and so
goes all that follows. It keeps out who comes by mistake.
"""

import hmac
import os
import secrets
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

TOKEN_BYTES = 32
# For a connected peer to show its token. A stranger who says nothing keeps the others waiting for as long.
GREETING_SECONDS = 5.0
# For the last lines to get out. A pipe that nobody reads takes none.
FLUSH_SECONDS = 1.0
# Before the first step what ends one process is often an error of all, a wrong option. Each gets the time to tell it.
GRACE_SECONDS = 3.0
_INDEX = struct.Struct("<I")
# A peer whose machine has gone, not only its process, is noticed after 10 + 4 * 5 seconds. The names are Linux's.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}


def new_token() -> bytes:
    """A token that nobody can guess."""
    return secrets.token_bytes(TOKEN_BYTES)


def listen() -> socket.socket:
    """A socket on a free port, on every network of this host, where all may come before the first is let in."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=socket.SOMAXCONN)
    return socket.create_server(("", 0), backlog=socket.SOMAXCONN)


def accept(server: socket.socket, token: bytes) -> tuple[int, socket.socket] | None:
    """The next process that comes, and the wire to it; None for a stranger. TimeoutError as set on `server`."""
    connection, _ = server.accept()
    greeting = _greeting(connection)
    if len(greeting) < TOKEN_BYTES + _INDEX.size or not hmac.compare_digest(greeting[:TOKEN_BYTES], token):
        connection.close()
        return None
    [index] = _INDEX.unpack(greeting[TOKEN_BYTES:])
    return index, _wire(connection)


def connect(address: tuple[str, int], token: bytes, index: int) -> socket.socket:
    """The wire from process `index` to the one that listens at `address`. ConnectionError when there is no way."""
    try:
        connection = socket.create_connection(address, GREETING_SECONDS)
        connection.sendall(token + _INDEX.pack(index))
    except OSError as error:
        raise ConnectionError(
            f"process {index} cannot reach process 0 at {address[0]}, port {address[1]} ({error}): open all ports "
            "between the hosts, and take a coordinator address that all of them reach"
        ) from error
    return _wire(connection)


def say(line: str) -> None:
    """Tells the user, even when the process is about to be no more."""
    print(f"jaxvllm: {line}", file=sys.stderr, flush=True)


def end_process() -> NoReturn:
    """Ends this process at once, with exit code 1.

    A program on a device that waits for a process that is gone waits forever, and no exception reaches the thread that
    waits for the program: nothing else would end it.
    """
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(FLUSH_SECONDS)
    os._exit(1)


def grace() -> None:
    """Lets the main thread end first, with an error of its own."""
    time.sleep(GRACE_SECONDS)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def _greeting(connection: socket.socket) -> bytes:
    """What a guest says first: shorter than a greeting when it says less, or is too slow."""
    greeting = b""
    deadline = time.monotonic() + GREETING_SECONDS
    with suppress(OSError):
        while missing := TOKEN_BYTES + _INDEX.size - len(greeting):
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            if not (part := connection.recv(missing)):
                break
            greeting += part
    return greeting


def _wire(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
