"""`Follower`: makes the calls of process 0 on the devices of another process."""

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Self

from jaxvllm.runtime.multihost.agreement import agree, all_well
from jaxvllm.runtime.multihost.calls import Abandon, Call, Close, read_message
from jaxvllm.runtime.multihost.link import connect, end_process, grace, outlive_abort, say
from jaxvllm.runtime.multihost.watch import Watch
from jaxvllm.runtime.runner import Runner
from sharding.hosts import Hosts


class Follower:
    """Makes the calls of process 0 in the same order. It does not read their results, and only notices when one fails.

    It is never more than two steps behind or ahead: all devices compute a step's output together, and process 0 reads
    it before it sends the next step but one. So calls cannot pile up, neither in the queue here nor on the device.
    """

    def __init__(self, hosts: Hosts, facts: Mapping[str, Any]):
        """Connects to process 0. Raises ValueError when it has other `facts`, ConnectionError if it is unreachable."""
        outlive_abort()
        port, token = agree(hosts, facts).split()
        self._hosts = hosts
        try:
            self._wire = connect((hosts.address, int(port)), bytes.fromhex(token), hosts.index)
        except ConnectionError as error:
            all_well(hosts, trouble=str(error))  # raises the error here and in process 0
            raise
        all_well(hosts)
        self._calls: SimpleQueue[Call] = SimpleQueue()
        self._closed = False
        threading.Thread(target=self._listen, daemon=True).start()

    def follow(self, runner: Runner) -> None:
        """Makes calls until process 0 has closed its engine."""
        watch = Watch(self._fail)
        call: Call | None = None
        while not isinstance(call, Close):
            call = self._calls.get()
            watch.give(runner.make(call))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self._closed = True
        # After a normal end the wire stays open until this process ends: process 0 waits for that, see `Leader`.
        if kind is not None:
            with suppress(OSError):
                self._wire.shutdown(socket.SHUT_RDWR)

    def _fail(self, error: Exception) -> None:
        # Process 0 waits for the step that failed here. It would wait forever and send nothing more.
        grace()  # steps often fail because another process has ended, and `_listen` reports that better
        self._end(f"{self._hosts} could not compute a step: {' '.join(str(error).split())}")

    def _listen(self) -> None:
        reason = f"process 0 of {self._hosts.count} has ended, and {self._hosts} cannot go on: see its log"
        try:
            with suppress(OSError), self._wire, self._wire.makefile("rb") as stream:
                while (message := read_message(stream)) is not None:
                    if isinstance(message, Abandon):
                        grace()
                        break
                    self._closed |= isinstance(message, Close)
                    self._calls.put(message)
        except Exception as error:
            reason = f"{self._hosts} cannot follow process 0: {error}"
        self._end(reason)

    def _end(self, reason: str) -> None:
        if not self._closed:
            say(reason)
            end_process()
