"""Quick calls of the interpreters of Pallas, which call Python for each copy, barrier and access to memory.

`jax.experimental.io_callback` puts every number of a call on a device first, and the interpreters read each of them
back. That was half of the CPU of a kernel for GPUs, and an eighth of one for TPUs: they get NumPy's arrays here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src import callback as callbacks
from jax._src.pallas.mosaic_gpu.interpret import shared_memory


def _call(*args: Any, callback: Any, **_: Any) -> Any:
    # Copies, because XLA's memory of the arguments is theirs for the time of the call alone.
    return jax.tree.map(np.asarray, callback(*map(np.array, args)))


def _to_int(number: Any) -> Any:
    return number if isinstance(number, jax.core.Tracer) else int(number)


@contextmanager
def quick_callbacks() -> Iterator[None]:
    """Kernels that are interpreted within see the same numbers, races and copies as ever."""
    with (
        mock.patch.object(callbacks, "io_callback_impl", _call),
        mock.patch.object(shared_memory, "_to_int", _to_int),
    ):
        yield
