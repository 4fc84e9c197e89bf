"""`ApiProcesses`: several processes that answer HTTP at one address, before the engines of this process."""

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from jaxvllm.config import EngineConfig
from jaxvllm.server.config import ServerConfig
from jaxvllm.server.http.handover import Handover
from jaxvllm.server.http.http_door import HttpDoor
from jaxvllm.server.lifecycle import StopSignals, until_first
from jaxvllm.server.metrics.prometheus import Metrics
from jaxvllm.worker.api_broker import ApiBroker
from jaxvllm.worker.engine_client import EngineClient
from jaxvllm.worker.engine_process import open_socket
from jaxvllm.worker.queue_limits import QueueLimits

logger = logging.getLogger(__name__)

# The pause before a process that died is started again.
PAUSE_SECONDS = 0.2
# Beyond the shutdown_timeout, for processes to notice it themselves.
GRACE_SECONDS = 10.0


class ApiStart(msgspec.Struct, frozen=True):
    """The task of an API process. It is the first line of its standard input."""

    engine: EngineConfig
    server: ServerConfig
    limits: QueueLimits
    chat_template: str | None
    address: str  # of the broker
    connections: int  # file descriptor of the socket at which it receives them
    is_local: bool  # no other machine can reach the server
    max_files: int


class ApiProcesses:
    """Starts API processes, starts each again when it dies, and ends them with their parent.

    Requests of a process that dies are aborted, and its connections are closed. The others do not notice.
    """

    def __init__(
        self,
        engines: EngineClient,
        config: ServerConfig,
        limits: QueueLimits,
        chat_template: str | None,
        door: HttpDoor,
        metrics: Metrics,
    ):
        self._engines = engines
        self._config = config
        self._limits = limits
        self._chat_template = chat_template
        self._door = door
        self._handover = Handover(door.listener)
        self._metrics = metrics
        self._running: dict[int, Process] = {}  # by their number
        self._num_starts = 0
        self._is_ending = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator["asyncio.Future[list[None]]"]:
        """Implements `Front.running`. The future ends if something is wrong with the supervision itself."""
        supervisors = [asyncio.create_task(self._supervise(number)) for number in range(self._config.api_server_count)]
        ended = asyncio.gather(*supervisors)
        try:
            yield ended
        finally:
            self._is_ending = True
            ended.cancel()
            await asyncio.gather(ended, *supervisors, return_exceptions=True)
            self._handover.close()

    async def drain(self, stop: StopSignals) -> bool:
        """Implements `Front.drain`."""
        self._is_ending = True
        running = list(self._running.values())
        for one in running:
            with suppress(ProcessLookupError):
                one.send_signal(signal.SIGTERM)
        ends = asyncio.gather(*(one.wait() for one in running))
        await until_first(asyncio.shield(ends), stop.insisted(), timeout=self._config.shutdown_timeout + GRACE_SECONDS)
        # One that had no signal handlers yet had no requests either.
        return all(one.returncode in (0, -signal.SIGTERM) for one in running)

    def hurry(self) -> None:
        """Implements `Front.hurry`."""
        for one in self._running.values():
            with suppress(ProcessLookupError):
                one.kill()

    async def _supervise(self, number: int) -> None:
        while not self._is_ending:
            code = await self._live(number)
            if not self._is_ending:
                logger.error("API process %d has ended with code %s, and is started again", number, code)
                await asyncio.sleep(PAUSE_SECONDS)

    async def _live(self, number: int) -> int:
        """Runs one process until its end. Returns its exit code."""
        source, self._num_starts = self._num_starts, self._num_starts + 1
        directory = Path(tempfile.mkdtemp(prefix="jaxvllm-"))  # mode 0700
        channel, process, tasks = open_socket(), None, []
        ours, theirs = socket.socketpair()
        try:
            address = f"ipc://{directory}/api"
            channel.bind(address)
            process = await self._start(address, theirs)
            broker = ApiBroker(
                self._engines,
                channel,
                lambda counts: self._metrics.count_http(source, counts),
                self._render,
            )
            handing = self._handover.serve(f"API process {number}", ours, theirs)
            tasks = [asyncio.create_task(broker.run()), asyncio.create_task(handing)]
            self._running[number] = process
            ending = asyncio.create_task(process.wait())
            await until_first(asyncio.shield(ending), *map(asyncio.shield, tasks))  # raises a broker's error
            if not ending.done():
                logger.error("API process %d has not answered for long, and is killed", number)
                process.kill()
            return await ending
        finally:
            self._running.pop(number, None)
            if process is not None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            ours.close()
            theirs.close()
            self._metrics.http_ended(source)
            channel.close()
            shutil.rmtree(directory, ignore_errors=True)

    async def _start(self, address: str, connections: socket.socket) -> Process:
        fd = connections.fileno()
        start = ApiStart(
            self._engines.config,
            self._config,
            self._limits,
            self._chat_template,
            address,
            fd,
            self._door.is_local,
            self._door.max_files,
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "jaxvllm.server.api_process",
            stdin=PIPE,
            start_new_session=True,
            pass_fds=(fd,),
            env=os.environ,
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(start) + b"\n")
        return process

    async def _render(self) -> tuple[bytes, str]:
        return self._metrics.render()
