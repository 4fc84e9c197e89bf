"""Gives all errors of an application the shape of `ApiError`."""

from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxvllm.server.errors import ApiError
from jaxvllm.server.http.disconnect import ClientGoneError
from jaxvllm.server.http.request_id import RequestId

# nginx's status for a client that closed the connection. No client sees it.
GONE = 499
_TEXTS = {404: "there is no such endpoint: GET /docs lists all", 405: "this endpoint does not take this method"}


def add_error_handlers(app: Starlette, as_api_error: Callable[[Exception, str], ApiError]) -> None:
    """Has `app` answer every error. `as_api_error` converts one that its endpoints raised in the request of an id."""

    async def refused(request: Request, error: Any) -> Response:
        message = _TEXTS.get(error.status_code, str(error.detail))
        response = ApiError(error.status_code, message).response(request.scope)
        response.headers.update(error.headers or {})
        return response

    async def gone(request: Request, error: Any) -> Response:
        return Response(status_code=GONE)

    async def failed(request: Request, error: Any) -> Response:
        return as_api_error(error, RequestId.of(request).text).response(request.scope)

    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(ClientGoneError, gone)
    for kind in (ApiError, ValueError, NotImplementedError, RuntimeError, TimeoutError, Exception):
        app.add_exception_handler(kind, failed)
