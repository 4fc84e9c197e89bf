"""`num_cores`: how many CPU cores this process may use, which may be fewer than the host has."""

import os


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
