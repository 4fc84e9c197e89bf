"""The parts of the OpenAPI document that FastAPI cannot derive: error statuses, and answers that are streams."""

from typing import Any, Literal

from pydantic import BaseModel

from jaxvllm.server.exchange import EVENT_STREAM


class ErrorBody(BaseModel):
    """The description of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """An error in OpenAI's shape."""

    error: ErrorBody


class AnthropicError(BaseModel):
    """The description of an error."""

    type: str
    message: str


class AnthropicErrorResponse(BaseModel):
    """An error in Anthropic's shape."""

    type: Literal["error"]
    error: AnthropicError


def as_anthropic(responses: dict[int | str, dict[str, Any]]) -> dict[int | str, dict[str, Any]]:
    """Returns `responses` with errors in Anthropic's shape."""
    return {
        status: told | {"model": AnthropicErrorResponse} if "model" in told else told
        for status, told in responses.items()
    }


def _errors(**texts: str) -> dict[int | str, dict[str, Any]]:
    return {int(status[1:]): {"model": ErrorResponse, "description": text} for status, text in texts.items()}


# The errors of every endpoint.
COMMON = _errors(
    s400="Something in the request is wrong or not supported: `param` names it",
    s401="The server has keys, and the request has none of them",
    s403="The server has no key, and does not answer requests with this Host",
    s408="The body did not arrive in time",
    s413="The body is larger than the server's limit",
    s415="The body is not application/json",
    s431="The headers are larger than the server's limit",
)
NOT_STORED = _errors(s404="No such response is stored for this API key")
# The errors of endpoints that use the engine.
GENERATES = COMMON | _errors(
    s404="The server does not have this model",
    s500="The engine died while it worked on the request",
    s503="There is no engine, too many requests wait, or the server shuts down: try again after Retry-After seconds",
    s504="The request took longer than the server's request_timeout",
)
# The answers of endpoints that may also stream.
STREAMED: dict[int | str, dict[str, Any]] = GENERATES | {
    200: {
        "description": "With `stream: true`, server-sent events; an `error` event when it fails after its start",
        "content": {EVENT_STREAM: {"schema": {"type": "string"}}},
    }
}
