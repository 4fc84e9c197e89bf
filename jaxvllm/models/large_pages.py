"""Memory for weights on a CPU, which the system may map in large pages however small each array is."""

import math
import mmap
from contextlib import suppress
from functools import cache
from threading import Lock

import numpy as np

_LARGE_PAGE = 2 * 2**20  # bytes, of x86-64 and of ARM64 with pages of 4 KiB
# Bytes of a piece of memory. An array that is larger has a piece of its own.
_PIECE = 32 * 2**20
_ALIGN = 64  # bytes: XLA uses arrays that begin at a multiple of these in place, and copies others


def kept_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Makes zeros for an array that stays, beside others that stay.

    A piece of memory is freed when none of its arrays is left. The current one, of which the next arrays are cut,
    is kept: 32 MiB. An array begins at a multiple of 64 bytes. Linux maps it in pages of 2 MiB where it can (madvise).
    NumPy asks for these for arrays of 4 MiB and more, and most matrices of few bits have less.
    """
    size = math.prod(shape) * dtype.itemsize
    return _pieces().take(size).view(dtype).reshape(shape)


class _Pieces:
    """Cuts memory from the current piece, until it has too little left."""

    def __init__(self) -> None:
        self._lock = Lock()  # several engines of a process may load
        self._left = np.zeros(0, np.uint8)

    def take(self, size: int) -> np.ndarray:
        with self._lock:
            whole = -(-size // _ALIGN) * _ALIGN
            if whole > len(self._left):
                made = _piece(max(whole, _PIECE))
                if whole >= _PIECE:
                    return made[:size]
                self._left = made
            taken, self._left = self._left[:size], self._left[whole:]
            return taken


def _piece(size: int) -> np.ndarray:
    """Returns zeros that begin with a large page."""
    # Shared memory, which is the default, has large pages only where the system allows them for files in memory.
    memory = mmap.mmap(-1, size + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    first = -whole.ctypes.data % _LARGE_PAGE
    return whole[first : first + size]


@cache
def _pieces() -> _Pieces:
    return _Pieces()
