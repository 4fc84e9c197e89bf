"""`Preparing`: the requests that wait for their grammars, and what wakes the loop when one is compiled."""

import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import zmq

from jaxvllm.core.request import GenerationRequest
from jaxvllm.worker import wire


class Preparing:
    """Requests outside the engine, whose grammars compile in threads."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[wire.Add, Future[Any]]] = {}  # by id
        # A pipe, because a socket of zmq belongs to one thread. It is there while something waits.
        self._pipe: tuple[int, int] | None = None

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, add: wire.Add, grammar: Future[Any]) -> None:
        """Keeps a request until `grammar` is done."""
        if self._pipe is None:
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
        self._waiting[add.request.request_id] = (add, grammar)
        grammar.add_done_callback(lambda _: self._wake())

    def discard(self, request_id: str) -> wire.Add | None:
        """Forgets a request and returns it, or None if it does not wait."""
        found = self._waiting.pop(request_id, None)
        return None if found is None else found[0]

    def take(self, is_wanted: Callable[[GenerationRequest], bool]) -> list[wire.Add]:
        """Forgets and returns the requests that are wanted."""
        wanted = [name for name, (add, _) in self._waiting.items() if is_wanted(add.request)]
        return [self._waiting.pop(name)[0] for name in wanted]

    def take_ready(self) -> list[tuple[wire.Add, Future[Any]]]:
        """Forgets and returns the requests whose grammars are done, with these, in the order in which they came."""
        ready = [name for name, (_, grammar) in self._waiting.items() if grammar.done()]
        return [self._waiting.pop(name) for name in ready]

    def wait(self, socket: "zmq.Socket[bytes]") -> None:
        """Waits until a grammar is done, or `socket` has a message."""
        assert self._pipe is not None
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._pipe[0], zmq.POLLIN)
        if any(ready == self._pipe[0] for ready, _ in poller.poll()):
            os.read(self._pipe[0], 4096)

    def _wake(self) -> None:
        assert self._pipe is not None
        with suppress(BlockingIOError):  # it is full, since nothing reads it while the engine works, and that wakes too
            os.write(self._pipe[1], b"!")
