"""The messages of `/v1/messages` and their content blocks, and the same messages in the form for chat templates."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Tag

from jaxvllm.core.errors import ParameterError
from jaxvllm.server.protocol.fields import FunctionName, Strict, by_type, neutral


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


# Claude Code begins its system prompt with a line for Anthropic's books. Many versions write a hash there that differs
# in each request, so that no request would find the prefix of the one before it in the cache.
_BILLING_HEADER = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")


def templated(system: Sequence[TextBlock] | None, messages: Sequence[InputMessage]) -> list[dict[str, Any]]:
    """Returns the messages in the form for templates. The system's message comes first.

    Raises ParameterError for a block in a message of a role that cannot have it.
    """
    said: list[dict[str, Any]] = []
    if system and (texts := _texts(_without_billing(system))):
        said.append({"role": "system", "content": texts})
    names: dict[str, str] = {}  # of the called tools, because some templates want them with the results
    for index, message in enumerate(messages):
        for at, block in enumerate(message.content):
            role = _OF_ROLE.get(type(block), message.role)
            if role != message.role:
                where = f"messages[{index}].content[{at}]"
                raise ParameterError(f"{where} is a {block.type}, which only the {role} may have", where)
        match message.role:
            case "assistant":
                said.append(_answer(message.content))
                names |= {block.id: block.name for block in message.content if isinstance(block, ToolUseBlock)}
            case "user":
                said += _question(message.content, names)
            case "system":
                said.append({"role": "system", "content": _texts(message.content)})
    return said


def _without_billing(system: Sequence[TextBlock]) -> list[TextBlock]:
    kept = [block.model_copy(update={"text": _BILLING_HEADER.sub("", block.text)}) for block in system]
    return [new for new, old in zip(kept, system, strict=True) if new.text or not old.text]


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
