"""The bodies of `/v1/responses`, compatible with OpenAI's clients, for responses that are not stored."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field

from jaxvllm.core.errors import ParameterError
from jaxvllm.engine.outputs import CompletionOutput
from jaxvllm.server.protocol.fields import (
    MAX_MESSAGES,
    EngineFields,
    Limit,
    Reply,
    RequestFields,
    SamplingFields,
    Strict,
    TemplateVariables,
    neutral,
)
from jaxvllm.server.protocol.logprobs import TokenLogprob, chat_logprobs

LOGPROBS = "message.output_text.logprobs"
type Role = Literal["user", "assistant", "system", "developer"]
type Include = Annotated[list[Literal["message.output_text.logprobs"]], FailFast()]
type ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputPart(Strict):
    """A text in a message. Clients may send the text of an earlier response back unchanged."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = neutral([])
    logprobs: list[Any] | None = None  # part of an earlier response; has no effect here


def _as_parts(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


class InputItem(Strict):
    """A message. The answer continues the last one if it is the assistant's and its status is not `completed`."""

    type: Literal["message"] = "message"
    role: Role
    content: Annotated[
        list[InputPart], FailFast(), BeforeValidator(_as_parts, json_schema_input_type=str | list[InputPart])
    ]  # a text, or several parts, which are joined by newlines
    id: str | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None  # set by reasoning models


def _as_items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class TextFormat(Strict):
    """The format of the answer."""

    type: Literal["text"]


class TextConfig(Strict):
    """The options of the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = neutral("medium")


class ResponsesStreamOptions(Strict):
    """The information that a stream contains in addition to its text."""

    include_usage: bool | None = None  # for clients of chat completions; the last event always has the usage
    include_obfuscation: bool | None = neutral(False)


class ResponsesRequest(EngineFields, SamplingFields, RequestFields):
    """A text to answer, or a conversation to continue."""

    input: Annotated[
        list[InputItem],
        FailFast(),
        BeforeValidator(_as_items, json_schema_input_type=str | list[InputItem]),
        Field(min_length=1, max_length=MAX_MESSAGES, examples=["Hello"]),
    ]
    instructions: str | None = None  # the text of a system message before all others
    max_output_tokens: Limit | None = None  # None: up to the model's length
    include: Include | None = None
    top_logprobs: Annotated[int, Field(ge=-1)] | None = None  # up to the server's --max-logprobs; -1: the vocabulary
    text: TextConfig | None = None
    chat_template_kwargs: TemplateVariables | None = None

    stream_options: ResponsesStreamOptions | None = None  # type: ignore[assignment]
    n: int | None = neutral(1)
    use_beam_search: bool | None = neutral(False)
    length_penalty: float | None = neutral(1)
    early_stopping: bool | Literal["never"] | None = neutral(False, "never")
    return_token_ids: bool | None = neutral(False)  # type: ignore[assignment]
    store: bool | None = neutral(False)
    background: bool | None = neutral(False)
    previous_response_id: str | None = neutral()
    conversation: Any | None = neutral()
    prompt: dict[str, Any] | None = neutral()
    reasoning: dict[str, Any] | None = neutral({})
    truncation: str | None = neutral("disabled")
    tools: list[Any] | None = neutral([])
    tool_choice: Any | None = neutral("none", "auto")
    max_tool_calls: int | None = None  # has no effect without tools; nor has parallel_tool_calls
    parallel_tool_calls: bool | None = None
    context_management: list[Any] | None = neutral([])
    moderation: dict[str, Any] | None = neutral({})
    prompt_cache_retention: str | None = neutral("in_memory")
    prompt_cache_options: dict[str, Any] | None = neutral({})

    @property
    def num_logprobs(self) -> int | None:
        """The number of best tokens to report beside the chosen one. Raises ValueError when `include` lacks them."""
        if not self.include:
            if self.top_logprobs:
                raise ParameterError(f'top_logprobs needs include: ["{LOGPROBS}"]', "top_logprobs")
            return None
        return self.top_logprobs or 0

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message, by the same rule as in vLLM."""
        return self.input[-1].role == "assistant" and self.input[-1].status in ("in_progress", "incomplete")

    def messages(self) -> list[dict[str, Any]]:
        """Returns the conversation in the form for templates."""
        said = [] if not self.instructions else [{"role": "system", "content": self.instructions}]
        return said + [
            {"role": item.role, "content": [{"type": "text", "text": part.text} for part in item.content]}
            for item in self.input
        ]


class OutputText(Reply):
    """The answer's text."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]  # always empty
    logprobs: list[TokenLogprob]


class OutputMessage(Reply):
    """The message that is the answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class InputTokensDetails(Reply):
    """Details about the prompt's tokens."""

    cached_tokens: int  # tokens that were found in the prefix cache
    cache_write_tokens: int  # always 0, because writing them is not billed


class OutputTokensDetails(Reply):
    """Details about the answer's tokens."""

    reasoning_tokens: int


class ResponsesUsage(Reply):
    """The number of tokens of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponsesError(Reply):
    """The reason why there is no answer."""

    code: Literal["server_error"]
    message: str


class IncompleteDetails(Reply):
    """The reason why the answer is not complete."""

    reason: Literal["max_output_tokens"]


class ResponsesResponse(Reply):
    """The answer, and the fields of the request repeated."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponsesError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: None
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: TextConfig
    tool_choice: Literal["auto", "none"]
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponsesUsage | None
    user: str | None


class _Event(Reply):
    sequence_number: int


class ResponseEvent(_Event):
    """The event of a new status of the response. The last such event ends the stream."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: ResponsesResponse


class OutputItemEvent(_Event):
    """The event at the beginning and at the end of the answer."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputMessage


class ContentPartEvent(_Event):
    """The event at the beginning and at the end of the answer's text."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int
    part: OutputText


class TextDeltaEvent(_Event):
    """The event with a new part of the text."""

    type: Literal["response.output_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[TokenLogprob]


class TextDoneEvent(_Event):
    """The event with the whole text."""

    type: Literal["response.output_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[TokenLogprob]


class ErrorEvent(_Event):
    """The event of an error. The event `response.failed` follows it."""

    type: Literal["error"]
    code: str | None
    message: str
    param: str | None


type ResponsesEvent = Annotated[
    ResponseEvent | OutputItemEvent | ContentPartEvent | TextDeltaEvent | TextDoneEvent | ErrorEvent,
    Field(discriminator="type"),
]


def responses_usage(num_prompt: int, num_output: int, num_cached: int) -> dict[str, Any]:
    """Returns a `ResponsesUsage` as it is encoded."""
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + num_output,
    }


def token_logprobs(completion: CompletionOutput, count: int, as_ids: bool) -> list[dict[str, Any]]:
    """Returns `TokenLogprob`s with the `count` best of each token, or an empty list if the request wants none."""
    made = chat_logprobs(completion, count, as_ids)
    return [] if made is None else made["content"]


def echoed(request: ResponsesRequest) -> dict[str, Any]:
    """Returns the fields of a `ResponsesResponse` that repeat fields of the request."""
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": None,
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": False,
        "text": {"format": {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": [],
        "top_logprobs": request.top_logprobs or 0,
        "truncation": "disabled",
        "user": request.user,
    }
