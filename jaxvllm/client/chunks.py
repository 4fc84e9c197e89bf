"""What a stream of /v1/completions or /v1/chat/completions carries: the fields that clients read."""

import json
from typing import Any

import msgspec

from jaxvllm.client.errors import ServerError
from jaxvllm.client.sse import Event

DONE = b"[DONE]"


class Delta(msgspec.Struct):
    """What is new in a chat message."""

    role: str | None = None
    content: str | None = None


class Choice(msgspec.Struct):
    """What is new in a completion: `text` in one dialect, `delta` in the other."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def new_text(self) -> str:
        return (self.text if self.delta is None else self.delta.content) or ""

    @property
    def opens(self) -> bool:
        """Whether this is only the message's role, which a server may send before there is a token."""
        return bool(self.delta and self.delta.role) and not self.new_text and self.finish_reason is None


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Tokens of a request, as the server counted them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None

    @property
    def cached_tokens(self) -> int:
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0


class Chunk(msgspec.Struct):
    """One event of a stream. The one with the usage has no choices."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


# 0.7 us for a chunk of 250 bytes, where json.loads takes 2.5: a load generator reads a hundred thousand of them.
_decode = msgspec.json.Decoder(Chunk).decode


def read_chunk(event: Event) -> Chunk:
    """The event's chunk. ServerError for an error the server sent in the stream, and for what is no chunk."""
    if event.name == "error":
        raise _broken_off(event)
    try:
        chunk = _decode(event.data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        start = event.data[:80].decode("utf-8", "replace")
        raise ServerError(f"the stream holds what is no chunk of a completion ({error}): {start}") from None
    if chunk.error is not None:
        raise _broken_off(event)
    return chunk


def _broken_off(event: Event) -> ServerError:
    return ServerError(f"the server broke off: {error_text(event.data)}")


def error_text(body: bytes) -> str:
    """The message of an OpenAI-shaped error, on one line; the start of the body where it has another shape."""
    try:
        error = json.loads(body)
    except ValueError:
        error = body.decode("utf-8", "replace")
    while isinstance(error, dict) and (inner := error.get("error") or error.get("message") or error.get("detail")):
        error = inner
    return " ".join(str(error).split())[:500] or "no reason given"
