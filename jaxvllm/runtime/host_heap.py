"""The C library's heap: on CPU, XLA takes the temporaries of every call from it, and gives them back."""

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
# The most that glibc allows. Larger temporaries are mapped anew by every call of a program, page by page.
MMAP_THRESHOLD = 32 * 2**20
# Freed memory up to this stays in the process. It must be larger than the temporaries of a step.
TRIM_THRESHOLD = 2**30


def keep_temporaries() -> None:
    """Makes glibc keep freed memory, so that the next call of a program finds it mapped; elsewhere this does nothing.

    By default the limits are 128 KiB, and they rise only slowly. So every step mapped its temporaries and met them as
    page faults: sixteen requests on 25M parameters gave 586 tokens per second and not 677 (2 cores). If a user has set
    MALLOC_MMAP_THRESHOLD_ or MALLOC_TRIM_THRESHOLD_, that choice holds.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or "MALLOC_MMAP_THRESHOLD_" in os.environ or "MALLOC_TRIM_THRESHOLD_" in os.environ:
        return
    mallopt(_MMAP_THRESHOLD, MMAP_THRESHOLD)
    mallopt(_TRIM_THRESHOLD, TRIM_THRESHOLD)
