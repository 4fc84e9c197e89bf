"""What Amazon SageMaker calls: `/ping` asks whether requests are taken, `POST /invocations` brings each of them."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from jaxvllm.server.errors import ApiError
from jaxvllm.server.protocol.chat import ChatRequest, ChatResponse
from jaxvllm.server.protocol.completions import CompletionRequest, CompletionResponse
from jaxvllm.server.protocol.responses import ResponsesRequest, ResponsesResponse
from jaxvllm.server.routes import chat, completions, responses
from jaxvllm.server.routes.documented import COMMON, STREAMED
from jaxvllm.server.service import Service

type Answer = Callable[[Service, dict[str, Any], Request], Awaitable[Response]]


async def _chat(service: Service, body: dict[str, Any], request: Request) -> Response:
    return await chat.create(service, ChatRequest.model_validate(body), request)


async def _completions(service: Service, body: dict[str, Any], request: Request) -> Response:
    return await completions.create(service, CompletionRequest.model_validate(body), request)


async def _responses(service: Service, body: dict[str, Any], request: Request) -> Response:
    return await responses.create(service, ResponsesRequest.model_validate(body), request)


# The field that only one kind of request has, and what answers that kind. The first one that is there decides.
ANSWERS: dict[str, Answer] = {"messages": _chat, "prompt": _completions, "input": _responses}


_NOT_READY: dict[int | str, dict[str, Any]] = {503: {"description": "No requests are taken now; there is no body"}}


def router(service: Service) -> APIRouter:
    """The endpoints."""
    routes = APIRouter(tags=["SageMaker"])

    @routes.get("/ping", response_class=Response, responses=COMMON | _NOT_READY)
    @routes.post("/ping", response_class=Response, responses=COMMON | _NOT_READY)
    async def ping() -> Response:
        """Whether requests are taken, by the status alone: as `/ready`."""
        return Response(status_code=200 if service.is_ready else 503)

    @routes.post(
        "/invocations",
        response_model=ChatResponse | CompletionResponse | ResponsesResponse,
        responses=STREAMED,
    )
    async def invoke(body: dict[str, Any], request: Request) -> Response:
        """The same as `/v1/chat/completions` for a body with `messages`, as `/v1/completions` for one with `prompt`,
        and as `/v1/responses` for one with `input`.
        """
        for field, answer in ANSWERS.items():
            if body.get(field) is not None:
                try:
                    return await answer(service, body, request)
                except ValidationError as error:
                    # Where FastAPI says that it looked, which is no part of a field's name.
                    errors = [each | {"loc": ("body", *each["loc"])} for each in error.errors()]
                    raise RequestValidationError(errors) from error
        raise ApiError(400, f"the body has none of {', '.join(ANSWERS)}: give one of them")

    return routes
