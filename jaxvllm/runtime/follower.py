"""A process that is not the first of several: its devices do what process 0 tells."""

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Self

from jaxvllm.runtime.agreement import agree
from jaxvllm.runtime.calls import Abandon, Call, Close, Message, read_message
from jaxvllm.runtime.link import connect, end_process, grace, say
from jaxvllm.runtime.runner import Runner
from sharding.hosts import Hosts


class Follower:
    """Makes the calls of process 0, in its order, and reads nothing back.

    It is never more than two steps behind or ahead: process 0 reads a step's output, which all devices made together,
    before it tells the next but one. So neither the calls that wait here nor those on the device can pile up.
    """

    def __init__(self, hosts: Hosts, facts: Mapping[str, Any]):
        """Finds process 0. ValueError when that one was not given the same `facts`."""
        port, token = agree(hosts, facts).split()
        self._hosts = hosts
        self._wire = connect((hosts.address, int(port)), bytes.fromhex(token), hosts.index)
        self._calls: SimpleQueue[Call] = SimpleQueue()
        self._ended = False
        threading.Thread(target=self._listen, daemon=True).start()

    def follow(self, runner: Runner) -> None:
        """Returns when process 0 has closed its engine."""
        call: Call | None = None
        while not isinstance(call, Close):
            call = self._calls.get()
            runner.make(call)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self._ended = True
        # After a normal end the wire stays open as long as this process: process 0 waits for that, see `Leader`.
        if kind is not None:
            with suppress(OSError):
                self._wire.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        message: Message | None = None
        with suppress(OSError), self._wire, self._wire.makefile("rb") as stream:
            while (message := read_message(stream)) is not None and not isinstance(message, Abandon):
                self._ended |= isinstance(message, Close)
                self._calls.put(message)
        if isinstance(message, Abandon):
            grace()
        if not self._ended:
            say(f"process 0 of {self._hosts.count} has ended, and {self._hosts} cannot go on: see its log")
            end_process()  # at once: when process 0 has died, jax aborts this one within a second, with a stack trace
