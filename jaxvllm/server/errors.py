"""Errors as clients see them: a status and a body of one shape, never a path, an address or a traceback."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.responses import JSONResponse

from jaxvllm.core.errors import ContextLengthError, ParameterError

# OpenAI's clients raise a different exception for each status, and print the type.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Seconds after which a client may try again. A full queue needs a step or two, an engine that died needs a restart.
RETRY_AFTER = 1


# In pydantic's errors, the location of a field begins with one of these sources. The name of a field with several
# possible forms is followed by one of these forms.
_SOURCES = ("body", "query", "path")
_FORMS = ("str", "list[", "literal[")
# Fields of other servers, and of older versions of vLLM, that have another name here.
_INSTEAD = {
    "guided_json": 'use structured_outputs: {"json": ...}',
    "guided_regex": 'use structured_outputs: {"regex": ...}',
    "guided_choice": 'use structured_outputs: {"choice": ...}',
    "guided_grammar": 'use structured_outputs: {"grammar": ...}',
    "guided_decoding_backend": "leave it out, since one library compiles all forms",
    "guided_whitespace_pattern": "leave it out, since the form says where there may be white space",
    "enable_thinking": 'use chat_template_kwargs: {"enable_thinking": ...}',
    "max_new_tokens": "use max_tokens",
    "repeat_penalty": "use repetition_penalty",
    "num_predict": "use max_tokens",
}
# The error of an object whose `type` is none of those that it may have.
UNKNOWN_TYPE = "unknown_type"


# What is told of images, sounds and videos, at every endpoint. The types of parts that hold them, in all APIs:
TEXT_ONLY = "this model reads text only"
_MEDIA = ("image", "input_image", "document", "file", "input_file", "audio", "input_audio", "video")


class ApiError(Exception):
    """An error response to a request: its status and its message."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        methods: Sequence[str] = (),
    ):
        """Takes the parts. `methods` are those that the path takes, for a response of status 405."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self._methods = methods

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """Returns the body in OpenAI's shape, which is also the data of a stream's `error` event."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """Returns the body in Anthropic's shape."""
        kind = "api_error" if self.status == 500 else self.type
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, scope: Mapping[str, Any] | None = None) -> JSONResponse:
        """Returns the whole response, in the shape of the API that the request of this ASGI `scope` belongs to."""
        headers = {"Retry-After": str(RETRY_AFTER)} if self.status == 503 else {}
        if self.status == 504:  # OpenAI's clients would send it twice more, only to run into the timeout again
            headers["x-should-retry"] = "false"
        if self._methods:
            headers["Allow"] = ", ".join(self._methods)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        body = self.anthropic_body() if scope is not None and _is_anthropic(scope) else self.body()
        return JSONResponse(body, self.status, headers)


def _is_anthropic(scope: Mapping[str, Any]) -> bool:
    """Returns whether a client of Anthropic's sent the request. OpenAI's API has lists of models at the same path."""
    path = scope["path"]
    if path == "/v1/models" or path.startswith("/v1/models/"):
        return any(name == b"anthropic-version" for name, _ in scope["headers"])
    return bool(path.startswith("/v1/messages"))


class PromptTooLongError(ApiError):
    """The response to a prompt that is too long, in words that OpenAI's and Anthropic's clients recognise."""

    def __init__(self, error: ContextLengthError):
        self._error = error
        size = f"{error.num_tokens} tokens"
        if error.num_chars:
            size = f"{error.num_chars} characters, which are at least {size}"
        super().__init__(
            400,
            f"This model's maximum context length is {error.max_model_len} tokens, and the prompt is too long: it has "
            f"{size}, and the most is {error.max_prompt_tokens}. Shorten {error.param or 'it'}, or raise the server's "
            "max_model_len",
            param=error.param,
            code="context_length_exceeded",
        )

    def anthropic_body(self) -> dict[str, Any]:
        error = self._error
        counted = f" (counted from its {error.num_chars} characters, so at least)" if error.num_chars else ""
        message = (
            f"prompt is too long: {error.num_tokens} tokens > {error.max_prompt_tokens} maximum{counted}: shorten it, "
            f"or raise the server's max_model_len, which is {error.max_model_len}"
        )
        return {"type": "error", "error": {"type": self.type, "message": message}}


@contextmanager
def concerning(param: str) -> Iterator[None]:
    """Sets `param` as the parameter of each ValueError that is raised inside the block and names none."""
    try:
        yield
    except ParameterError as error:
        error.param = error.param or param
        raise
    except ValueError as error:
        raise ParameterError(str(error), param) from error


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Returns a 400 error that names the first wrong field."""
    error = errors[0]
    location = list(error["loc"])
    if location and location[0] in _SOURCES:
        del location[0]
    # Members of a union have tags such as <message>, which are no fields.
    location = [part for part in location if not str(part).startswith("<")]
    kind = error["type"]
    if kind == UNKNOWN_TYPE:
        location.append("type")
    given = error.get("input")
    kind_given = given.get("type") if isinstance(given, Mapping) else given
    if location and location[-1] == "type" and isinstance(kind_given, str) and kind_given.startswith(_MEDIA):
        at = _path(location)
        return ApiError(400, f"{at} must be a text's, not {kind_given!r}: {TEXT_ONLY}", param=at)
    at = _path(location)
    param = at or None
    if kind == "extra_forbidden":
        instead = _INSTEAD.get(str(location[-1]), "leave it out")
        return ApiError(400, f"{at} is not a field that is supported here: {instead}", param=param)
    if kind == "json_invalid":
        return ApiError(400, "the body is not valid JSON")
    if kind == "missing":
        return ApiError(400, f"{at or 'the body'} is missing", param=param)
    if len(location) > 1 and str(location[1]).startswith(_FORMS):
        name = str(location[0])
        was = f"{name} is null, which is" if error.get("input", ...) is None else f"{name} has"
        return ApiError(400, f"{was} none of the types that it may have{_forms_of(name, errors)}", param=name)
    message = str(error["msg"]).removeprefix("Value error, ")
    if at and not message.startswith(str(location[0])):
        message = f"{at}: {message}"
    return ApiError(400, message, param=param)


def _forms_of(name: str, errors: Sequence[Mapping[str, Any]]) -> str:
    """Returns the end of a sentence about a field: the forms that it may have, as far as they are common ones."""
    forms = [str(part) for error in errors for part in error["loc"][1:3] if str(part) != name]
    known = {"str": "a text", "list[str]": "a list of texts", "list[int]": "a list of integers"}
    named = list(dict.fromkeys(known[form] for form in forms if form in known))
    return f": give {' or '.join(named)}" if named else ""


def _path(location: Sequence[str | int]) -> str:
    """Returns a location in the body as one would write it in a program, such as messages[0].content."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
