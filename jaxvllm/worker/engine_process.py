"""The parent's side of an engine's process: it starts the process, exchanges messages with it, and always ends it."""

import asyncio
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from pathlib import Path
from typing import Self

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


class EngineProcess:
    """A running `jaxvllm.worker` and the socket to it, in a directory that only this user may enter."""

    def __init__(self, process: Process, socket: zmq.asyncio.Socket, directory: Path):
        self._process = process
        self._socket = socket
        self._directory = directory
        self._ended = asyncio.ensure_future(process.wait())
        self._is_connected = False

    @classmethod
    async def start(cls, config: EngineConfig, limits: QueueLimits) -> Self:
        """Starts a process. It builds its engine, and sends a message when the engine is ready."""
        directory = Path(tempfile.mkdtemp(prefix="jaxvllm-"))  # mode 0700
        path = directory / "engine"
        if len(str(path)) >= MAX_PATH:
            shutil.rmtree(directory)
            raise ValueError(f"{directory} is too long for a socket: set TMPDIR to a shorter directory")
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        try:
            for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
                socket.setsockopt(option, 0)  # queues without limit, and no waiting at the end
            socket.bind(f"ipc://{path}")
            path.chmod(0o600)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "jaxvllm.worker", f"ipc://{path}", stdin=PIPE, start_new_session=True
            )
            # The send is not awaited: it happens when the process has connected, and the process may end before.
            socket.send(wire.encode(wire.Start(config, limits)))
        except BaseException:
            socket.close()
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return cls(process, socket, directory)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: wire.Command) -> None:
        """Sends a command without waiting."""
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
                self._clean()  # nothing else may connect, and no file remains however this process ends
            report: wire.Report = wire.decode_report(said.result())
            return report
        finally:
            said.cancel()

    @property
    def _last_words_seconds(self) -> float:
        code = self._process.returncode
        has_ended_itself = code is not None and code >= 0
        return ONLY_WORD_SECONDS if has_ended_itself and not self._is_connected else LAST_WORDS_SECONDS

    def end_text(self) -> str:
        """Describes how the process ended, for a message."""
        code = self._process.returncode
        if code is None:
            return "is running"
        if code < 0:
            return f"was ended by signal {-code} ({signal.strsignal(-code)})"
        return f"ended with exit code {code}"

    async def stop(self) -> None:
        """Tells the process to close its engine, and waits for its end, at most `STOP_SECONDS`."""
        self.send(wire.Stop())
        await asyncio.wait((self._ended,), timeout=STOP_SECONDS)

    def kill(self) -> None:
        """Kills the process. `receive` then returns None."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def end(self) -> None:
        """Kills the process, waits for its end, and removes its socket."""
        self.kill()
        await self._ended
        self._socket.close()
        self._clean()

    def _clean(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
