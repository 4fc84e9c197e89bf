"""The bodies of `/v1/chat/completions`, compatible with OpenAI's and vLLM's clients."""

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.explanation import Explanation
from jaxvllm.engine.outputs import CompletionOutput
from jaxvllm.server.protocol.fields import (
    MAX_TOOLS,
    CompletionFields,
    DraftSpan,
    EngineFields,
    FunctionName,
    Limit,
    Messages,
    ReasoningEffort,
    Reply,
    SamplingFields,
    Strict,
    Strings,
    TemplateVariables,
    Usage,
    draft_spans_of,
    effort_variables,
    explanation_of,
    neutral,
)
from jaxvllm.server.protocol.logprobs import ChatLogprobs, PromptLogprobList, chat_logprobs
from jaxvllm.server.protocol.request_times import RequestTimes
from jaxvllm.server.protocol.response_format import ResponseFormat, one_form
from jaxvllm.text.assistant_message import AssistantMessage
from jaxvllm.text.message_events import Arguments, CallBegin, Content, Event, Reasoning
from jaxvllm.text.tool_use import Tool, ToolUse


class FunctionDefinition(Strict):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; null: the function has no parameters
    # true: a schema of which something cannot be enforced is refused. Only tool_choice "required" and named tools force
    # it.
    strict: bool | None = None

    def tool(self) -> Tool:
        """Returns the function in the form that does not depend on the endpoint."""
        return Tool(self.name, self.parameters, self.description, self.strict is True)


class ChatTool(Strict):
    """A tool that the model may use."""

    type: Literal["function"]
    function: FunctionDefinition

    def tool(self) -> Tool:
        """Returns the tool in the form that does not depend on the endpoint."""
        return self.function.tool()


type Tools = Annotated[list[ChatTool], FailFast(), Field(max_length=MAX_TOOLS)]


class FunctionChoice(Strict):
    """The name of a function."""

    name: FunctionName


type Functions = Annotated[list[FunctionDefinition], FailFast(), Field(max_length=MAX_TOOLS)]


class NamedToolChoice(Strict):
    """The tool that the model must use."""

    type: Literal["function"]
    function: FunctionChoice


class ChatRequest(EngineFields, SamplingFields, CompletionFields):
    """A conversation to continue."""

    # `jaxvllm.text.chat_messages` checks the messages: templates read more fields of them than could be listed here.
    messages: Messages
    max_completion_tokens: Limit | None = None  # None: up to the model's length
    max_tokens: int | None = None  # the older name of max_completion_tokens
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=-1)] | None = None  # up to the server's --max-logprobs; -1: the vocabulary
    echo: bool | None = None  # begin the answer with the last message's text, if it is the assistant's
    add_generation_prompt: bool | None = None  # None: true unless the last message is continued
    continue_final_message: bool = False
    chat_template_kwargs: TemplateVariables | None = None

    tools: Tools | None = None
    # auto, which is the default: the model decides; required: it must call a tool; or the tool that it must call
    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None  # false: only the first call of an answer is kept
    # The form of the answer's text. It leaves a model that is free to call tools no room for a call.
    response_format: ResponseFormat | None = None  # type: ignore[assignment]
    include_reasoning: bool | None = None  # false: the reasoning is left out of the answer
    # A variable of the chat template. "none" also means include_reasoning false and enable_thinking false.
    reasoning_effort: ReasoningEffort | None = None

    functions: Functions | None = None  # the older form of tools; an answer calls one of them at most
    function_call: Literal["auto", "none"] | FunctionChoice | None = None  # the older form of tool_choice

    modalities: Strings | None = neutral(["text"])
    audio: dict[str, Any] | None = neutral()
    prediction: Any = None  # has no effect: the answer is the same with and without a guess of it
    # They have no effect: all prompts are cached, until their memory is needed.
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    verbosity: Literal["low", "medium", "high"] | None = None  # has no effect: no template knows it
    web_search_options: dict[str, Any] | None = neutral()
    store: bool | None = neutral(False)
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

    @property
    def shows_reasoning(self) -> bool:
        """Whether the reasoning is a part of the answer."""
        return self.include_reasoning is not False and self.reasoning_effort != "none"

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template."""
        return effort_variables(self.reasoning_effort) | (self.chat_template_kwargs or {})

    @property
    def has_functions(self) -> bool:
        """Whether the tools are given in their older form."""
        return bool(self.functions) or self.function_call is not None

    def tool_use(self) -> ToolUse:
        """Returns the tools. Raises ParameterError for a choice that they do not allow, and for two forms of them."""
        if self.has_functions:
            return self._function_use()
        tools = tuple(tool.tool() for tool in self.tools or ())
        parallel = self.parallel_tool_calls is not False
        if isinstance(self.tool_choice, NamedToolChoice):
            return ToolUse(tools, "named", self.tool_choice.function.name, parallel)
        return ToolUse(tools, self.tool_choice or "auto", parallel=parallel)

    def _function_use(self) -> ToolUse:
        if self.tools or self.tool_choice is not None:
            older = "functions" if self.functions else "function_call"
            newer = "tools" if self.tools else "tool_choice"
            raise ParameterError(f"{older} is the older form of {newer}: leave one of them out", older)
        functions = tuple(function.tool() for function in self.functions or ())
        use = partial(ToolUse, functions, parallel=False, tools_field="functions", choice_field="function_call")
        if isinstance(self.function_call, FunctionChoice):
            return use(choice="named", name=self.function_call.name)
        return use(choice=self.function_call or "auto")

    @property
    def form_field(self) -> str:
        """The field that says which form the answer must have."""
        tools = self.tool_use()
        if tools.is_forced:
            return tools.tools_field
        if self.response_format is not None and self.response_format.type != "text":
            return "response_format"
        return "structured_outputs" if self.structured_outputs is not None else "tools"

    def chosen(self) -> dict[str, Any]:
        """Returns the fields of `SamplingParams` that the client set. Raises ParameterError for contradictions."""
        # As in OpenAI's API, the form of the text does not count where the answer must be a call.
        asked = None if self.response_format is None else self.response_format.structured_outputs()
        call = self.tool_use().structured_outputs()
        form = one_form(
            response_format=None if call else asked,
            structured_outputs=self.structured_outputs,
            **{self.tool_use().choice_field: call},
        )
        return super().chosen() | ({} if form is None else {"structured_outputs": form})


type ChatFinishReason = Literal["stop", "length", "tool_calls", "function_call", "abort"]


class FunctionCall(Reply):
    """The function that is called, with its arguments."""

    name: str
    arguments: str  # JSON; where it breaks rules of the function's schema, the model broke them


class ChatToolCall(Reply):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(Reply):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None  # null where the answer has tool calls or reasoning, and nothing else
    refusal: None = None
    annotations: None = None
    audio: None = None
    tool_calls: list[ChatToolCall] | None = None
    function_call: FunctionCall | None = None  # in place of tool_calls, where the request has functions
    reasoning: str | None = None  # what the model wrote for itself; only with --reasoning-parser
    reasoning_content: str | None = None  # the same under its older name


class ChatChoice(Reply):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    explanation: Explanation | None = None  # if the request has `explain`


class ChatResponse(Reply):
    """A response with all answers."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    service_tier: Literal["default"] | None  # null unless the request has the field
    system_fingerprint: str  # a hash of the software's version, the model, its mesh and its dtypes
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobList | None = None
    kv_transfer_params: dict[str, Any] | None = None  # for the engine that goes on from this request's KV
    metrics: RequestTimes | None = None  # of one answer, with --enable-per-request-metrics


class FunctionDelta(Reply):
    """The new part of a call's function."""

    name: str | None = None  # whole, with the first part of the call
    arguments: str


class ChatToolCallDelta(Reply):
    """The new part of one tool call."""

    index: int  # of the call in the message
    id: str | None = None  # with the first part of the call, as is the type
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(Reply):
    """The new part of an answer's message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ChatToolCallDelta] | None = None
    function_call: FunctionDelta | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatChunkChoice(Reply):
    """The new part of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    draft_spans: list[DraftSpan] | None = None  # of the chunk's text before reasoning and calls are told apart
    explanation: Explanation | None = None  # in the choice's last chunk, if the request has `explain`


class ChatChunk(Reply):
    """The data of one event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    service_tier: Literal["default"] | None
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    metrics: RequestTimes | None = None  # in the chunk with the usage, of one answer, with --enable-per-request-metrics


def parts(request: ChatRequest, completion: CompletionOutput, has_calls: bool) -> dict[str, Any]:
    """Returns the fields that a choice has both in a response and in a chunk of a stream."""
    calls_tools = has_calls and completion.finish_reason == "stop"
    called = "function_call" if request.has_functions else "tool_calls"
    made: dict[str, Any] = {
        "index": completion.index,
        "logprobs": chat_logprobs(
            completion, request.shown_logprobs(request.num_logprobs), request.return_tokens_as_token_ids
        ),
        "finish_reason": called if calls_tools else completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if request.return_token_ids:
        made["token_ids"] = completion.token_ids
    return made | draft_spans_of(completion) | explanation_of(completion)


def message_of(request: ChatRequest, answer: AssistantMessage, echo: str) -> dict[str, Any]:
    """Returns a `ChatMessage` as it is encoded. Its content begins with `echo`."""
    content = echo + answer.content
    made: dict[str, Any] = {
        "role": "assistant",
        "content": content if content or not (answer.calls or answer.reasoning) else None,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    calls = [{"name": call.name, "arguments": call.arguments} for call in answer.calls]
    if calls and request.has_functions:
        [made["function_call"]] = calls
    elif calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": function}
            for call, function in zip(answer.calls, calls, strict=True)
        ]
    if answer.reasoning:
        made["reasoning"] = made["reasoning_content"] = answer.reasoning
    return made


def delta_of(request: ChatRequest, events: Iterable[Event]) -> dict[str, Any]:
    """Returns all `events` as one `ChatDelta`, with one entry for each call. It is empty if nothing is to be shown."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case Reasoning(text):
                delta["reasoning"] = delta["reasoning_content"] = delta.get("reasoning", "") + text
            case Content(text):
                delta["content"] = delta.get("content", "") + text
            case CallBegin(index, id, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": id, "type": "function", "function": function}
            case Arguments(index, text):
                entry = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                entry["function"]["arguments"] += text
    if calls and request.has_functions:
        [call] = calls.values()
        return delta | {"function_call": call["function"]}
    return delta | ({"tool_calls": list(calls.values())} if calls else {})
