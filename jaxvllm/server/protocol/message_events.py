"""The events of a stream of `/v1/messages`."""

from typing import Annotated, Literal

from pydantic import Field

from jaxvllm.server.protocol.context_management import AppliedContextManagement
from jaxvllm.server.protocol.fields import Reply
from jaxvllm.server.protocol.messages import MessagesResponse, MessagesUsage, OutputBlock, StopReason


class MessageStart(Reply):
    """The first event, with an empty message."""

    type: Literal["message_start"]
    message: MessagesResponse


class ContentBlockStart(Reply):
    """The event at the beginning of a block."""

    type: Literal["content_block_start"]
    index: int
    content_block: OutputBlock


class PingEvent(Reply):
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
    stop_details: None = None  # nothing is refused by its content
    container: None = None


class MessageDelta(Reply):
    """The event at the end of the message. Its usage is that of the whole response."""

    type: Literal["message_delta"]
    delta: StopDelta
    usage: MessagesUsage
    context_management: AppliedContextManagement | None = None


class MessageStop(Reply):
    """The last event."""

    type: Literal["message_stop"]


type MessagesEvent = Annotated[
    MessageStart | ContentBlockStart | PingEvent | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop,
    Field(discriminator="type"),
]
