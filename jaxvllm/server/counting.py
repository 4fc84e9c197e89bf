"""Counts answers for the metrics, whoever gives them."""

from contextlib import ExitStack

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxvllm.server.metrics import Metrics

# Of requests that no endpoint took: a path that a client made up must not become a label.
NO_ENDPOINT = "none"
EVENT_STREAM = b"text/event-stream"


class Counting:
    """ASGI middleware, around all others."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with ExitStack() as open_streams:

            async def counted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    route = scope.get("route")  # the router leaves it there
                    self._metrics.on_http(getattr(route, "path", NO_ENDPOINT), message["status"])
                    if any(value.startswith(EVENT_STREAM) for name, value in message["headers"]):
                        open_streams.enter_context(self._metrics.http_stream())
                await send(message)

            await self._app(scope, receive, counted)
