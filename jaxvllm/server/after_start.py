"""`AfterStart`: has requests that need the model wait while its first engine starts, as vLLM's clients expect."""

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxvllm.server.errors import ApiError
from jaxvllm.server.service import Service

# What only the model can answer. All other paths tell of the server itself, and are answered during the start, too.
FOLDER = "/v1/"
PATHS = frozenset({"/invocations", "/tokenize", "/detokenize", "/tokenizer_info"})


class AfterStart:
    """ASGI middleware that has requests for the model wait for the end of the first start, at most `request_timeout`.

    vLLM's server listens only when its engine is ready, so scripts take the first answer of any kind, such as 405 for
    `GET /v1/completions`, as the sign that it is. Later, while an engine that died is started again, requests get 503
    at once: another server may take them.
    """

    def __init__(self, app: ASGIApp, service: Service):
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["path"].startswith(FOLDER) or scope["path"] in PATHS):
            patience = self._service.config.request_timeout
            try:
                async with asyncio.timeout(patience):
                    await self._service.llm.started()
            except TimeoutError:
                name = self._service.model_names[0]
                error = ApiError(
                    503,
                    f"the model {name} was not ready within the server's request_timeout of {patience:g} s: try again, "
                    "and see GET /ready",
                )
                await error.response(scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)
