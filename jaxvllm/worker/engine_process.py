"""The parent's side of an engine's process: it starts the process, exchanges messages with it, and always ends it."""

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol, Self

import zmq
import zmq.asyncio

from jaxvllm.config import EngineConfig
from jaxvllm.worker import wire
from jaxvllm.worker.queue_limits import QueueLimits

# The longest address of a local socket that the kernel takes, including its NUL: sun_path in unix(7).
MAX_PATH = 108
# The time to read the last messages of a process that has ended.
LAST_WORDS_SECONDS = 0.2
# The same for a process that ended by itself before any message was read. Its only message says why there is no engine,
# and on a busy machine the end may be noticed long before the message is read.
ONLY_WORD_SECONDS = 10.0
# The time for an engine to close: it finishes the program that it is compiling, which takes 2 s for the demo model and
# ten times as long for a large one, or on a busy machine. If it is killed earlier, the processes that follow it end
# with an error.
STOP_SECONDS = 60.0


class Life(Protocol):
    """The process of an engine, as the system sees it that runs it."""

    @property
    def pid(self) -> int: ...

    @property
    def has_ended_itself(self) -> bool:
        """Whether it has ended, and was not killed."""

    @property
    def is_out_of_reach(self) -> bool:
        """Whether its host was lost, and with it the process, which then no request has ended."""

    async def wait(self) -> object:
        """Waits for its end."""

    def kill(self) -> None: ...

    def end_text(self) -> str:
        """Describes how it ended, for a message."""


class Place(Protocol):
    """A place at which the process of an engine runs."""

    async def start(self, config: EngineConfig, limits: QueueLimits) -> "EngineProcess":
        """Starts a process. It builds its engine, and sends a message when the engine is ready.

        Raises OSError for what may pass, such as no room. Then there is no process.
        """


class LocalPlace:
    """Runs the process as a child of this one. Its socket is in a directory that only this user may enter."""

    def __init__(self, environment: Mapping[str, str] | None = None):
        """Takes variables of the environment that the process has beside those of this process."""
        self.environment = environment or {}

    async def start(self, config: EngineConfig, limits: QueueLimits) -> "EngineProcess":
        """Implements `Place.start`."""
        directory = Path(tempfile.mkdtemp(prefix="jaxvllm-"))  # mode 0700
        path = directory / "engine"
        if len(str(path)) >= MAX_PATH:
            shutil.rmtree(directory)
            raise ValueError(f"{directory} is too long for a socket: set TMPDIR to a shorter directory")
        socket = open_socket()
        try:
            socket.bind(f"ipc://{path}")
            path.chmod(0o600)
            child = await ChildProcess.start(f"ipc://{path}", self.environment)
        except BaseException:
            socket.close()
            shutil.rmtree(directory, ignore_errors=True)
            raise
        engine = EngineProcess(child, socket, lambda: shutil.rmtree(directory, ignore_errors=True))
        engine.send(wire.Start(config, limits))
        return engine


def open_socket() -> zmq.asyncio.Socket:
    """Returns a socket for one engine, which is not bound yet."""
    socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
    for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
        socket.setsockopt(option, 0)  # queues without limit, and no waiting at the end
    return socket


class ChildProcess:
    """A child of this process. Implements `Life`."""

    is_out_of_reach = False

    def __init__(self, process: Process):
        self._process = process

    @classmethod
    async def start(cls, url: str, environment: Mapping[str, str]) -> Self:
        """Starts `jaxvllm.worker`, which connects to `url`, with `environment` beside this process's own."""
        command = (sys.executable, "-m", "jaxvllm.worker", url)
        return cls(
            await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, start_new_session=True, env=os.environ | environment
            )
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended_itself(self) -> bool:
        return self._process.returncode is not None and self._process.returncode >= 0

    async def wait(self) -> object:
        return await self._process.wait()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    def end_text(self) -> str:
        code = self._process.returncode
        if code is None:
            return "is running"
        if code < 0:
            return f"was ended by signal {-code} ({signal.strsignal(-code)})"
        return f"ended with exit code {code}"


class EngineProcess:
    """A running `jaxvllm.worker`, wherever it is, and the socket to it."""

    def __init__(self, life: Life, socket: zmq.asyncio.Socket, clean: Callable[[], None] = lambda: None):
        """Calls `clean` when the process has connected, and at the end."""
        self._life = life
        self._socket = socket
        self._clean = clean
        self._ended = asyncio.ensure_future(life.wait())
        self._is_connected = False

    @property
    def pid(self) -> int:
        return self._life.pid

    def send(self, command: wire.Command) -> None:
        """Sends a command without waiting. It goes when the process has connected, which may end before that."""
        self._socket.send(wire.encode(command))

    async def receive(self) -> wire.Report | None:
        """Returns the next message, or None when the process has ended and all its messages have been read."""
        said = asyncio.ensure_future(self._socket.recv())
        try:
            await asyncio.wait((said, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not said.done():
                await asyncio.wait((said,), timeout=self._last_words_seconds)
            if not said.done():
                return None
            if not self._is_connected:
                self._is_connected = True
                self._clean()
            report: wire.Report = wire.decode_report(said.result())
            return report
        finally:
            said.cancel()

    @property
    def _last_words_seconds(self) -> float:
        is_only = self._life.has_ended_itself and not self._is_connected
        return ONLY_WORD_SECONDS if is_only else LAST_WORDS_SECONDS

    @property
    def is_out_of_reach(self) -> bool:
        """Whether its host was lost, and with it the process, which then no request has ended."""
        return self._life.is_out_of_reach

    def end_text(self) -> str:
        """Describes how the process ended, for a message."""
        return self._life.end_text()

    async def stop(self) -> None:
        """Tells the process to close its engine, and waits for its end, at most `STOP_SECONDS`."""
        self.send(wire.Stop())
        await asyncio.wait((self._ended,), timeout=STOP_SECONDS)

    def kill(self) -> None:
        """Kills the process. `receive` then returns None."""
        self._life.kill()

    async def end(self) -> None:
        """Kills the process, waits for its end, and removes its socket."""
        self.kill()
        await self._ended
        self._socket.close()
        self._clean()
