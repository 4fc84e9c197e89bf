"""The endpoints that Amazon SageMaker calls: `/ping` for readiness, and `POST /invocations` for each request."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from jaxvllm.server.errors import ApiError
from jaxvllm.server.protocol.chat_completions import ChatRequest, ChatResponse
from jaxvllm.server.protocol.completions import CompletionRequest, CompletionResponse
from jaxvllm.server.protocol.responses import ResponsesRequest, ResponsesResponse
from jaxvllm.server.routes import chat_completions, completions, responses
from jaxvllm.server.routes.documented import COMMON, STREAMED
from jaxvllm.server.service import Service

type Answer = Callable[[Service, dict[str, Any], Request], Awaitable[Response]]


async def _chat(service: Service, body: dict[str, Any], request: Request) -> Response:
    return await chat_completions.create(service, ChatRequest.model_validate(body), request)


async def _completions(service: Service, body: dict[str, Any], request: Request) -> Response:
    return await completions.create(service, CompletionRequest.model_validate(body), request)


async def _responses(service: Service, body: dict[str, Any], request: Request) -> Response:
    return await responses.create(service, ResponsesRequest.model_validate(body), request)


# For each kind of request, a field that no other kind has, and the function that answers it. The first field that is
# present decides.
ANSWERS: dict[str, Answer] = {"messages": _chat, "prompt": _completions, "input": _responses}


_NOT_READY: dict[int | str, dict[str, Any]] = {503: {"description": "The server takes no requests now. No body"}}


def router(service: Service) -> APIRouter:
    """Returns a router with these endpoints."""
    routes = APIRouter(tags=["SageMaker"])

    @routes.get("/ping", response_class=Response, responses=COMMON | _NOT_READY)
    @routes.post("/ping", response_class=Response, responses=COMMON | _NOT_READY)
    async def ping() -> Response:
        """Answers with the same status as `/ready`, which says whether the server takes requests, without a body."""
        return Response(status_code=200 if service.is_ready else 503)

    @routes.post(
        "/invocations",
        response_model=ChatResponse | CompletionResponse | ResponsesResponse,
        responses=STREAMED,
    )
    async def invoke(body: dict[str, Any], request: Request) -> Response:
        """Answers like `/v1/chat/completions` for a body with `messages`, like `/v1/completions` for one with `prompt`,
        and like `/v1/responses` for one with `input`.
        """
        for field, answer in ANSWERS.items():
            if body.get(field) is not None:
                try:
                    return await answer(service, body, request)
                except ValidationError as error:
                    # FastAPI's locations begin with "body", which is no part of a field's name.
                    errors = [each | {"loc": ("body", *each["loc"])} for each in error.errors()]
                    raise RequestValidationError(errors) from error
        raise ApiError(400, f"the body has none of {', '.join(ANSWERS)}: give one of them")

    return routes
