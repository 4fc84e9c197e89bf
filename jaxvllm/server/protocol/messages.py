"""The bodies of `/v1/messages`, compatible with Anthropic's clients."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field

from jaxvllm.engine.outputs import CompletionOutput
from jaxvllm.server.protocol.fields import MAX_MESSAGES, EngineFields, Limit, Reply, Strict, Strings, neutral


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


class InputMessage(Strict):
    """A message of the user or the assistant."""

    role: Literal["user", "assistant"]
    content: Blocks


class Thinking(Strict):
    """The setting for models that think before they answer."""

    type: Literal["disabled"]


class ToolChoice(Strict):
    """A choice of tools, which has no effect because there are none."""

    type: Literal["auto", "none"]
    disable_parallel_tool_use: bool | None = None


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
    tools: list[Any] | None = neutral([])
    cache_control: CacheControl | None = None
    output_config: dict[str, Any] | None = neutral({})
    speed: str | None = neutral("standard")

    def conversation(self) -> list[dict[str, Any]]:
        """Returns the messages in the form for templates. The system's message comes first."""
        said = [] if not self.system else [("system", self.system)]
        said += [(message.role, message.content) for message in self.messages]
        return [
            {"role": role, "content": [{"type": "text", "text": block.text} for block in blocks]}
            for role, blocks in said
        ]

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message."""
        return self.messages[-1].role == "assistant"


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

    def chosen(self) -> dict[str, Any]:
        """Returns the fields of `SamplingParams` that the client set."""
        asked = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
        }
        return {name: value for name, value in asked.items() if value is not None}


class TokenCount(Reply):
    """The number of tokens of a prompt."""

    input_tokens: int


class MessagesUsage(Reply):
    """The number of tokens of a response. Computed and cached tokens of the prompt are counted separately."""

    input_tokens: int
    cache_creation_input_tokens: int  # always 0, because filling the cache costs nothing
    cache_read_input_tokens: int
    output_tokens: int


class OutputBlock(Reply):
    """The text of an answer."""

    type: Literal["text"]
    text: str
    citations: None = None


type StopReason = Literal["end_turn", "max_tokens", "stop_sequence"]


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
    """The event at the beginning of the answer's text."""

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


class ContentBlockDelta(Reply):
    """The event with a new part of the answer's text."""

    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta


class ContentBlockStop(Reply):
    """The event at the end of the answer's text."""

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


def ending(completion: CompletionOutput) -> dict[str, Any]:
    """Returns the `StopDelta` of a completion that has ended."""
    if completion.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if completion.finish_reason == "stop" and isinstance(completion.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}
