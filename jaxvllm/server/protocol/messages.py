"""The bodies of `/v1/messages`, compatible with Anthropic's clients."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Field, Tag

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.core.value_checks import MAX_INT32
from jaxvllm.engine.outputs import CompletionOutput
from jaxvllm.server.protocol.context_management import (
    AppliedContextManagement,
    ContextManagement,
    CountedContextManagement,
)
from jaxvllm.server.protocol.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    EngineFields,
    FunctionName,
    Limit,
    Reply,
    Strict,
    Strings,
    effort_variables,
    neutral,
)
from jaxvllm.server.protocol.message_blocks import (
    Blocks,
    CacheControl,
    InputMessage,
    TextBlock,
    ToolUseBlock,
    templated,
)
from jaxvllm.server.protocol.response_format import one_form
from jaxvllm.text.tool_use import Tool, ToolUse


class Thinking(Strict):
    """The setting for models that think before they answer."""

    type: Literal["enabled", "adaptive", "disabled"]  # adaptive: as the model likes
    # After so many the thinking is ended. It has no effect without --reasoning-parser.
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
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
    defer_loading: bool | None = None  # has no effect: all tools are told at once
    allowed_callers: Strings | None = None  # has no effect: only the model itself calls


class AnthropicTool(BaseModel):
    """A tool that Anthropic's own server has, or that its models know without a schema. It is left out here."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Annotated[str, Field(pattern=r"^[a-z_]+_20\d{6}$")]
    name: str | None = None


def _kind_of_tool(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "<own>" if kind in (None, "custom") else "<hosted>"


type AnyTool = Annotated[
    Annotated[MessagesTool, Tag("<own>")] | Annotated[AnthropicTool, Tag("<hosted>")], Discriminator(_kind_of_tool)
]
type MessagesTools = Annotated[list[AnyTool], FailFast(), Field(max_length=MAX_TOOLS)]


class MessagesToolChoice(Strict):
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


class MessagesMetadata(Strict):
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
    tool_choice: MessagesToolChoice | None = None
    tools: MessagesTools | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of output_config.format
    speed: str | None = None  # has no effect: there is one speed
    context_management: ContextManagement | None = None
    metadata: MessagesMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None  # has no effect: there is one tier
    inference_geo: str | None = None  # has no effect: the server is where it is
    container: Any | None = neutral()
    mcp_servers: list[Any] | None = neutral([])

    def conversation(self) -> list[dict[str, Any]]:
        """Returns the messages in the form for templates. The system's message comes first."""
        return templated(self.system, self.messages)

    @property
    def hosted_tools(self) -> list[str]:
        """The types of the tools that are left out."""
        return [tool.type for tool in self.tools or () if isinstance(tool, AnthropicTool)]

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
        own = [tool for tool in self.tools or () if isinstance(tool, MessagesTool)]
        tools = tuple(Tool(tool.name, tool.input_schema, tool.description, tool.strict is True) for tool in own)
        choice = self.tool_choice or MessagesToolChoice(type="auto")
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

    @property
    def form_field(self) -> str:
        """The field that says which form the answer must have."""
        if self.tool_use().is_forced:
            return "tools"
        return "output_format" if self.output_format is not None else "output_config.format"

    def chosen(self, has_reasoning: bool) -> dict[str, Any]:
        """Returns the fields of `SamplingParams` that the client set. Raises ParameterError for contradictions.

        Without reasoning, which the server must know, no part of an answer is thinking.
        """
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
            "thinking_token_budget": self.thinking.budget_tokens if self.thinking and has_reasoning else None,
        }
        return {name: value for name, value in asked.items() if value is not None}


def _form(format: OutputFormat | None) -> StructuredOutputsParams | None:
    return None if format is None else StructuredOutputsParams.of({"json": format.json_schema})


class TokenCount(Reply):
    """The number of tokens of a prompt."""

    input_tokens: int
    context_management: CountedContextManagement | None = None  # null: the request asks for no edits


class MessagesUsage(Reply):
    """The number of tokens of a response. Computed and cached tokens of the prompt are counted separately."""

    input_tokens: int  # that are neither of the two following
    cache_creation_input_tokens: int | None  # that later prompts find in the prefix cache, and that were not there
    cache_read_input_tokens: int | None
    output_tokens: int
    cache_creation: None = None
    server_tool_use: None = None
    service_tier: Literal["standard"] = "standard"
    inference_geo: None = None


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
    stop_details: None = None  # nothing is refused by its content
    container: None = None
    context_management: AppliedContextManagement | None = None  # where the request has edits


def messages_usage(num_prompt: int, num_output: int, num_cached: int, page_size: int | None) -> dict[str, Any]:
    """Returns a `MessagesUsage` as it is encoded. Full pages of the prompt stay in the cache; None: there is none."""
    num_created = 0 if page_size is None else max(num_prompt // page_size * page_size - num_cached, 0)
    return {
        "input_tokens": num_prompt - num_cached - num_created,
        "cache_creation_input_tokens": num_created,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
        "cache_creation": None,
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
    }


_NO_DETAILS = {"stop_details": None, "container": None}


def ending(completion: CompletionOutput, has_calls: bool) -> dict[str, Any]:
    """Returns the `StopDelta` of a completion that has ended."""
    if completion.finish_reason == "length":
        return _NO_DETAILS | {"stop_reason": "max_tokens", "stop_sequence": None}
    if has_calls:
        return _NO_DETAILS | {"stop_reason": "tool_use", "stop_sequence": None}
    if completion.finish_reason == "stop" and isinstance(completion.stop_reason, str):
        return _NO_DETAILS | {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    return _NO_DETAILS | {"stop_reason": "end_turn", "stop_sequence": None}
