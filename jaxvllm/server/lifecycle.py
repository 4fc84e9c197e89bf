"""The shutdown of a server or a router: it waits for signals, and then gives running requests time to finish."""

import asyncio
import logging
import signal
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from jaxvllm.server.drainable import Drainable

logger = logging.getLogger(__name__)


class StopSignals:
    """Handles SIGTERM, SIGINT and SIGHUP inside its context: the first asks the server to stop, the second insists."""

    def __init__(self) -> None:
        self._numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            self._numbers.append(signal.SIGHUP)
        self.first: signal.Signals | None = None
        self._asked = asyncio.Event()
        self._insisted = asyncio.Event()

    def __enter__(self) -> Self:
        for number in self._numbers:
            asyncio.get_running_loop().add_signal_handler(number, self._take, number)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number in self._numbers:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _take(self, number: signal.Signals) -> None:
        if self.first is None:
            self.first = number
            self._asked.set()
        else:
            self._insisted.set()

    @property
    def is_urgent(self) -> bool:
        """Whether there were two signals."""
        return self._insisted.is_set()

    async def asked(self) -> None:
        """Waits for the first signal."""
        await self._asked.wait()

    async def insisted(self) -> None:
        """Waits for the second signal."""
        await self._insisted.wait()

    def exit_code(self, is_clean: bool) -> int:
        """Returns the exit code of a process that these signals ended. `is_clean`: every request could finish."""
        if self.first is signal.SIGINT:
            return 128 + signal.SIGINT
        return 0 if is_clean else 1


async def drain(service: "Drainable", stop: StopSignals) -> bool:
    """Takes no new requests and lets the running ones finish. Returns whether all of them did.

    They do not when they take longer than the shutdown_timeout, or a second signal comes.
    """
    service.drain()
    if service.num_open:
        seconds = service.config.shutdown_timeout
        requests = "1 request" if service.num_open == 1 else f"{service.num_open} requests"
        logger.info("stopping: %s may finish within %g s; another signal ends them at once", requests, seconds)
        await until_first(service.idle(), stop.insisted(), timeout=seconds)
    if service.num_open:
        logger.warning("%d requests did not finish, and are aborted", service.num_open)
    return not service.num_open


async def until_first(*works: Awaitable[object], timeout: float | None = None) -> None:
    """Waits until one of `works` ends, and cancels the others. If it failed, raises its exception."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
