"""Other processes of this machine, as the kernel sees them."""

import time
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and more of it than its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pid: int) -> None:
    """Fails after ten seconds."""
    deadline = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is left"
        time.sleep(0.05)
