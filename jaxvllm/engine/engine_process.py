"""The process of an engine, as its parent has it: started, spoken to, and never left behind."""

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
from jaxvllm.engine import wire
from jaxvllm.engine.admission import QueueLimits

# What the kernel takes as the address of a local socket, its NUL included: sun_path of unix(7).
MAX_PATH = 108
# After the end of the process, for what it said last.
LAST_WORDS_SECONDS = 0.2
# The same for a process that ended by itself before it had said anything. Its only word is why it has no engine, and on
# a busy machine the end may be noticed long before that is read.
ONLY_WORD_SECONDS = 10.0
# For an engine to close: it compiles what it has begun to compile, which takes 2 s for the demo model and ten times as
# long for a large one, or on a busy machine. If it is ended before, the processes that follow it end with an error.
STOP_SECONDS = 60.0


class EngineProcess:
    """A running `jaxvllm.engine.worker` and the socket to it, in a directory that only this user may enter."""

    def __init__(self, process: Process, socket: zmq.asyncio.Socket, directory: Path):
        self._process = process
        self._socket = socket
        self._directory = directory
        self._ended = asyncio.ensure_future(process.wait())
        self._is_connected = False

    @classmethod
    async def start(cls, config: EngineConfig, limits: QueueLimits) -> Self:
        """Starts one. It builds its engine, and tells when that is ready."""
        directory = Path(tempfile.mkdtemp(prefix="jaxvllm-"))  # mode 0700
        path = directory / "engine"
        if len(str(path)) >= MAX_PATH:
            shutil.rmtree(directory)
            raise ValueError(f"{directory} is too long for a socket: set TMPDIR to a shorter directory")
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        try:
            for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
                socket.setsockopt(option, 0)  # no limit; nobody is waited for
            socket.bind(f"ipc://{path}")
            path.chmod(0o600)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "jaxvllm.engine.worker", f"ipc://{path}", stdin=PIPE, start_new_session=True
            )
            # Not awaited: this goes out when the process has connected, and it may end before.
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
        """Returns at once."""
        self._socket.send(wire.encode(command))

    async def receive(self) -> wire.Report | None:
        """What it says next; None when it has ended and everything that it said is read."""
        said = asyncio.ensure_future(self._socket.recv())
        try:
            await asyncio.wait((said, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not said.done():
                await asyncio.wait((said,), timeout=self._last_words_seconds)
            if not said.done():
                return None
            if not self._is_connected:
                self._is_connected = True
                self._clean()  # nobody else shall connect, and whatever ends this process leaves no file behind
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
        """How it ended, for people."""
        code = self._process.returncode
        if code is None:
            return "is running"
        if code < 0:
            return f"was ended by signal {-code} ({signal.strsignal(-code)})"
        return f"ended with exit code {code}"

    async def stop(self) -> None:
        """Lets it close its engine. Returns when it has ended, or has not in time."""
        self.send(wire.Stop())
        await asyncio.wait((self._ended,), timeout=STOP_SECONDS)

    def kill(self) -> None:
        """Ends it now; `receive` will tell."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def end(self) -> None:
        """Ends it now and removes what it used. Returns when it is gone."""
        self.kill()
        await self._ended
        self._socket.close()
        self._clean()

    def _clean(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
