"""The bodies of `/v1/responses`, compatible with OpenAI's clients."""

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, FailFast, Field

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.engine.outputs import CompletionOutput
from jaxvllm.server.protocol.fields import (
    MAX_MESSAGES,
    EngineFields,
    Limit,
    ReasoningEffort,
    Reply,
    RequestFields,
    SamplingFields,
    Strict,
    TemplateVariables,
    effort_variables,
    neutral,
)
from jaxvllm.server.protocol.logprobs import chat_logprobs
from jaxvllm.server.protocol.response_format import one_form
from jaxvllm.server.protocol.response_items import (
    InputItem,
    MessageItem,
    OutputItem,
    messages_of,
)
from jaxvllm.server.protocol.response_tools import AnyTool, AnyTools, FunctionTool, OfferedTools, ToolChoice
from jaxvllm.text.tool_use import ToolUse

LOGPROBS = "message.output_text.logprobs"
# Encrypted reasoning is for clients of servers that hide it. Here it is in plain text, and comes in any case. The rest
# are details of what no answer has here.
type Include = Annotated[
    list[
        Literal[
            "message.output_text.logprobs",
            "reasoning.encrypted_content",
            "file_search_call.results",
            "web_search_call.results",
            "web_search_call.action.sources",
            "message.input_image.image_url",
            "computer_call_output.output.image_url",
            "code_interpreter_call.outputs",
        ]
    ],
    FailFast(),
]


def _as_items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class TextFormat(Strict):
    """The form of the answer's text."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None  # the rest goes with a JSON schema
    description: str | None = None
    # The name of the attribute differs, because pydantic has a method of this name.
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None  # has no effect: the schema is enforced in any case

    def structured_outputs(self) -> StructuredOutputsParams | None:
        """Returns the form, or None where any text will do. Raises ParameterError for one that is not complete."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return StructuredOutputsParams(json_object=True)
        if self.json_schema is None:
            raise ParameterError("text.format.schema is missing", "text.format.schema")
        asked: dict[str, Any] = {"json": self.json_schema}  # it is stored as text
        try:
            return StructuredOutputsParams(**asked)
        except ParameterError as error:  # it is too large
            raise ParameterError(f"text.format: {error}", "text.format") from error


class TextConfig(Strict):
    """The options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # has no effect: no model here knows it


class ReasoningConfig(Strict):
    """The options of the reasoning."""

    # A variable of the chat template. "none" also leaves the reasoning out of the answer, and sets enable_thinking.
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None  # has no effect: the whole reasoning is shown
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = neutral("auto")
    mode: str | None = neutral("standard")


class ResponsesStreamOptions(Strict):
    """The information that a stream contains in addition to its text."""

    include_usage: bool | None = None  # for clients of chat completions; the last event always has the usage
    include_obfuscation: bool | None = None  # has no effect: no event is padded


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
    reasoning: ReasoningConfig | None = None
    tools: AnyTools | None = None
    # auto, which is the default: the model decides; required: it must call a tool; or the one that it must call
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None  # false: only the first call of an answer is kept
    max_tool_calls: int | None = None  # has no effect: it counts calls of OpenAI's own tools, which are not here
    chat_template_kwargs: TemplateVariables | None = None

    stream_options: ResponsesStreamOptions | None = None  # type: ignore[assignment]
    n: int | None = neutral(1)
    use_beam_search: bool | None = neutral(False)
    length_penalty: float | None = neutral(1)
    early_stopping: bool | Literal["never"] | None = neutral(False, "never")
    return_token_ids: bool | None = neutral(False)  # type: ignore[assignment]
    store: bool | None = None  # false: the response cannot be had again, and no request can follow it
    previous_response_id: str | None = None  # of a stored response: this request has its items and its answer first
    truncation: Literal["auto", "disabled"] | None = None  # auto: of a prompt that is too long the last tokens are kept
    client_metadata: Any = None  # has no effect, like prompt_cache_options and prompt_cache_retention
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    background: bool | None = neutral(False)
    conversation: Any | None = neutral()
    prompt: dict[str, Any] | None = neutral()
    context_management: list[Any] | None = neutral([])
    moderation: dict[str, Any] | None = neutral({})

    @property
    def num_logprobs(self) -> int | None:
        """The number of best tokens to report beside the chosen one. Raises ValueError when `include` lacks them."""
        if LOGPROBS not in (self.include or ()):
            if self.top_logprobs:
                raise ParameterError(f'top_logprobs needs include: ["{LOGPROBS}"]', "top_logprobs")
            return None
        return self.top_logprobs or 0

    @property
    def continued(self) -> str | None:
        """The text of the last message if the answer continues it, by the same rule as in vLLM, or None."""
        last = self.input[-1]
        if not isinstance(last, MessageItem) or last.role != "assistant":
            return None
        unfinished = last.status in ("in_progress", "incomplete")
        return "\n".join(part.text for part in last.content) if unfinished else None

    def messages(self) -> list[dict[str, Any]]:
        """Returns the conversation in the form for templates."""
        said = [] if not self.instructions else [{"role": "system", "content": self.instructions}]
        return said + messages_of(self.input)

    @property
    def shows_reasoning(self) -> bool:
        """Whether the reasoning is a part of the answer."""
        return self.reasoning is None or self.reasoning.effort != "none"

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template."""
        effort = None if self.reasoning is None else self.reasoning.effort
        return effort_variables(effort) | (self.chat_template_kwargs or {})

    @cached_property
    def offered(self) -> OfferedTools:
        """The tools that the client runs. Raises ParameterError for tools that cannot be told apart."""
        return OfferedTools.of(self.tools or ())

    def tool_use(self) -> ToolUse:
        """Returns the tools. Raises ParameterError for a choice that they do not allow."""
        return self.offered.use(self.tool_choice, self.parallel_tool_calls is not False)

    @property
    def form_field(self) -> str:
        """The field that says which form the answer must have."""
        if self.tool_use().is_forced:
            return "tools"
        return "structured_outputs" if self.structured_outputs is not None else "text.format"

    def following(self, items: list[InputItem]) -> "ResponsesRequest":
        """Returns this request with `items` of an earlier response, and its answer, before the new ones."""
        if (count := len(items) + len(self.input)) > MAX_MESSAGES:
            raise ParameterError(
                f"previous_response_id and input are {count} items, the limit is {MAX_MESSAGES}: begin anew",
                "previous_response_id",
            )
        return self.model_copy(update={"input": [*items, *self.input]})

    def chosen(self) -> dict[str, Any]:
        """Returns the fields of `SamplingParams` that the client set. Raises ParameterError for contradictions."""
        # As in OpenAI's API, the form of the text does not count where the answer must be a call.
        call = self.tool_use().structured_outputs()
        asked = self.text.format.structured_outputs() if self.text and self.text.format else None
        form = one_form(
            **{"text.format": None if call else asked}, structured_outputs=self.structured_outputs, tool_choice=call
        )
        chosen = super().chosen() | ({} if form is None else {"structured_outputs": form})
        return {"truncate_prompt_tokens": -1} | chosen if self.truncation == "auto" else chosen


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
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningConfig | None
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool  # whether it can be had again
    temperature: float
    text: TextConfig
    tool_choice: ToolChoice
    tools: list[AnyTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponsesUsage | None
    user: str | None


class InputTokens(Reply):
    """The number of tokens of a prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(Reply):
    """A response that is no longer stored."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemList(Reply):
    """A part of the items that a response answers."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def responses_usage(num_prompt: int, num_output: int, num_cached: int, num_reasoning: int) -> dict[str, Any]:
    """Returns a `ResponsesUsage` as it is encoded."""
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": num_prompt + num_output,
    }


def token_logprobs(completion: CompletionOutput, count: int, as_ids: bool) -> list[dict[str, Any]]:
    """Returns `TokenLogprob`s with the `count` best of each token, or an empty list if the request wants none."""
    made = chat_logprobs(completion, count, as_ids)
    return [] if made is None else made["content"]


def _told(value: Any) -> Any:
    return value.model_dump(by_alias=True, exclude_none=True) if isinstance(value, Strict) else value


def _as_sent(tool: AnyTool) -> dict[str, Any]:
    """Returns a tool with the fields that the client has set. OpenAI's clients expect `parameters` of all functions."""
    needed = {"parameters": None} if isinstance(tool, FunctionTool) else {}
    return needed | tool.model_dump(by_alias=True, exclude_unset=True)


def echoed(request: ResponsesRequest, is_stored: bool) -> dict[str, Any]:
    """Returns the fields of a `ResponsesResponse` that repeat fields of the request."""
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": None if request.reasoning is None else request.reasoning.model_dump(),
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "text": {"format": {"type": "text"}} | (_told(request.text) or {}),
        "tool_choice": _told(request.tool_choice) or "auto",
        "tools": [_as_sent(tool) for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "truncation": request.truncation or "disabled",
        "user": request.user,
    }
