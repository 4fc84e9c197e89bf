"""The phases of a start, from the start of the process to the first token, and their times."""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StartPhase:
    """A part of a start."""

    name: str
    seconds: float


@dataclass(frozen=True)
class StartupReport:
    """The phases of a start so far, in order. They leave nothing out, so their sum is the time that the start took."""

    phases: tuple[StartPhase, ...]
    num_loaded: int  # programs that were found on disk when the engine was ready
    num_compiled: int  # programs that were traced and compiled by then
    first_token_seconds: float | None  # from then to the first token, the wait for a request included; None: not yet

    @property
    def seconds(self) -> float:
        """The seconds from the start of the process, where the system tells it, until the engine was ready."""
        return sum(phase.seconds for phase in self.phases)

    def __str__(self) -> str:
        phases = ", ".join(f"{phase.name} {phase.seconds:.2f}" for phase in self.phases)
        programs = f"{self.num_loaded} programs loaded, {self.num_compiled} compiled"
        line = f"engine started in {self.seconds:.2f} s: {phases} ({programs})"
        if self.first_token_seconds is None:
            return line
        return f"{line}; first token {self.first_token_seconds:.2f} s later"


@contextmanager
def uncollected() -> Iterator[None]:
    """Keeps Python's garbage collector away from the block, in all threads, and for good from what there is at its end.

    Imports make objects that stay, and so does an engine: to import one took 0.90 s, and takes 0.78 (jax 0.11.2). The
    first collection afterwards would visit all of them: 160,000 objects of the demo model, 0.08 s before the first
    token. In a server each full collection took 70 to 130 ms every ten seconds, and no request went on meanwhile.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


class StartupClock:
    """Times the phases of one start."""

    def __init__(self) -> None:
        """Ends the first phase, which came before the engine: the interpreter and the imports."""
        self._last = time.monotonic()
        lived = seconds_since_process_start()
        self._phases = [] if lived is None else [StartPhase("imports", lived)]
        self._num_loaded = self._num_compiled = 0
        self._ready: float | None = None
        self._first_token: float | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block. What came between this phase and the one before is `other`."""
        self._end("other")
        yield
        self._end(name)

    def ready(self, num_loaded: int, num_compiled: int) -> None:
        """Notes that requests may come."""
        self._end("other")
        self._ready, self._num_loaded, self._num_compiled = self._last, num_loaded, num_compiled

    def first_token(self) -> None:
        """Notes that a token was read."""
        self._first_token = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether there was a token."""
        return self._first_token is not None

    def report(self) -> StartupReport:
        """Returns the phases so far. Phases with the same name are added up."""
        seconds: dict[str, float] = {}
        for phase in self._phases:
            seconds[phase.name] = seconds.get(phase.name, 0.0) + phase.seconds
        other = seconds.pop("other", 0.0)
        later = None if self._ready is None or self._first_token is None else self._first_token - self._ready
        phases = tuple(StartPhase(*item) for item in [*seconds.items(), ("other", other)])
        return StartupReport(phases, self._num_loaded, self._num_compiled, later)

    def _end(self, name: str) -> None:
        now = time.monotonic()
        self._phases.append(StartPhase(name, now - self._last))
        self._last = now


def seconds_since_process_start() -> float | None:
    """Returns the age of this process according to the operating system, or None if that does not say."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except OSError:
        return None
    return uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK")
