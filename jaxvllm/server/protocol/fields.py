"""What the requests of several endpoints have in common."""

import json
import time
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import islice
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.sampling_params import MAX_INT32, RequestOutputKind, SamplingParams
from jaxvllm.engine.outputs import RequestOutput


class Strict(BaseModel):
    """A request. A field that is not here is an error, and nothing is converted: "1" is no number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Reply(BaseModel):
    """A response."""

    model_config = ConfigDict(extra="forbid")


# How the description of such a field begins; what it may be follows.
NOT_SUPPORTED = "not supported"


def _neutral(*values: Any) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value is not None and value not in values:
            # No more of it than is shown: it may have a million items.
            shown = "".join(islice(json.JSONEncoder().iterencode(value), 61))
            raise ValueError(f"{shown if len(shown) <= 60 else shown[:57] + '...'} is not supported: leave it out")
        return value

    return check


def neutral(*values: Any) -> Any:
    """A field of clients that is not supported: it may have the values that change nothing."""
    told = f"{NOT_SUPPORTED}: {' or '.join(map(json.dumps, (None, *values)))}"
    field: Any = Field(default=None, description=told, examples=[None])
    field.metadata.append(AfterValidator(_neutral(*values)))
    return field


# Of a conversation: a template of 50,000 keeps all other requests waiting for half a second.
MAX_MESSAGES = 10_000

# What the engine gives a template itself, under these names.
_RESERVED = ("self", "messages", "conversation", "tools", "add_generation_prompt", "continue_final_message")


def _template_variables(variables: dict[str, Any]) -> dict[str, Any]:
    for name in _RESERVED:
        if name in variables:
            raise ValueError(f"{name} is no variable of a template: use the field of the request")
    return variables


# Lists of clients. They may have millions of items, and each that is wrong would be an error with a place of its own:
# 1.5 MB of them took 9.5 s and 1.8 GB.
type Strings = Annotated[list[str], FailFast()]
type Tokens = Annotated[list[int], FailFast()]
type Messages = Annotated[
    list[dict[str, Any]],
    FailFast(),
    Field(min_length=1, max_length=MAX_MESSAGES, examples=[[{"role": "user", "content": "Hello"}]]),
]

type TemplateVariables = Annotated[dict[str, Any], AfterValidator(_template_variables)]


# Tokens to generate at most, by another name than the engine's: so that an error tells the one that was given.
type Limit = Annotated[int, Field(ge=1, le=MAX_INT32)]


# JSON has integers of any length, the messages to the engine have not.
type Priority = Annotated[int, Field(ge=-MAX_INT32, le=MAX_INT32)]


class StreamOptions(Strict):
    """What a stream tells beside its text."""

    include_usage: bool = False  # a last chunk without choices
    continuous_usage_stats: bool = False  # in every chunk
    include_obfuscation: bool | None = neutral(False)


class SamplingFields(Strict):
    """How to draw tokens: OpenAI's fields, and vLLM's beside them."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    stop_token_ids: Tokens | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None

    structured_outputs: dict[str, Any] | None = neutral()
    frequency_penalty: float | None = neutral(0)
    presence_penalty: float | None = neutral(0)
    repetition_penalty: float | None = neutral(1)
    length_penalty: float | None = neutral(1)
    logit_bias: dict[str, float] | None = neutral({})
    use_beam_search: bool | None = neutral(False)
    truncate_prompt_tokens: int | None = neutral()
    allowed_token_ids: Tokens | None = neutral()
    bad_words: Strings | None = neutral([])
    logits_processors: list[Any] | None = neutral([])

    def chosen(self) -> dict[str, Any]:
        """What of `SamplingParams` the client set."""
        return {name: value for name in _PARAMS if (value := getattr(self, name)) is not None}


# Fields that `SamplingParams` has by the same name.
_PARAMS = tuple(field.name for field in fields(SamplingParams) if field.name in SamplingFields.model_fields)


class RequestFields(Strict):
    """How a request is treated, whatever it asks for."""

    model: str | None = None  # None: the one that is served
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # for the caller's own bookkeeping, as the next three
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    priority: Priority = 0  # lower goes first, with scheduling_policy="priority"
    request_id: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.:-]+$")] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None  # prefixes are shared under one salt
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False  # in logprobs: "token_id:17" in place of the text
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = neutral({"type": "text"})
    service_tier: str | None = neutral("auto", "default")
    kv_transfer_params: dict[str, Any] | None = neutral()
    vllm_xargs: dict[str, Any] | None = neutral({})

    def check_stream(self) -> None:
        """ValueError when something is asked of a stream, and there is to be none, or the other way round."""
        if not self.stream and self.stream_options and self.stream_options.model_dump(exclude_defaults=True):
            raise ParameterError("stream_options needs stream: true", "stream_options")


class ScoringFields(RequestFields):
    """The same where the prompt may be scored too."""

    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None  # best of each of its tokens; not in a stream

    def check_stream(self) -> None:
        super().check_stream()
        if self.stream and self.prompt_logprobs is not None:
            raise ParameterError("prompt_logprobs needs stream: false", "prompt_logprobs")


class PromptTokensDetails(Reply):
    """Of the prompt's tokens."""

    cached_tokens: int  # found in the prefix cache


class Usage(Reply):
    """Tokens of one response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage(num_prompt: int, num_output: int, num_cached: int) -> dict[str, Any]:
    """`Usage`, as it is encoded."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def usage_of(outputs: list[RequestOutput]) -> dict[str, Any]:
    """The usage of finished requests that one response answers."""
    return usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(completion.token_ids) for output in outputs for completion in output.outputs),
        sum(output.num_cached_tokens for output in outputs),
    )


def params_of(
    defaults: SamplingParams,
    chosen: dict[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    stream: bool,
) -> SamplingParams:
    """The parameters of a request. ValueErrors name the field."""
    return replace(
        defaults,
        **chosen,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
    )


def new_id(prefix: str) -> str:
    """An id that nobody has."""
    return f"{prefix}{uuid4().hex}"


def now() -> int:
    """Unix time, as `created` has it."""
    return int(time.time())


type FinishReason = Literal["stop", "length"]
