"""The bodies of `/v1/chat/completions`, compatible with OpenAI's and vLLM's clients."""

from typing import Annotated, Any, Literal

from pydantic import Field

from jaxvllm.core.errors import ParameterError
from jaxvllm.engine.outputs import CompletionOutput
from jaxvllm.server.protocol.fields import (
    EngineFields,
    FinishReason,
    Limit,
    Messages,
    Reply,
    SamplingFields,
    ScoringFields,
    Strings,
    TemplateVariables,
    Usage,
    neutral,
)
from jaxvllm.server.protocol.logprobs import ChatLogprobs, PromptLogprobList, chat_logprobs


class ChatRequest(EngineFields, SamplingFields, ScoringFields):
    """A conversation to continue."""

    # `jaxvllm.text.chat_messages` checks the messages: templates read more fields of them than could be listed here.
    messages: Messages
    max_completion_tokens: Limit | None = None  # None: up to the model's length
    max_tokens: int | None = None  # the older name of max_completion_tokens
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None  # begin the answer with the last message's text, if it is the assistant's
    add_generation_prompt: bool | None = None  # None: true unless the last message is continued
    continue_final_message: bool = False
    chat_template_kwargs: TemplateVariables | None = None

    tools: list[Any] | None = neutral([])
    tool_choice: Any | None = neutral("none", "auto")
    functions: list[Any] | None = neutral([])
    function_call: Any | None = neutral("none", "auto")
    parallel_tool_calls: bool | None = None  # has no effect without tools
    modalities: Strings | None = neutral(["text"])
    audio: dict[str, Any] | None = neutral()
    prediction: dict[str, Any] | None = neutral()
    include_reasoning: bool | None = neutral(True)
    reasoning_effort: str | None = neutral()
    verbosity: str | None = neutral("medium")
    web_search_options: dict[str, Any] | None = neutral()
    store: bool | None = neutral(False)
    prompt_cache_retention: str | None = neutral("in_memory")
    # A template is a program, and clients must not bring programs.
    chat_template: str | None = neutral()
    documents: list[Any] | None = neutral([])
    mm_processor_kwargs: dict[str, Any] | None = neutral({})

    @property
    def num_logprobs(self) -> int | None:
        """The number of best tokens to report beside the chosen one. Raises ValueError for contradictory fields."""
        if self.top_logprobs and not self.logprobs:
            raise ParameterError("top_logprobs needs logprobs: true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        """The most tokens to generate."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class ChatMessage(Reply):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(Reply):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatResponse(Reply):
    """A response with all answers."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    service_tier: None  # the server has no tiers
    system_fingerprint: str  # a hash of the software's version, the model, its mesh and its dtypes
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobList | None = None


class ChatDelta(Reply):
    """The new part of an answer's message."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Reply):
    """The new part of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(Reply):
    """The data of one event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    service_tier: None
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


def parts(request: ChatRequest, completion: CompletionOutput) -> dict[str, Any]:
    """Returns the fields that a choice has both in a response and in a chunk of a stream."""
    made: dict[str, Any] = {
        "index": completion.index,
        "logprobs": chat_logprobs(completion, request.num_logprobs or 0, request.return_tokens_as_token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if request.return_token_ids:
        made["token_ids"] = completion.token_ids
    return made
