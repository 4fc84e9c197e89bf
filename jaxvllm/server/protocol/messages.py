"""The bodies of `/v1/messages`, compatible with Anthropic's clients."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, FailFast, Field, Tag

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.core.value_checks import MAX_INT32
from jaxvllm.engine.outputs import CompletionOutput
from jaxvllm.server.protocol.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    EngineFields,
    FunctionName,
    Limit,
    Reply,
    Strict,
    Strings,
    by_type,
    effort_variables,
    neutral,
)
from jaxvllm.server.protocol.response_format import one_form
from jaxvllm.text.tool_use import Tool, ToolUse


class CacheControl(Strict):
    """A mark at the end of a prompt's cached part. It has no effect: the prefix cache finds the longest part itself."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Strict):
    """A text in a message."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = neutral([])


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


type Blocks = Annotated[
    list[TextBlock], FailFast(), BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])
]  # a text, or several blocks, which are joined by newlines


class ToolUseBlock(Strict):
    """A call of a tool in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: FunctionName
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = neutral({"type": "direct"})


class ToolResultBlock(Strict):
    """The result of a called tool."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Blocks | None = None
    is_error: bool | None = None  # has no effect: the content tells the model what went wrong
    cache_control: CacheControl | None = None


class ThinkingBlock(Strict):
    """The reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None  # has no effect; nor has the next block


class RedactedThinkingBlock(Strict):
    """A reasoning that nobody can read."""

    type: Literal["redacted_thinking"]
    data: str


type ContentBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")],
    by_type("text", "tool_use", "tool_result", "thinking", "redacted_thinking"),
]
type Content = Annotated[
    list[ContentBlock], FailFast(), BeforeValidator(_as_blocks, json_schema_input_type=str | list[ContentBlock])
]  # a text, or several blocks, of which the texts are joined by newlines
# The blocks that only one of the roles may have.
_OF_ROLE: dict[type[Strict], str] = {
    ToolUseBlock: "assistant",
    ThinkingBlock: "assistant",
    RedactedThinkingBlock: "assistant",
    ToolResultBlock: "user",
}


class InputMessage(Strict):
    """A message of the user or the assistant."""

    role: Literal["user", "assistant"]
    content: Content


class Thinking(Strict):
    """The setting for models that think before they answer."""

    type: Literal["enabled", "adaptive", "disabled"]  # adaptive: as the model likes
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None  # after which the thinking is ended
    display: Literal["summarized", "omitted"] | None = None  # omitted: the thinking is left out of the answer


class MessagesTool(Strict):
    """A tool that the model may use."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]  # a JSON schema
    cache_control: CacheControl | None = None
    # true: a schema of which something cannot be enforced is refused. Only tool_choice "any" and "tool" force it.
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # has no effect: parts of an input are always sent as they come
    input_examples: list[Any] | None = None  # has no effect: templates have no place for them
    defer_loading: bool | None = neutral(False)
    allowed_callers: Strings | None = neutral(["direct"])


type MessagesTools = Annotated[list[MessagesTool], FailFast(), Field(max_length=MAX_TOOLS)]


class ToolChoice(Strict):
    """The choice of tools."""

    type: Literal["auto", "any", "tool", "none"]  # auto: the model decides; any: it must use one; tool: this one
    name: FunctionName | None = None  # only with tool
    disable_parallel_tool_use: bool | None = None  # true: only the first use of an answer is kept


class OutputFormat(Strict):
    """The form of the answer's text."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """The options of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None  # `reasoning_effort` of the chat template
    format: OutputFormat | None = None


class Metadata(Strict):
    """Data for the client's own use."""

    user_id: str | None = None


class ConversationFields(Strict):
    """The fields that the prompt is made of."""

    model: str | None = None  # None: the served model
    # If the last message is the assistant's, the answer continues it.
    messages: Annotated[
        list[InputMessage],
        FailFast(),
        Field(min_length=1, max_length=MAX_MESSAGES, examples=[[{"role": "user", "content": "Hello"}]]),
    ]
    system: Blocks | None = None
    thinking: Thinking | None = None
    tool_choice: ToolChoice | None = None
    tools: MessagesTools | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of output_config.format
    speed: str | None = neutral("standard")

    def conversation(self) -> list[dict[str, Any]]:
        """Returns the messages in the form for templates. The system's message comes first."""
        said = [] if not self.system else [{"role": "system", "content": _texts(self.system)}]
        names: dict[str, str] = {}  # of the called tools, because some templates want them with the results
        for index, message in enumerate(self.messages):
            for at, block in enumerate(message.content):
                if (role := _OF_ROLE.get(type(block), message.role)) != message.role:
                    where = f"messages[{index}].content[{at}]"
                    raise ParameterError(f"{where} is a {block.type}, which only the {role} may have", where)
            if message.role == "assistant":
                said.append(_answer(message.content))
                names |= {block.id: block.name for block in message.content if isinstance(block, ToolUseBlock)}
            else:
                said += _question(message.content, names)
        return said

    @property
    def continued(self) -> str | None:
        """The text of the last message if the answer continues it, or None."""
        last = self.messages[-1]
        if last.role != "assistant" or any(isinstance(block, ToolUseBlock) for block in last.content):
            return None
        return "\n".join(block.text for block in last.content if isinstance(block, TextBlock))

    @property
    def shows_thinking(self) -> bool:
        """Whether the reasoning is a part of the answer."""
        return self.thinking is None or (self.thinking.type != "disabled" and self.thinking.display != "omitted")

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template."""
        effort = effort_variables(None if self.output_config is None else self.output_config.effort)
        if self.thinking is None or self.thinking.type == "adaptive":
            return effort
        # Both names are in use.
        return effort | dict.fromkeys(("enable_thinking", "thinking"), self.thinking.type == "enabled")

    def tool_use(self) -> ToolUse:
        """Returns the tools. Raises ParameterError for a choice that they do not allow."""
        tools = tuple(
            Tool(tool.name, tool.input_schema, tool.description, tool.strict is True) for tool in self.tools or ()
        )
        choice = self.tool_choice or ToolChoice(type="auto")
        parallel = not choice.disable_parallel_tool_use
        match choice.type:
            case "tool":
                if choice.name is None:
                    raise ParameterError("tool_choice.name is missing: name the tool", "tool_choice.name")
                return ToolUse(tools, "named", choice.name, parallel)
            case "any":
                return ToolUse(tools, "required", parallel=parallel)
            case kind:
                return ToolUse(tools, kind, parallel=parallel)


def _texts(blocks: Iterable[Strict]) -> list[dict[str, str]]:
    return [{"type": "text", "text": block.text} for block in blocks if isinstance(block, TextBlock)]


def _answer(blocks: Sequence[ContentBlock]) -> dict[str, Any]:
    """Returns a message of the assistant in the form for templates."""
    made: dict[str, Any] = {"role": "assistant", "content": _texts(blocks)}
    if thinking := "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)):
        made["reasoning"] = thinking
    if calls := [block for block in blocks if isinstance(block, ToolUseBlock)]:
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    if not made["content"] and len(made) > 2:
        made["content"] = None
    return made


def _question(blocks: Sequence[ContentBlock], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns a message of the user in the form for templates, where each result of a tool is a message of its own."""
    made: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            content = _texts(block.content or ())
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
            made.append(result | ({"name": names[block.tool_use_id]} if block.tool_use_id in names else {}))
        elif not made or made[-1]["role"] == "tool":
            made.append({"role": "user", "content": _texts([block])})
        else:
            made[-1]["content"] += _texts([block])
    return made or [{"role": "user", "content": []}]


class CountTokensRequest(ConversationFields):
    """A conversation whose prompt's tokens are to be counted."""


class MessagesRequest(EngineFields, ConversationFields):
    """A conversation to continue."""

    max_tokens: Limit
    stop_sequences: Strings | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: str | None = neutral("auto", "standard_only")
    container: Any | None = neutral()
    context_management: dict[str, Any] | None = neutral({})
    mcp_servers: list[Any] | None = neutral([])

    @property
    def form_field(self) -> str:
        """The field that says which form the answer must have."""
        if self.tool_use().is_forced:
            return "tools"
        return "output_format" if self.output_format is not None else "output_config.format"

    def chosen(self) -> dict[str, Any]:
        """Returns the fields of `SamplingParams` that the client set. Raises ParameterError for contradictions."""
        format = self.output_config.format if self.output_config else None
        text = one_form(**{"output_config.format": _form(format), "output_format": _form(self.output_format)})
        call = self.tool_use().structured_outputs()
        form = text if call is None else call  # an answer that must be a call has no text of its own
        asked = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
            "structured_outputs": form,
            "thinking_token_budget": None if self.thinking is None else self.thinking.budget_tokens,
        }
        return {name: value for name, value in asked.items() if value is not None}


def _form(format: OutputFormat | None) -> StructuredOutputsParams | None:
    return None if format is None else StructuredOutputsParams.of({"json": format.json_schema})


class TokenCount(Reply):
    """The number of tokens of a prompt."""

    input_tokens: int


class MessagesUsage(Reply):
    """The number of tokens of a response. Computed and cached tokens of the prompt are counted separately."""

    input_tokens: int
    cache_creation_input_tokens: int  # always 0, because filling the cache costs nothing
    cache_read_input_tokens: int
    output_tokens: int


class OutputTextBlock(Reply):
    """A text of an answer."""

    type: Literal["text"]
    text: str
    citations: None = None


class OutputThinkingBlock(Reply):
    """The reasoning that the model wrote for itself; only with --reasoning-parser."""

    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]  # nobody signs it


class OutputToolUseBlock(Reply):
    """A call of a tool, which the client is to make."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]  # where it breaks rules of the tool's schema, the model broke them


type OutputBlock = Annotated[OutputTextBlock | OutputThinkingBlock | OutputToolUseBlock, Field(discriminator="type")]
type StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesResponse(Reply):
    """The assistant's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessageStart(Reply):
    """The first event, with an empty message."""

    type: Literal["message_start"]
    message: MessagesResponse


class ContentBlockStart(Reply):
    """The event at the beginning of a block."""

    type: Literal["content_block_start"]
    index: int
    content_block: OutputBlock


class Ping(Reply):
    """An event that only shows that the stream is alive."""

    type: Literal["ping"]


class TextDelta(Reply):
    """A new part of the text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(Reply):
    """A new part of the thinking."""

    type: Literal["thinking_delta"]
    thinking: str


class InputJsonDelta(Reply):
    """A new part of a tool's input. All parts together are one JSON object."""

    type: Literal["input_json_delta"]
    partial_json: str


class ContentBlockDelta(Reply):
    """The event with a new part of a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[TextDelta | ThinkingDelta | InputJsonDelta, Field(discriminator="type")]


class ContentBlockStop(Reply):
    """The event at the end of a block."""

    type: Literal["content_block_stop"]
    index: int


class StopDelta(Reply):
    """The reason why an answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Reply):
    """The event at the end of the message. Its usage is that of the whole response."""

    type: Literal["message_delta"]
    delta: StopDelta
    usage: MessagesUsage


class MessageStop(Reply):
    """The last event."""

    type: Literal["message_stop"]


type MessagesEvent = Annotated[
    MessageStart | ContentBlockStart | Ping | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop,
    Field(discriminator="type"),
]


def messages_usage(num_prompt: int, num_output: int, num_cached: int) -> dict[str, int]:
    """Returns a `MessagesUsage` as it is encoded."""
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
    }


def ending(completion: CompletionOutput, has_calls: bool) -> dict[str, Any]:
    """Returns the `StopDelta` of a completion that has ended."""
    if completion.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if has_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if completion.finish_reason == "stop" and isinstance(completion.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}
