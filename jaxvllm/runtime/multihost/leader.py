"""`Leader`: sends the calls of process 0 to the other processes before process 0 makes them."""

import atexit
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from jaxvllm.runtime.multihost.agreement import agree, all_well
from jaxvllm.runtime.multihost.calls import Abandon, Call, Close, Message, to_bytes
from jaxvllm.runtime.multihost.link import end_process, grace, greet, listen, new_token, say
from jaxvllm.runtime.multihost.watch import Watch
from sharding.hosts import JOIN_SECONDS, Hosts

# The time for the other processes to end before this one, which runs jax's coordination service: without the service,
# jax aborts them. A process that is compiling ends after the bucket at hand.
LEAVE_SECONDS = 120.0
# The time between two looks at who has connected, and who has said who it is.
LOOK_SECONDS = 0.05


class Leader:
    """Sends each call to all followers and makes it. Only the devices wait for each other, in their collectives."""

    def __init__(self, hosts: Hosts, facts: Mapping[str, Any]):
        """Waits until all followers have connected. Raises ValueError when they were not given the same `facts`.

        Raises ConnectionError when one of them cannot reach this process, TimeoutError when one does not connect.
        """
        self._hosts = hosts
        self._started = self._failed = self._closed = False
        token = new_token()
        with listen() as server:
            agree(hosts, facts, offer=f"{server.getsockname()[1]} {token.hex()}")
            all_well(hosts)  # raises if a process cannot reach this one, so `_gather` does not wait for it
            self._wires = _gather(server, token, hosts)
        self._left = [threading.Event() for _ in self._wires]
        for (index, wire), left in zip(self._wires.items(), self._left, strict=True):
            threading.Thread(target=self._watch, args=(index, wire, left), daemon=True).start()
        # Signals raise only in the main thread. A separate thread both sends and makes a call, or neither. So Ctrl-C
        # cannot leave the others with a step that waits for this process forever.
        self._thread = ThreadPoolExecutor(1, "jaxvllm-lead")
        self._steps = Watch(self._fail)
        atexit.register(self._leave)

    def call[T](self, make: Callable[[Call], T], call: Call) -> T:
        """Sends `call` to the followers and returns `make(call)`. Raises RuntimeError once the followers have ended."""
        self._started = True
        return self._thread.submit(self._tell_and_make, make, call).result()

    def abandon(self) -> None:
        """Ends the followers, because there will be no engine to follow."""
        self._tell(Abandon())

    def _tell_and_make[T](self, make: Callable[[Call], T], call: Call) -> T:
        self._tell(call)
        try:
            made = make(call)
        except Exception:
            self.abandon()  # the others made the call, and would wait for this process in its collectives
            raise
        self._steps.give(made)
        return made

    def _tell(self, message: Message) -> None:
        last = isinstance(message, Close | Abandon)
        if not last and (self._failed or self._closed):
            raise RuntimeError("the processes that followed this one have ended: start all of them again")
        if self._closed:
            return
        self._closed = last
        data = to_bytes(Abandon() if self._failed else message)
        for wire in self._wires.values():
            with suppress(OSError):  # the follower has ended: the thread that watches it ends this process
                wire.sendall(data)

    def _fail(self, error: Exception) -> None:
        # The reader of the step gets the error. The others may wait in its collectives, where no `Close` reaches them.
        self._failed = True
        grace()  # steps often fail because another process has ended, and `_watch` reports that better
        self.abandon()

    def _watch(self, index: int, wire: socket.socket, left: threading.Event) -> None:
        with suppress(OSError), wire:
            wire.recv(1)  # a follower sends nothing, so this returns when it closes its end of the wire
        left.set()
        if not self._closed and not self._started:
            grace()
        if not self._closed:
            say(f"process {index} of {self._hosts.count} has ended, and {self._hosts} cannot go on: see its log")
            end_process()

    def _leave(self) -> None:
        self._tell(Close())
        deadline = time.monotonic() + LEAVE_SECONDS
        for left in self._left:
            left.wait(deadline - time.monotonic())


def _gather(server: socket.socket, token: bytes, hosts: Hosts) -> dict[int, socket.socket]:
    """Accepts the connections of all other processes and returns them by process index. It rejects strangers.

    Each guest has a thread while it says who it is, so one that says nothing keeps nobody waiting.
    """
    wires: dict[int, socket.socket] = {}
    guests: SimpleQueue[tuple[int, socket.socket] | None] = SimpleQueue()
    deadline = time.monotonic() + JOIN_SECONDS
    server.settimeout(LOOK_SECONDS)
    while len(wires) < hosts.count - 1:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{len(wires) + 1} of {hosts.count} processes connected within {JOIN_SECONDS} s: see their logs"
            )
        with suppress(TimeoutError):
            connection, _ = server.accept()
            threading.Thread(target=lambda one: guests.put(greet(one, token)), args=(connection,), daemon=True).start()
        while not guests.empty():
            if (guest := guests.get()) is not None:
                wires[guest[0]] = guest[1]
    return wires
