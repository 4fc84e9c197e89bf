"""`/v1/messages`, as Anthropic's clients know it."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field

from jaxvllm.engine.outputs import CompletionOutput
from jaxvllm.server.protocol.fields import MAX_MESSAGES, Limit, Priority, Reply, Strict, Strings, neutral


class CacheControl(Strict):
    """A mark where a prompt's cached part ends. The prefix cache needs none: it finds the longest by itself."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Strict):
    """A text of a message."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = neutral([])


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


type Blocks = Annotated[
    list[TextBlock], FailFast(), BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])
]  # a text, or several in a row: newlines join them


class InputMessage(Strict):
    """What one side said."""

    role: Literal["user", "assistant"]
    content: Blocks


class Thinking(Strict):
    """Of models that think before they answer."""

    type: Literal["disabled"]


class ToolChoice(Strict):
    """Says nothing without tools."""

    type: Literal["auto", "none"]
    disable_parallel_tool_use: bool | None = None


class Metadata(Strict):
    """For the caller's own bookkeeping."""

    user_id: str | None = None


class ConversationFields(Strict):
    """What becomes the prompt."""

    model: str | None = None  # None: the one that is served
    # The answer goes on with the last message when the assistant said it.
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
        """The messages as templates know them: the system's goes first."""
        said = [] if not self.system else [("system", self.system)]
        said += [(message.role, message.content) for message in self.messages]
        return [
            {"role": role, "content": [{"type": "text", "text": block.text} for block in blocks]}
            for role, blocks in said
        ]

    @property
    def continues(self) -> bool:
        """Whether the last message is the beginning of the answer."""
        return self.messages[-1].role == "assistant"


class CountTokensRequest(ConversationFields):
    """A conversation whose prompt is to be measured."""


class MessagesRequest(ConversationFields):
    """A conversation to go on with."""

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
    # Not Anthropic's: as on the other endpoints.
    priority: Priority = 0  # lower goes first, with scheduling_policy="priority"
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None  # prefixes are shared under one salt

    def chosen(self) -> dict[str, Any]:
        """What of `SamplingParams` the client set."""
        asked = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
        }
        return {name: value for name, value in asked.items() if value is not None}


class TokenCount(Reply):
    """Of a prompt."""

    input_tokens: int


class MessagesUsage(Reply):
    """Tokens of a response. The prompt's are those that were computed and those that were cached, apart."""

    input_tokens: int
    cache_creation_input_tokens: int  # none: to fill the cache costs nothing
    cache_read_input_tokens: int
    output_tokens: int


class OutputBlock(Reply):
    """The answer."""

    type: Literal["text"]
    text: str
    citations: None = None


type StopReason = Literal["end_turn", "max_tokens", "stop_sequence"]


class MessagesResponse(Reply):
    """What the assistant said."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessageStart(Reply):
    """The first event: the message, empty."""

    type: Literal["message_start"]
    message: MessagesResponse


class ContentBlockStart(Reply):
    """The answer begins."""

    type: Literal["content_block_start"]
    index: int
    content_block: OutputBlock


class Ping(Reply):
    """Nothing but a sign of life."""

    type: Literal["ping"]


class TextDelta(Reply):
    """New text."""

    type: Literal["text_delta"]
    text: str


class ContentBlockDelta(Reply):
    """What is new of the answer."""

    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta


class ContentBlockStop(Reply):
    """The answer is complete."""

    type: Literal["content_block_stop"]
    index: int


class StopDelta(Reply):
    """Why it ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Reply):
    """The message's end; tokens are those of the whole response."""

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
    """`MessagesUsage`, as it is encoded."""
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
    }


def ending(completion: CompletionOutput) -> dict[str, Any]:
    """`StopDelta` of a completion that has ended."""
    if completion.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(completion.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}
