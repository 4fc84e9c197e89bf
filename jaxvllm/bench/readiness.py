"""Waiting for a server that is still starting."""

import time
from collections.abc import Callable

from jaxvllm.client.errors import ServerError

PAUSE = 1.0  # seconds between two tries


def patiently[T](call: Callable[[], T], patience: float) -> T:
    """What `call` returns, tried again for `patience` seconds while nobody answers or the server is not ready (503).

    ServerError of the last try, and of any other failure at once.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return call()
        except ServerError as error:
            if error.status not in (None, 503) or time.monotonic() + PAUSE > deadline:
                raise
        time.sleep(PAUSE)
