"""The wire between process 0 and a process that follows it: a TCP connection that begins with a token.

The network between the hosts is trusted: the token and all messages cross it unencrypted, the token through jax's
key-value store. The token only keeps out clients that connect by mistake.
"""

import ctypes
import hmac
import os
import secrets
import signal
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

TOKEN_BYTES = 32
# The time for a connected peer to send its token.
GREETING_SECONDS = 5.0
# The time for the last lines to be written. A full pipe without a reader would block forever.
FLUSH_SECONDS = 1.0
# An error before the first step often concerns all processes, such as a wrong option. Each gets the time to report it.
GRACE_SECONDS = 3.0
_INDEX = struct.Struct("<I")
# When a peer's machine fails, not only its process, this is noticed after 10 + 4 * 5 seconds. The names are Linux's.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}


def new_token() -> bytes:
    """Returns a random token that cannot be guessed."""
    return secrets.token_bytes(TOKEN_BYTES)


def listen() -> socket.socket:
    """Opens a socket on a free port of every network interface. All followers may connect before one is accepted."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=socket.SOMAXCONN)
    return socket.create_server(("", 0), backlog=socket.SOMAXCONN)


def greet(connection: socket.socket, token: bytes) -> tuple[int, socket.socket] | None:
    """Returns the index of the process that has connected and the wire to it, or None for a stranger."""
    greeting = _greeting(connection)
    if len(greeting) < TOKEN_BYTES + _INDEX.size or not hmac.compare_digest(greeting[:TOKEN_BYTES], token):
        connection.close()
        return None
    [index] = _INDEX.unpack(greeting[TOKEN_BYTES:])
    return index, _wire(connection)


def connect(address: tuple[str, int], token: bytes, index: int) -> socket.socket:
    """Connects process `index` to process 0, which listens at `address`. Raises ConnectionError if it cannot."""
    try:
        connection = socket.create_connection(address, GREETING_SECONDS)
        connection.sendall(token + _INDEX.pack(index))
    except OSError as error:
        raise ConnectionError(
            f"process {index} cannot reach process 0 at {address[0]}, port {address[1]} ({error}): open all ports "
            "between the hosts, and choose a coordinator address that all of them can reach"
        ) from error
    return _wire(connection)


def say(line: str) -> None:
    """Prints a line for the user at once, even when the process is about to end."""
    print(f"jaxvllm: {line}", file=sys.stderr, flush=True)


def end_process() -> NoReturn:
    """Ends this process at once, with exit code 1.

    A device's program that waits for an ended process waits forever, and no exception reaches the thread that waits for
    the program. So there is no other way to end it.
    """
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(FLUSH_SECONDS)
    os._exit(1)


def outlive_abort() -> None:
    """Makes an abort of this process take six seconds longer, in which its other threads go on.

    When process 0 is killed, jax's client of the coordination service aborts this process within a tenth of a second,
    with a stack trace, while a thread of ours is about to print the reason and to end the process. On a busy machine
    jax was faster. The client's own callback cannot prevent that, because it raises std::bad_cast (jaxlib 0.11.2).
    """
    libc = ctypes.CDLL(None)
    # Only a C function may run here, since the thread that aborts may hold any lock. `sleep` gets the signal's number,
    # 6, as its seconds. When it returns, abort() ends the process as ever.
    libc.signal(ctypes.c_int(signal.SIGABRT), libc.sleep)


def grace() -> None:
    """Gives the main thread time to end first with its own error."""
    time.sleep(GRACE_SECONDS)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def _greeting(connection: socket.socket) -> bytes:
    """Reads a new peer's greeting. The result is shorter when the peer sends less or is too slow."""
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
