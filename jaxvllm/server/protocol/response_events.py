"""The events of a stream of `/v1/responses`."""

from typing import Annotated, Literal

from pydantic import Field

from jaxvllm.server.protocol.fields import Reply
from jaxvllm.server.protocol.logprobs import TokenLogprob
from jaxvllm.server.protocol.response_items import OutputItem, OutputText, ReasoningText
from jaxvllm.server.protocol.responses import ResponsesResponse


class _NumberedEvent(Reply):
    sequence_number: int


class ResponseEvent(_NumberedEvent):
    """The event of a new status of the response. The last such event ends the stream."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: ResponsesResponse


class OutputItemEvent(_NumberedEvent):
    """The event at the beginning and at the end of an item of the answer."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class ContentPartEvent(_NumberedEvent):
    """The event at the beginning and at the end of a text."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int
    part: Annotated[OutputText | ReasoningText, Field(discriminator="type")]


class TextDeltaEvent(_NumberedEvent):
    """The event with a new part of the text."""

    type: Literal["response.output_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[TokenLogprob]


class TextDoneEvent(_NumberedEvent):
    """The event with the whole text."""

    type: Literal["response.output_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDeltaEvent(_NumberedEvent):
    """The event with a new part of the reasoning."""

    type: Literal["response.reasoning_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningDoneEvent(_NumberedEvent):
    """The event with the whole reasoning."""

    type: Literal["response.reasoning_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str


class ArgumentsDeltaEvent(_NumberedEvent):
    """The event with a new part of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    item_id: str
    output_index: int
    delta: str


class ArgumentsDoneEvent(_NumberedEvent):
    """The event with all arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    item_id: str
    output_index: int
    name: str
    arguments: str


class CustomInputDeltaEvent(_NumberedEvent):
    """The event with a new part of a custom tool's input."""

    type: Literal["response.custom_tool_call_input.delta"]
    item_id: str
    output_index: int
    delta: str


class CustomInputDoneEvent(_NumberedEvent):
    """The event with the whole input of a custom tool."""

    type: Literal["response.custom_tool_call_input.done"]
    item_id: str
    output_index: int
    input: str


class ErrorEvent(_NumberedEvent):
    """The event of an error. The event `response.failed` follows it."""

    type: Literal["error"]
    code: str | None
    message: str
    param: str | None


type ResponsesEvent = Annotated[
    ResponseEvent
    | OutputItemEvent
    | ContentPartEvent
    | TextDeltaEvent
    | TextDoneEvent
    | ReasoningDeltaEvent
    | ReasoningDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent
    | CustomInputDeltaEvent
    | CustomInputDoneEvent
    | ErrorEvent,
    Field(discriminator="type"),
]
