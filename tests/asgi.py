"""Applications of tests, over real sockets."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from tests.waiting import PATIENCE, wait_until


@contextmanager
def in_thread(app: Any, **options: Any) -> Iterator[str]:
    """Serves `app` on a free port of its own, in a thread, with uvicorn's `options`; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # Clients keep connections for 5 s, as long as uvicorn does by default: either might close what the other uses.
        options.setdefault("timeout_keep_alive", int(PATIENCE))
        server = uvicorn.Server(uvicorn.Config(app, **options))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive())
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
