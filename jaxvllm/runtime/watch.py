"""Waiting for what the devices make, on behalf of a process that would not read it, or only later."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import jax


class Watch:
    """Waits for all that it is given in a thread of its own, and calls `failed` with the first error; then it ends."""

    def __init__(self, failed: Callable[[Exception], None]):
        self._failed = failed
        self._made: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._wait, daemon=True).start()

    def give(self, made: Any) -> None:
        """Returns at once. Of `made`, any tree, the arrays are waited for, after all that came before."""
        self._made.put(made)

    def _wait(self) -> None:
        try:
            while True:
                jax.block_until_ready(self._made.get())
        except Exception as error:
            self._failed(error)
