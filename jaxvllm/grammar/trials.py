"""`Trials`: has grammars tried in another process, which may be killed, before the engine compiles them."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from typing import Literal

from jaxvllm.grammar.trial_process import SIZE_BYTES, TrialSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trial:
    """The end of the trial of a grammar.

    A grammar that is "late" took longer than any may, and a "crowded" one longer than one may while others wait. One
    that "died" ended its process, with a signal if it is not 0. One that is "lost" was not tried to its end.
    """

    end: Literal["passed", "late", "crowded", "died", "lost"]
    num_bytes: int = 0  # of memory that the grammar takes, if it passed
    signal: int = 0


class Trials:
    """Tries grammars in a process, which starts with the first of them, and again when it has ended.

    Threads may share it.
    """

    def __init__(self, settings: Callable[[], TrialSettings]):
        """Calls `settings` for each start of the process."""
        self._settings = settings
        self._lock = threading.Lock()  # of everything below
        self._process: subprocess.Popen[bytes] | None = None
        self._pending: dict[int, Future[Trial]] = {}
        self._numbers = count()
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The id of the process, or None while there is none."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Starts the process unless it runs, or nothing may be tried any more."""
        with self._lock:
            if not self._is_closed:
                self._running()

    def run(self, source: str) -> Future[Trial]:
        """Tries a grammar. Takes as long as starting the process if there is none."""
        future: Future[Trial] = Future()
        with self._lock:
            number = next(self._numbers)
            line = json.dumps({"number": number, "source": source}).encode() + b"\n"
            try:
                process = self._running()
                self._pending[number] = future
                _write(process, line)
            # No memory, processes or threads, which may pass, or the process has just ended.
            except (OSError, MemoryError, RuntimeError) as error:
                logger.error("the process that tries grammars does not work: %s", error)
                self._pending.pop(number, None)
                future.set_result(Trial("lost"))
        return future

    def close(self) -> None:
        """Ends the process. What it tries is lost, and nothing may be tried afterwards."""
        with self._lock:
            self._is_closed = True
            if self._process is not None and self._process.stdin is not None:
                with suppress(OSError):
                    self._process.stdin.close()

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._is_closed:
            raise OSError("it is closed")
        if self._process is None:
            settings = json.dumps(asdict(self._settings())).encode()
            process = subprocess.Popen(
                [sys.executable, "-m", "jaxvllm.grammar.trial_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the parent
                # An arena for each thread would take address space, which is limited.
                env=os.environ | {"MALLOC_ARENA_MAX": "1"},
            )
            listener = threading.Thread(target=self._listen, args=(process,), name="jaxvllm-trials", daemon=True)
            try:
                _write(process, len(settings).to_bytes(SIZE_BYTES) + settings)
                listener.start()
            except BaseException:  # a process that is not told its settings would take a grammar for them
                process.kill()
                process.communicate()
                raise
            self._process = process
        return self._process

    def _listen(self, process: "subprocess.Popen[bytes]") -> None:
        """Reads results until the process has ended."""
        assert process.stdout is not None and process.stdin is not None
        with process.stdout:
            for line in process.stdout:
                told = json.loads(line)
                with self._lock:
                    future = self._pending.pop(told.pop("number"))
                future.set_result(Trial(**told))
        code = process.wait()
        with self._lock:
            if not self._is_closed:
                logger.error("the process that tries grammars ended with code %d: another follows", code)
            self._process = None
            lost, self._pending = self._pending, {}
            with suppress(OSError):
                process.stdin.close()
        for future in lost.values():
            future.set_result(Trial("lost"))


def _write(process: "subprocess.Popen[bytes]", data: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(data)
    process.stdin.flush()
