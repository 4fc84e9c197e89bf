"""What the OpenAPI document says of endpoints beside their models: statuses, and that some answer as a stream."""

from typing import Any, Literal

from pydantic import BaseModel

from jaxvllm.server.exchange import EVENT_STREAM


class ErrorBody(BaseModel):
    """Of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """OpenAI's shape of an error."""

    error: ErrorBody


class AnthropicError(BaseModel):
    """Of an error."""

    type: str
    message: str


class AnthropicErrorResponse(BaseModel):
    """Anthropic's shape of an error."""

    type: Literal["error"]
    error: AnthropicError


def as_anthropic(responses: dict[int | str, dict[str, Any]]) -> dict[int | str, dict[str, Any]]:
    """The same with errors in Anthropic's shape."""
    return {
        status: told | {"model": AnthropicErrorResponse} if "model" in told else told
        for status, told in responses.items()
    }


def _errors(**texts: str) -> dict[int | str, dict[str, Any]]:
    return {int(status[1:]): {"model": ErrorResponse, "description": text} for status, text in texts.items()}


# Of every endpoint.
COMMON = _errors(
    s400="Something in the request is wrong or not supported: `param` names it",
    s401="The server has keys, and none of them came",
    s403="The server has no key, and answers under this Host to nobody",
    s408="The body did not arrive in time",
    s413="The body is larger than the server's limit",
    s415="The body is no application/json",
    s431="The headers are larger than the server's limit",
)
# Of those that make the engine work.
GENERATES = COMMON | _errors(
    s404="The model is not here",
    s500="The engine died while it worked on the request",
    s503="No engine, too many requests that wait, or the server shuts down: ask again after Retry-After seconds",
    s504="The request took longer than the server's request_timeout",
)
# Of those that may also stream.
STREAMED: dict[int | str, dict[str, Any]] = GENERATES | {
    200: {
        "description": "With `stream: true`, server-sent events; an `error` event when it fails on the way",
        "content": {EVENT_STREAM: {"schema": {"type": "string"}}},
    }
}
