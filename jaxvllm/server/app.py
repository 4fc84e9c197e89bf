"""The FastAPI application: it has every endpoint of one `Service`, and gives all errors the same shape."""

from functools import cache, partial
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import jaxvllm
from jaxvllm.server import http_doc
from jaxvllm.server.after_start import AfterStart
from jaxvllm.server.error_handlers import add_error_handlers
from jaxvllm.server.errors import from_validation
from jaxvllm.server.exchange import as_api_error
from jaxvllm.server.http.auth import AdminOnly
from jaxvllm.server.routes import (
    adapters,
    chat_completions,
    completions,
    development,
    elastic,
    embeddings,
    generate,
    info,
    messages,
    pausing,
    playground,
    responses,
    sagemaker,
    stored_responses,
    tokenization,
)
from jaxvllm.server.service import Service


def create_app(service: Service) -> FastAPI:
    """Makes the application with all endpoints. `HttpDoor` adds the guards (keys, limits) around it."""
    app = DocumentedApp(
        title="jaxvllm",
        version=jaxvllm.__version__,
        description="LLM inference in JAX behind the APIs of OpenAI and Anthropic.",
        openapi_url=None,  # FastAPI's own route would hold all other requests up while the document is made
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # it would redirect clients to the Host that they sent, which may be any host
    )
    for module in (
        completions,
        embeddings,
        generate,
        chat_completions,
        responses,
        stored_responses,
        messages,
        tokenization,
        info,
        sagemaker,
        playground,
    ):
        app.include_router(module.router(service))
    for_admins = [Depends(AdminOnly(service.config.admin_keys()))]
    if service.config.enable_elastic_ep:
        app.include_router(elastic.router(service), dependencies=for_admins)
    if service.config.lora_directory is not None:
        app.include_router(adapters.router(service), dependencies=for_admins)
    if service.config.dev_endpoints:
        app.include_router(development.router(service), dependencies=for_admins)
        app.include_router(pausing.router(service), dependencies=for_admins)

    app.add_middleware(HeadAsGet)
    app.add_middleware(AfterStart, service=service)
    # A path or a method that does not exist is refused before it comes here. That answer waits for the start, too.
    app.state.around_refusals = partial(AfterStart, service=service)
    page = cache(lambda: http_doc.page(app))

    # These two are not async, so that they run in a thread: the first call takes a while.

    @app.get("/openapi.json", include_in_schema=False)
    def openapi() -> JSONResponse:
        return JSONResponse(app.openapi())

    @app.get("/docs", include_in_schema=False)
    def docs() -> Response:
        # The page may run no script, so that no text in it can become one. Its style is inline.
        headers = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return Response(page(), headers=headers, media_type="text/html")

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return from_validation(error.errors()).response(request.scope)

    add_error_handlers(app, as_api_error)
    return app


class DocumentedApp(FastAPI):
    """An application whose OpenAPI document says that a bad body is answered with 400, as it is.

    The document is made when it is first asked for: it takes 0.47 s of the CPU, which no start has to wait for.
    """

    def openapi(self) -> dict[str, Any]:
        """Returns the document without FastAPI's own response to a bad body, which has status 422."""
        document = super().openapi()
        for methods in document["paths"].values():
            for endpoint in methods.values():
                endpoint["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document


class HeadAsGet:
    """ASGI middleware that answers HEAD like GET, without the body, on every path that has GET.

    FastAPI's routes answer only the methods that they name, and naming HEAD would document a second endpoint.
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
