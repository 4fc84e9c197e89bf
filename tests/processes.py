"""Other processes of this machine, as the kernel sees them."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.waiting import wait_until


def state_of(pid: int) -> str | None:
    """The kernel's letter for what a process does, such as T for one that is stopped, or None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return None


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and more of it than its exit code."""
    return state_of(pid) not in (None, "Z")


def children(pid: int) -> list[int]:
    """The processes that a process has started and that are left."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [child for child in map(int, text.split()) if is_alive(child)]


def wait_until_gone(pid: int) -> None:
    """Fails when it stays."""
    wait_until(lambda: not is_alive(pid), lambda: f"process {pid} is left")


def stop(pid: int) -> None:
    """Stops a process, and returns when none of its threads runs any more.

    The signal alone does not say that: each thread goes on until it next enters the kernel. Straight after the signal,
    some of six busy threads still ran in 79 of 100 looks.
    """
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _thread_states(pid) <= {"T", "Z", "X"}, lambda: f"threads of {pid} are {_thread_states(pid)}")


def _thread_states(pid: int) -> set[str]:
    """Returns the states of a process's threads, in the letters of proc_pid_stat(5)."""
    states = set()
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # a thread may end meanwhile
            states.add(path.read_text(encoding="ascii").rpartition(")")[2].split()[0])
    return states


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops a process. What it works on cannot end meanwhile, however long the test takes to look at it."""
    stop(pid)
    try:
        wait_until(lambda: state_of(pid) in ("T", "Z", None), lambda: f"process {pid} goes on")
        yield
    finally:
        with suppress(ProcessLookupError):  # it may be what the test ends
            os.kill(pid, signal.SIGCONT)
