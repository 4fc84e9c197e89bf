"""The bodies of `/v1/messages`, compatible with Anthropic's clients."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, FailFast, Field, Tag

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
    ttl: str | None = None
    scope: str | None = None


class TextBlock(Strict):
    """A text in a message."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None  # of an earlier answer; they have no effect


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
    """A message of the user or the assistant, or one of the system in the middle of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content


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


class HostedTool(BaseModel):
    """A tool that Anthropic's own server has, or that its models know without a schema. It is left out here."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Annotated[str, Field(pattern=r"^[a-z_]+_20\d{6}$")]
    name: str | None = None


def _kind_of_tool(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "<own>" if kind in (None, "custom") else "<hosted>"


type AnyTool = Annotated[
    Annotated[MessagesTool, Tag("<own>")] | Annotated[HostedTool, Tag("<hosted>")], Discriminator(_kind_of_tool)
]
type MessagesTools = Annotated[list[AnyTool], FailFast(), Field(max_length=MAX_TOOLS)]


class ThinkingTurns(Strict):
    """A number of the last answers, which keep their thinking."""

    type: Literal["thinking_turns"]
    value: Annotated[int, Field(ge=1)]


class AllTurns(Strict):
    """Every answer keeps its thinking."""

    type: Literal["all"]


class ClearThinking(Strict):
    """The rule that the model no longer sees the thinking of earlier answers."""

    type: Annotated[str, Field(pattern=r"^clear_thinking_\d{8}$")]
    keep: ThinkingTurns | AllTurns | Literal["all"] | None = None  # None: that of the last answer

    @property
    def num_kept(self) -> int | None:
        """The number of the last answers that keep their thinking; None: all."""
        if self.keep is None:
            return 1
        return self.keep.value if isinstance(self.keep, ThinkingTurns) else None


class OtherEdit(BaseModel):
    """Another rule of that kind. It has no effect: all of the prompt must fit anyhow."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str


def _kind_of_edit(edit: Any) -> str:
    kind = edit.get("type") if isinstance(edit, dict) else getattr(edit, "type", None)
    return "<thinking>" if isinstance(kind, str) and kind.startswith("clear_thinking_") else "<other>"


type ContextEdit = Annotated[
    Annotated[ClearThinking, Tag("<thinking>")] | Annotated[OtherEdit, Tag("<other>")], Discriminator(_kind_of_edit)
]


class ContextManagement(Strict):
    """Rules for what of a long conversation the model no longer sees."""

    edits: Annotated[list[ContextEdit], FailFast(), Field(max_length=16)] = []


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
    speed: str | None = None  # has no effect: there is one speed
    context_management: ContextManagement | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """Returns the messages in the form for templates. The system's message comes first."""
        said = [] if not self.system else [{"role": "system", "content": _texts(self.system)}]
        cleared = self.cleared_thinking
        names: dict[str, str] = {}  # of the called tools, because some templates want them with the results
        for index, message in enumerate(self.messages):
            for at, block in enumerate(message.content):
                if (role := _OF_ROLE.get(type(block), message.role)) != message.role:
                    where = f"messages[{index}].content[{at}]"
                    raise ParameterError(f"{where} is a {block.type}, which only the {role} may have", where)
            if message.role == "system":
                said.append({"role": "system", "content": _texts(message.content)})
            elif message.role == "assistant":
                blocks = message.content
                if index in cleared:
                    blocks = [block for block in blocks if not isinstance(block, ThinkingBlock)]
                said.append(_answer(blocks))
                names |= {block.id: block.name for block in message.content if isinstance(block, ToolUseBlock)}
            else:
                said += _question(message.content, names)
        return said

    @property
    def cleared_thinking(self) -> frozenset[int]:
        """The indices of the messages whose thinking the model no longer sees."""
        edits = [] if self.context_management is None else self.context_management.edits
        kept = [edit.num_kept for edit in edits if isinstance(edit, ClearThinking) and edit.num_kept is not None]
        thought = [
            index
            for index, message in enumerate(self.messages)
            if any(isinstance(block, ThinkingBlock) for block in message.content)
        ]
        return frozenset(thought[: len(thought) - min(kept)] if kept else ())

    def edited(self) -> dict[str, Any]:
        """Returns the field `context_management` of the answer, which is null if the request has none."""
        if self.context_management is None:
            return {"context_management": None}
        cleared = len(self.cleared_thinking)
        kind = next((edit.type for edit in self.context_management.edits if isinstance(edit, ClearThinking)), None)
        applied = [{"type": kind, "cleared_thinking_turns": cleared, "cleared_input_tokens": 0}] if cleared else []
        return {"context_management": {"applied_edits": applied}}

    @property
    def hosted_tools(self) -> list[str]:
        """The types of the tools that are left out."""
        return [tool.type for tool in self.tools or () if isinstance(tool, HostedTool)]

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
    service_tier: Literal["auto", "standard_only"] | None = None  # has no effect: there is one tier
    inference_geo: str | None = None  # has no effect: the server is where it is
    container: Any | None = neutral()
    mcp_servers: list[Any] | None = neutral([])

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


class AppliedEdits(Reply):
    """The edits of the conversation that took something away."""

    applied_edits: list[dict[str, Any]]


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
    context_management: AppliedEdits | None = None  # where the request has edits


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
