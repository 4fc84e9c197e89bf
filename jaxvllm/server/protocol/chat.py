"""`/v1/chat/completions`, as OpenAI's and vLLM's clients know it."""

from typing import Annotated, Any, Literal

from pydantic import Field

from jaxvllm.core.errors import ParameterError
from jaxvllm.engine.outputs import CompletionOutput
from jaxvllm.server.protocol.fields import (
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


class ChatRequest(SamplingFields, ScoringFields):
    """A conversation to go on with."""

    # Checked by jaxvllm.engine.messages: templates read more of them than any list of fields could name.
    messages: Messages
    max_completion_tokens: Limit | None = None  # None: up to the model's length
    max_tokens: int | None = None  # its older name
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None  # the last message's text goes first, when the assistant's is continued
    add_generation_prompt: bool | None = None  # None: unless the last message is continued
    continue_final_message: bool = False
    chat_template_kwargs: TemplateVariables | None = None

    tools: list[Any] | None = neutral([])
    tool_choice: Any | None = neutral("none", "auto")
    functions: list[Any] | None = neutral([])
    function_call: Any | None = neutral("none", "auto")
    parallel_tool_calls: bool | None = None  # says nothing without tools
    modalities: Strings | None = neutral(["text"])
    audio: dict[str, Any] | None = neutral()
    prediction: dict[str, Any] | None = neutral()
    include_reasoning: bool | None = neutral(True)
    reasoning_effort: str | None = neutral()
    verbosity: str | None = neutral("medium")
    web_search_options: dict[str, Any] | None = neutral()
    store: bool | None = neutral(False)
    # From strangers: a template is a program.
    chat_template: str | None = neutral()
    documents: list[Any] | None = neutral([])
    mm_processor_kwargs: dict[str, Any] | None = neutral({})

    @property
    def num_logprobs(self) -> int | None:
        """Best tokens to report beside the chosen one. ValueError when it contradicts itself."""
        if self.top_logprobs and not self.logprobs:
            raise ParameterError("top_logprobs needs logprobs: true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        """Tokens to generate at most."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class ChatMessage(Reply):
    """What the assistant said."""

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
    """All answers."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    service_tier: None  # there is one for all
    system_fingerprint: str  # of the software's version, the model, its mesh and its dtypes
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobList | None = None


class ChatDelta(Reply):
    """What is new of an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Reply):
    """Of one answer, what is new."""

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
    """What choices of answers and of chunks have in common."""
    made: dict[str, Any] = {
        "index": completion.index,
        "logprobs": chat_logprobs(completion, request.num_logprobs or 0, request.return_tokens_as_token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if request.return_token_ids:
        made["token_ids"] = completion.token_ids
    return made
