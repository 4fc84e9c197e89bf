"""The content blocks of a `/v1/messages` answer, whole or as a stream of events."""

import json
from typing import Any

from pydantic_core import from_json

from jaxvllm.text.assistant_message import AssistantMessage, ToolCall
from jaxvllm.text.message_events import Arguments, CallBegin, CallBroken, CallCut, CallEnd, Content, Event, Reasoning

# The type of an event, and its fields beside the type.
type Told = tuple[str, dict[str, Any]]


def blocks_of(message: AssistantMessage) -> list[dict[str, Any]]:
    """Returns a whole answer as blocks. An answer without anything is an empty text."""
    blocks = [_thinking(message.reasoning)] if message.reasoning else []
    if message.content or not (message.reasoning or message.calls):
        blocks.append(_text(message.content))
    return blocks + [_tool_use(call.id, call.name, _input(call)) for call in message.calls]


class BlockStream:
    """Tells of the blocks while they come. One at a time is open: what comes belongs to it, or closes it."""

    def __init__(self) -> None:
        self._count = 0  # of the blocks so far
        self._open: str | None = None  # the type of the open block

    def read(self, said: Event) -> list[Told]:
        """Returns the events that tell what the model said."""
        match said:
            case Reasoning(text):
                told = [] if self._open == "thinking" else self._begin(_thinking(""))
                return told + self._delta({"type": "thinking_delta", "thinking": text})
            case Content(text):
                if not text and self._count:
                    return []
                told = [] if self._open == "text" else self._begin(_text(""))
                return told + (self._delta({"type": "text_delta", "text": text}) if text else [])
            case CallBegin(_, call_id, name):
                return self._begin(_tool_use(call_id, name, {}))
            case Arguments(_, text):
                return self._delta({"type": "input_json_delta", "partial_json": text})
            case CallEnd() | CallBroken() | CallCut():
                return self._end()

    def finish(self) -> list[Told]:
        """Returns the events of the end. An answer without anything is an empty text."""
        return [*([] if self._count else self._begin(_text(""))), *self._end()]

    def _begin(self, block: dict[str, Any]) -> list[Told]:
        told = self._end()
        self._count += 1
        self._open = block["type"]
        return [*told, ("content_block_start", {"index": self._count - 1, "content_block": block})]

    def _delta(self, delta: dict[str, Any]) -> list[Told]:
        return [("content_block_delta", {"index": self._count - 1, "delta": delta})]

    def _end(self) -> list[Told]:
        if self._open is None:
            return []
        self._open = None
        return [("content_block_stop", {"index": self._count - 1})]


def _input(call: ToolCall) -> dict[str, Any]:
    """Returns the arguments of a call. If it was cut, they are what Anthropic's clients make of the beginning."""
    if call.is_whole:
        read: dict[str, Any] = json.loads(call.arguments)
    else:
        read = from_json(call.arguments, allow_partial=True) if call.arguments.strip() else {}
    return read


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def _thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _tool_use(call_id: str, name: str, given: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}
