"""The application: every endpoint over one `Service`, and every error in one shape."""

from functools import cache
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import jaxvllm
from jaxvllm.server import http_doc
from jaxvllm.server.errors import ApiError, from_validation
from jaxvllm.server.exchange import ClientGoneError, as_api_error
from jaxvllm.server.request_id import RequestId
from jaxvllm.server.routes import (
    chat,
    completions,
    development,
    info,
    messages,
    playground,
    responses,
    sagemaker,
    tokenization,
)
from jaxvllm.server.service import Service

# nginx's own: the client closed the connection. Nobody reads it.
GONE = 499


def create_app(service: Service) -> FastAPI:
    """All endpoints. The guards around them (keys, limits) are `jaxvllm.server.serve`'s."""
    app = FastAPI(
        title="jaxvllm",
        version=jaxvllm.__version__,
        description="LLM inference in JAX behind the APIs of OpenAI and Anthropic.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # it would send clients to whatever Host they named
    )
    for module in (completions, chat, responses, messages, tokenization, info, sagemaker, playground):
        app.include_router(module.router(service))
    if service.config.dev_endpoints:
        app.include_router(development.router(service))

    app.add_middleware(HeadAsGet)
    page = cache(lambda: http_doc.page(app))

    @app.get("/docs", include_in_schema=False)
    def docs() -> Response:  # in a thread: the first time it takes a while
        # No script, so that no text in it can become one; the style is in the page.
        headers = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return Response(page(), headers=headers, media_type="text/html")

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return from_validation(error.errors()).response(request.url.path)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        texts = {404: "there is no such endpoint: GET /docs lists all", 405: "this endpoint takes another method"}
        response = ApiError(error.status_code, texts.get(error.status_code, str(error.detail))).response(
            request.url.path
        )
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=GONE)

    async def failed(request: Request, error: Any) -> Response:
        return as_api_error(error, RequestId.of(request).text).response(request.url.path)

    for kind in (ApiError, ValueError, NotImplementedError, RuntimeError, TimeoutError, Exception):
        app.add_exception_handler(kind, failed)
    _forget_422(app)
    return app


class HeadAsGet:
    """Answers HEAD as GET, without the body, on every path that has GET.

    FastAPI's own routes answer only the methods that they name, and a second method would be documented as a second
    endpoint.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_head)


def _forget_422(app: FastAPI) -> None:
    """FastAPI documents its own answer to a bad body, which ours takes the place of."""
    document = app.openapi()
    for methods in document["paths"].values():
        for endpoint in methods.values():
            endpoint["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
