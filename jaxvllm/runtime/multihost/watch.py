"""`Watch`: waits for the results of device calls, for a process that reads them later or not at all."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import jax


class Watch:
    """Waits for device results in its own thread. It calls `failed` with the first error and then stops."""

    def __init__(self, failed: Callable[[Exception], None]):
        self._failed = failed
        self._made: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._wait, daemon=True).start()

    def give(self, made: Any) -> None:
        """Queues the arrays of `made`, a pytree, to be waited for after the earlier ones. Returns at once."""
        self._made.put(made)

    def _wait(self) -> None:
        try:
            while True:
                jax.block_until_ready(self._made.get())
        except Exception as error:
            self._failed(error)
