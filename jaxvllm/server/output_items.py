"""`OutputItems`: the items of a `/v1/responses` answer while it comes, and the events that tell of them."""

from typing import Any, Literal

from jaxvllm.server.custom_input import CustomInput
from jaxvllm.server.protocol.fields import new_id
from jaxvllm.server.protocol.response_items import ItemStatus
from jaxvllm.server.protocol.response_tools import OfferedTools
from jaxvllm.text.message_events import Arguments, CallBegin, CallBroken, CallCut, CallEnd, Content, Event, Reasoning

# The type of an event, and its fields beside the type and the number.
type Told = tuple[str, dict[str, Any]]

# For each kind of item with a text: the type of its only part, and how its events are called.
_PARTS: dict[str, tuple[str, str]] = {
    "message": ("output_text", "response.output_text"),
    "reasoning": ("reasoning_text", "response.reasoning_text"),
}


class OutputItems:
    """The items so far. One at a time is open: what comes belongs to it, or closes it and opens another."""

    def __init__(self, tools: OfferedTools) -> None:
        self.items: list[dict[str, Any]] = []
        self._tools = tools
        self._input = CustomInput()  # of the open call, if it is one of a custom tool
        self._is_open = False
        self._logprobs: list[dict[str, Any]] = []  # that no text has had yet

    def note(self, logprobs: list[dict[str, Any]]) -> None:
        """Takes the log-probabilities of new tokens. The answer's text gets them, as it has the only place for them."""
        self._logprobs += logprobs

    def read(self, said: Event) -> list[Told]:
        """Adds what the model said, and returns the events that tell of it."""
        match said:
            case Reasoning(text):
                return self._text("reasoning", text)
            case Content(text):
                return self._text("message", text)
            case CallBegin(_, call_id, name):
                return self._open(self._call(call_id, name))
            case Arguments(_, text) if self.items[-1]["type"] == "custom_tool_call":
                return self._more_input(self._input.push(text))
            case Arguments(_, text):
                self.items[-1]["arguments"] += text
                return [("response.function_call_arguments.delta", self._where() | {"delta": text})]
            case CallEnd():
                return self._close("completed")
            case CallBroken() | CallCut():
                return self._close("incomplete")

    def finish(self, status: ItemStatus) -> list[Told]:
        """Closes what is open when the answer has ended. An answer without anything is an empty message."""
        told = [] if self.items else self._text("message", "")
        return told + self._close(status)

    def _call(self, call_id: str, name: str) -> dict[str, Any]:
        """Returns a call of the tool that the model knows as `name`, as the client has declared it."""
        tool = self._tools.by_name.get(name)
        of_client: dict[str, Any] = {"call_id": call_id, "name": name if tool is None else tool.name}
        if tool is not None and tool.namespace is not None:
            of_client["namespace"] = tool.namespace
        if tool is None or not tool.is_custom:
            return {"id": new_id("fc_"), "type": "function_call"} | of_client | {"arguments": ""}
        self._input = CustomInput()
        return {"id": new_id("ctc_"), "type": "custom_tool_call"} | of_client | {"input": ""}

    def _more_input(self, text: str) -> list[Told]:
        if not text:
            return []
        self.items[-1]["input"] += text
        return [("response.custom_tool_call_input.delta", self._where() | {"delta": text})]

    def _text(self, kind: Literal["message", "reasoning"], text: str) -> list[Told]:
        told: list[Told] = []
        if not self._is_open or self.items[-1]["type"] != kind:
            if not text and self.items:
                return []
            told = self._open(_with_text(kind))
        [part] = self.items[-1]["content"]
        part["text"] += text
        logprobs = {}
        if kind == "message":
            logprobs = {"logprobs": self._logprobs}
            part["logprobs"] += self._logprobs
            self._logprobs = []
        if text or logprobs.get("logprobs"):
            told.append((f"{_PARTS[kind][1]}.delta", self._where(0) | {"delta": text} | logprobs))
        return told

    def _open(self, item: dict[str, Any]) -> list[Told]:
        told = self._close("completed")
        self.items.append({"status": "in_progress"} | item)
        self._is_open = True
        shown = dict(self.items[-1])
        if item["type"] in _PARTS:
            shown["content"] = []
        told.append(("response.output_item.added", {"output_index": len(self.items) - 1, "item": shown}))
        if item["type"] in _PARTS:
            # A copy, because the part grows.
            part = {name: value if name != "logprobs" else [] for name, value in item["content"][0].items()}
            told.append(("response.content_part.added", self._where(0) | {"part": part}))
        return told

    def _close(self, status: ItemStatus) -> list[Told]:
        """Closes the open item, if any, which ended so."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            whole = {"name": item["name"], "arguments": item["arguments"]}
            told: list[Told] = [("response.function_call_arguments.done", self._where() | whole)]
        elif item["type"] == "custom_tool_call":
            told = self._more_input(self._input.finish())
            told.append(("response.custom_tool_call_input.done", self._where() | {"input": item["input"]}))
        else:
            [part] = item["content"]
            text = {name: value for name, value in part.items() if name in ("text", "logprobs")}
            told = [
                (f"{_PARTS[item['type']][1]}.done", self._where(0) | text),
                ("response.content_part.done", self._where(0) | {"part": part}),
            ]
        return [*told, ("response.output_item.done", {"output_index": len(self.items) - 1, "item": item})]

    def _where(self, content_index: int | None = None) -> dict[str, Any]:
        where = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return where if content_index is None else where | {"content_index": content_index}


def _with_text(kind: Literal["message", "reasoning"]) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _PARTS[kind][0], "text": ""}
    if kind == "reasoning":
        return {"id": new_id("rs_"), "type": kind, "summary": [], "content": [part], "encrypted_content": None}
    part |= {"annotations": [], "logprobs": []}
    return {"id": new_id("msg_"), "type": kind, "role": "assistant", "content": [part]}
