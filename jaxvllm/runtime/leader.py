"""Process 0 of several: what it does to its devices, it first tells the processes that have the others."""

import atexit
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from jaxvllm.runtime.agreement import agree, all_well
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.calls import Abandon, Call, Close, Message, Ready, read_message, to_bytes
from jaxvllm.runtime.link import accept, end_process, grace, listen, new_token, say
from jaxvllm.runtime.watch import Watch
from sharding.hosts import JOIN_SECONDS, Hosts

# For the others to be gone before this process ends, and with it jax's coordination service: jax aborts who stays. One
# that compiles goes after the bucket at hand.
LEAVE_SECONDS = 120.0


class Leader:
    """Tells each call to all followers and makes it. It never waits for them: the devices do, in their collectives."""

    def __init__(self, hosts: Hosts, facts: Mapping[str, Any]):
        """Waits until all have come. ValueError when they were not given the same `facts`.

        ConnectionError when one of them finds no way to this process, TimeoutError when one does not come.
        """
        self._hosts = hosts
        self._started = self._failed = self._closed = False
        token = new_token()
        with listen() as server:
            agree(hosts, facts, offer=f"{server.getsockname()[1]} {token.hex()}")
            all_well(hosts)  # nobody is waited for below who cannot reach this process
            self._wires = _gather(server, token, hosts)
        self._left = [threading.Event() for _ in self._wires]
        self._ready: list[set[Bucket]] = [set() for _ in self._wires]
        for (index, wire), left, ready in zip(self._wires.items(), self._left, self._ready, strict=True):
            threading.Thread(target=self._watch, args=(index, wire, left, ready), daemon=True).start()
        # Signals raise in the main thread only. In one of its own, a call is both told and made, or neither: Ctrl-C can
        # leave no step to the others that waits for this process forever.
        self._thread = ThreadPoolExecutor(1, "jaxvllm-lead")
        self._steps = Watch(self._fail)
        atexit.register(self._leave)

    def call[T](self, make: Callable[[Call], T], call: Call) -> T:
        """Tells `call` to the followers, and returns `make(call)`. RuntimeError when there is nobody left to tell."""
        self._started = True
        return self._thread.submit(self._tell_and_make, make, call).result()

    def all_have(self, bucket: Bucket) -> bool:
        """Whether all followers have compiled `bucket`: until then its step waits for their compilers."""
        return all(bucket in ready for ready in self._ready)

    def abandon(self) -> None:
        """Ends the followers: there will be no engine to follow."""
        self._tell(Abandon())

    def _tell_and_make[T](self, make: Callable[[Call], T], call: Call) -> T:
        self._tell(call)
        try:
            made = make(call)
        except Exception:
            self.abandon()  # the others made it, and would wait in its collectives for this process
            raise
        self._steps.give(made)
        return made

    def _tell(self, message: Message) -> None:
        last = isinstance(message, Close | Abandon)
        if not last and (self._failed or self._closed):
            raise RuntimeError("the processes that followed this one have been let go: start all of them again")
        if self._closed:
            return
        self._closed = last
        data = to_bytes(Abandon() if self._failed else message)
        for wire in self._wires.values():
            with suppress(OSError):  # its process is gone: the thread that watches it ends this one
                wire.sendall(data)

    def _fail(self, error: Exception) -> None:
        # Who reads the step gets the error. The others may wait in its collectives, where no Close reaches them.
        self._failed = True
        grace()  # often it failed because another process has gone: the wire tells that better
        self.abandon()

    def _watch(self, index: int, wire: socket.socket, left: threading.Event, ready: set[Bucket]) -> None:
        with suppress(OSError, ValueError), wire, wire.makefile("rb") as stream:
            while isinstance(message := read_message(stream), Ready):
                ready.add(message.bucket)
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
    """The wires to all other processes, by index. Strangers are turned away."""
    wires: dict[int, socket.socket] = {}
    deadline = time.monotonic() + JOIN_SECONDS
    while len(wires) < hosts.count - 1:
        server.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            guest = accept(server, token)
        except TimeoutError:
            came = len(wires) + 1
            raise TimeoutError(f"{came} of {hosts.count} processes came in {JOIN_SECONDS} s: see their logs") from None
        if guest is not None:
            index, wire = guest
            wires[index] = wire
    return wires
