"""Counts all HTTP answers for the metrics."""

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxvllm.server.endpoints import flat
from jaxvllm.server.metrics.prometheus import Metrics

# The label of requests for paths that do not exist: a path that a client made up must not become a label.
NO_ENDPOINT = "none"
EVENT_STREAM = b"text/event-stream"


class Counting:
    """ASGI middleware around all others. It counts each answer under the path template of its route in `routes`.

    It also counts refusals by the guards, although the router never sees those requests.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Iterable[BaseRoute]):
        self._app = app
        self._metrics = metrics
        self._templates = list(_templates(routes))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with ExitStack() as open_streams:

            async def counted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self._metrics.on_http(self._template(scope["path"]), message["status"])
                    if any(value.startswith(EVENT_STREAM) for name, value in message["headers"]):
                        open_streams.enter_context(self._metrics.http_stream())
                await send(message)

            await self._app(scope, receive, counted)

    def _template(self, path: str) -> str:
        return next((template for pattern, template in self._templates if pattern.match(path)), NO_ENDPOINT)


def _templates(routes: Iterable[BaseRoute]) -> Iterator[tuple[re.Pattern[str], str]]:
    """Yields the paths of `routes` as patterns, each with its template."""
    for route in flat(routes):
        if (pattern := getattr(route, "path_regex", None)) is not None:
            yield pattern, getattr(route, "path", NO_ENDPOINT)
