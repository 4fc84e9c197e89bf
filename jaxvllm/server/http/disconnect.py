"""Clients that leave before their answer is complete: nobody works for them any longer."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.types import Receive


class ClientGoneError(Exception):
    """Raised when the client has closed the connection, so that no answer is needed."""


async def unless_gone[T](request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. If the client closes the connection, cancels it and raises ClientGoneError."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return await working
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working


async def send_unless_gone(
    receive: Receive, sending: Coroutine[Any, Any, None], *beside: Coroutine[Any, Any, None]
) -> None:
    """Waits until `sending` has ended, and raises its error, or until the client has gone, and then cancels it.

    What runs `beside` it ends with it.
    """
    tasks = [asyncio.ensure_future(work) for work in (sending, _disconnected(receive), *beside)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
