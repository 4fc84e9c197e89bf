"""The connection between an engine and its client when they may be on different hosts: encrypted, and for two only."""

import os
import threading
from collections.abc import MutableMapping
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from jaxvllm.worker.engine_process import open_socket

KEY_VARIABLE = "JAXVLLM_ENGINE_KEY"
# Both sides ask each other for a sign of life this often, and take the connection for lost after so long without one.
# ZeroMQ's own threads do this, so it does not matter how busy the processes are.
HEARTBEAT_MILLISECONDS, LOST_MILLISECONDS = 2_000, 10_000
# The time for an engine to reach its client, which waits already.
CONNECT_MILLISECONDS = 30_000


@dataclass(frozen=True)
class Address:
    """The address at which the client waits for its engine.

    The key is a fresh public key of CurveZMQ for each start. Nobody can greet the client, or read what is said, without
    it, and it is told to the process that shall be the engine and nobody else. So it is a secret.
    """

    url: str
    key: bytes

    def environment(self) -> dict[str, str]:
        """Returns the variables by which a process learns the key, because all users can read its command line."""
        return {KEY_VARIABLE: self.key.decode()}

    @classmethod
    def read(cls, url: str, environment: MutableMapping[str, str]) -> "Address | str":
        """Returns the address that a process was started with, which has no key where it is on this host."""
        key = environment.pop(KEY_VARIABLE, None)
        return url if key is None else cls(url, key.encode())


def listen(host: str) -> tuple[zmq.asyncio.Socket, Address]:
    """Returns a socket for one engine, at any free port of the address `host` of this machine."""
    socket = open_socket()
    set_heartbeats(socket)
    key, secret = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, key)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    try:
        port = socket.bind_to_random_port(f"tcp://{host}")
    except BaseException:
        socket.close()
        raise
    return socket, Address(f"tcp://{host}:{port}", key)


async def lost(socket: zmq.asyncio.Socket) -> None:
    """Waits until the other side has ended, or cannot be reached any more."""
    events = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        await recv_monitor_message(events)
    finally:
        if not socket.closed:
            socket.disable_monitor()
        events.close(linger=0)


def connect(socket: "zmq.Socket[bytes]", address: Address) -> None:
    """Connects the engine's socket. When the connection is lost, this process ends: nobody could stop it otherwise.

    Raises ConnectionError when the client cannot be reached.
    """
    set_heartbeats(socket)
    key, secret = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_SERVERKEY, address.key)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, key)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)  # messages may have been lost
    wanted = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
    events = socket.get_monitor_socket(wanted)
    socket.connect(address.url)
    if not events.poll(CONNECT_MILLISECONDS) or recv_monitor_message(events)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
        socket.disable_monitor()
        events.close(linger=0)
        raise ConnectionError(f"{address.url} cannot be reached from this host: open all ports between the hosts")

    def watch() -> None:
        try:
            if recv_monitor_message(events)["event"] == zmq.EVENT_DISCONNECTED:
                os._exit(1)
        except zmq.ContextTerminated:  # this process ends the connection
            pass
        finally:
            events.close()

    threading.Thread(target=watch, name="engine-link", daemon=True).start()


def set_heartbeats(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket") -> None:
    """Makes the socket notice when the other side does not answer for `LOST_MILLISECONDS`."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MILLISECONDS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, LOST_MILLISECONDS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, LOST_MILLISECONDS)
