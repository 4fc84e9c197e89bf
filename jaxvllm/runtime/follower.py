"""A process that is not the first of several: its devices do what process 0 tells."""

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Self

from jaxvllm.runtime.agreement import agree, all_well
from jaxvllm.runtime.calls import Abandon, Call, Close, Ready, read_message, to_bytes
from jaxvllm.runtime.link import connect, end_process, grace, say
from jaxvllm.runtime.programs import Programs
from jaxvllm.runtime.runner import Runner
from jaxvllm.runtime.watch import Watch
from sharding.hosts import Hosts


class Follower:
    """Makes the calls of process 0, in its order. Of what comes out it knows only whether that failed.

    It is never more than two steps behind or ahead: process 0 reads a step's output, which all devices made together,
    before it tells the next but one. So neither the calls that wait here nor those on the device can pile up.
    """

    def __init__(self, hosts: Hosts, facts: Mapping[str, Any]):
        """Finds process 0. ValueError when that one was not given the same `facts`, ConnectionError without a way."""
        port, token = agree(hosts, facts).split()
        self._hosts = hosts
        try:
            self._wire = connect((hosts.address, int(port)), bytes.fromhex(token), hosts.index)
        except ConnectionError as error:
            all_well(hosts, trouble=str(error))  # raises it: process 0 gets to know
            raise
        all_well(hosts)
        self._calls: SimpleQueue[Call] = SimpleQueue()
        self._closed = False
        threading.Thread(target=self._listen, daemon=True).start()

    def follow(self, runner: Runner) -> None:
        """Returns when process 0 has closed its engine."""
        threading.Thread(target=self._report, args=[runner.programs], daemon=True).start()
        watch = Watch(self._fail)
        call: Call | None = None
        while not isinstance(call, Close):
            call = self._calls.get()
            watch.give(runner.make(call))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self._closed = True
        # After a normal end the wire stays open as long as this process: process 0 waits for that, see `Leader`.
        if kind is not None:
            with suppress(OSError):
                self._wire.shutdown(socket.SHUT_RDWR)

    def _report(self, programs: Programs) -> None:
        for bucket in programs.ladder.compile_order():
            with suppress(OSError, RuntimeError):  # what does not compile here, process 0 does without
                programs.wait_for(bucket)
                self._wire.sendall(to_bytes(Ready(bucket)))

    def _fail(self, error: Exception) -> None:
        # Process 0 waits for the step that failed here, tells nothing more, and would do so forever.
        grace()  # often it failed because another process has gone: the wire tells that better
        self._end(f"{self._hosts} could not compute a step: {' '.join(str(error).split())}")

    def _listen(self) -> None:
        reason = f"process 0 of {self._hosts.count} has ended, and {self._hosts} cannot go on: see its log"
        try:
            with suppress(OSError), self._wire, self._wire.makefile("rb") as stream:
                while (message := read_message(stream)) is not None:
                    if isinstance(message, Abandon):
                        grace()
                        break
                    assert not isinstance(message, Ready)
                    self._closed |= isinstance(message, Close)
                    self._calls.put(message)
        except Exception as error:
            reason = f"{self._hosts} cannot follow process 0: {error}"
        self._end(reason)  # at once: when process 0 has died, jax aborts this one within a second, with a stack trace

    def _end(self, reason: str) -> None:
        if not self._closed:
            say(reason)
            end_process()
