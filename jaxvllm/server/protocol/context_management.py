"""`context_management` of `/v1/messages`: what is cleared of a conversation before the model reads it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, Tag

from jaxvllm.core.value_checks import MAX_INT32
from jaxvllm.server.protocol.fields import Reply, Strict, Strings, by_type
from jaxvllm.server.protocol.message_blocks import (
    InputMessage,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)

# What the model reads instead of a cleared result.
CLEARED = "[This result was cleared to make room.]"
# Anthropic's defaults.
_TRIGGER_TOKENS, _KEPT_USES, _KEPT_TURNS = 100_000, 3, 1

type Count = Annotated[int, Field(ge=0, le=MAX_INT32)]


class ThinkingKept(Strict):
    """The thinking that stays."""

    type: Literal["thinking_turns", "all"]
    value: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None  # turns of the assistant, the latest; not with all


class ClearThinking(Strict):
    """The edit that clears the thinking of earlier turns. The user begins a turn by saying more than tools' results."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | ThinkingKept | None = None  # null: the latest turn that has thinking

    def cleared(self, messages: Sequence[InputMessage]) -> tuple[list[InputMessage], int]:
        """Returns the messages without the thinking that goes, and the number of turns that had it."""
        if self.keep == "all" or (isinstance(self.keep, ThinkingKept) and self.keep.type == "all"):
            return list(messages), 0
        kept = _KEPT_TURNS if self.keep is None or self.keep.value is None else self.keep.value
        turn_of = _turns(messages)
        thinking = {turn for turn, message in zip(turn_of, messages, strict=True) if _has(message, _THINKING)}
        going = set(sorted(thinking)[:-kept])
        return [
            _without(message, _THINKING) if turn in going else message
            for turn, message in zip(turn_of, messages, strict=True)
        ], len(going)

    def told(self, num_cleared: int, num_tokens: int) -> dict[str, Any]:
        """Returns a `ClearedThinking` as it is encoded."""
        return {"type": self.type, "cleared_thinking_turns": num_cleared, "cleared_input_tokens": num_tokens}


class Trigger(Strict):
    """The size of a conversation from which on it is edited."""

    type: Literal["input_tokens", "tool_uses"]
    value: Count


class ToolUsesKept(Strict):
    """The number of latest uses of tools that stay."""

    type: Literal["tool_uses"]
    value: Count


class TokensCleared(Strict):
    """The number of tokens that an edit must save, or it is not made."""

    type: Literal["input_tokens"]
    value: Count


class ClearToolUses(Strict):
    """The edit that puts a short text in the place of old results of tools."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: Trigger | None = None  # null: above 100,000 tokens
    keep: ToolUsesKept | None = None  # null: 3
    clear_at_least: TokensCleared | None = None
    clear_tool_inputs: bool | Strings | None = None  # true: inputs are cleared, too; or those of the named tools
    exclude_tools: Strings | None = None  # names of tools whose uses stay

    def cleared(self, messages: Sequence[InputMessage]) -> tuple[list[InputMessage], int]:
        """Returns the messages without what goes, and the number of uses that are cleared."""
        uses = [block for message in messages for block in message.content if isinstance(block, ToolUseBlock)]
        kept = _KEPT_USES if self.keep is None else self.keep.value
        old = uses[: max(0, len(uses) - kept)]
        excluded = frozenset(self.exclude_tools or ())
        answered = {
            block.tool_use_id for message in messages for block in message.content if isinstance(block, ToolResultBlock)
        }
        going = {use.id for use in old if use.name not in excluded and use.id in answered}

        def edited(block: Any) -> Any:
            if isinstance(block, ToolResultBlock) and block.tool_use_id in going:
                return block.model_copy(update={"content": [TextBlock(type="text", text=CLEARED)]})
            if isinstance(block, ToolUseBlock) and block.id in going and self._clears_input(block.name):
                return block.model_copy(update={"input": {}})
            return block

        return [
            message.model_copy(update={"content": [edited(block) for block in message.content]}) for message in messages
        ], len(going)

    def is_due(self, messages: Sequence[InputMessage], num_tokens: int) -> bool:
        """Returns whether the conversation is as large as the trigger says."""
        if self.trigger is not None and self.trigger.type == "tool_uses":
            uses = sum(isinstance(block, ToolUseBlock) for message in messages for block in message.content)
            return uses > self.trigger.value
        return num_tokens > (_TRIGGER_TOKENS if self.trigger is None else self.trigger.value)

    def told(self, num_cleared: int, num_tokens: int) -> dict[str, Any]:
        """Returns a `ClearedToolUses` as it is encoded."""
        return {"type": self.type, "cleared_tool_uses": num_cleared, "cleared_input_tokens": num_tokens}

    def _clears_input(self, name: str) -> bool:
        named = self.clear_tool_inputs
        return name in named if isinstance(named, list) else bool(named)


class Compact(BaseModel):
    """The edit that has Anthropic's server summarize a long conversation. It has no effect: the prompt must fit."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["compact_20260112"]


type Edit = Annotated[
    Annotated[ClearThinking, Tag("<clear_thinking_20251015>")]
    | Annotated[ClearToolUses, Tag("<clear_tool_uses_20250919>")]
    | Annotated[Compact, Tag("<compact_20260112>")],
    by_type("clear_thinking_20251015", "clear_tool_uses_20250919", "compact_20260112"),
]
type Edits = Annotated[list[Edit], FailFast(), Field(max_length=16)]


class ContextManagement(Strict):
    """The edits of a conversation, which are made in this order."""

    edits: Edits | None = None


class ClearedThinking(Reply):
    """The thinking that was cleared."""

    type: Literal["clear_thinking_20251015"]
    cleared_thinking_turns: int
    cleared_input_tokens: int


class ClearedToolUses(Reply):
    """The uses of tools that were cleared."""

    type: Literal["clear_tool_uses_20250919"]
    cleared_tool_uses: int
    cleared_input_tokens: int


class AppliedContextManagement(Reply):
    """The edits that cleared something."""

    applied_edits: list[Annotated[ClearedThinking | ClearedToolUses, Field(discriminator="type")]]


class CountedContextManagement(Reply):
    """The size of the conversation before its edits."""

    original_input_tokens: int


@dataclass(frozen=True)
class EditedMessages:
    """The messages after all edits, and the edits that cleared something, as they are encoded."""

    messages: list[InputMessage]
    applied: list[dict[str, Any]]


def edit(
    asked: ContextManagement | None, messages: Sequence[InputMessage], count: Callable[[Sequence[InputMessage]], int]
) -> EditedMessages:
    """Makes the edits. `count` returns the tokens of a prompt with such messages, and is called only if one applies."""
    now = list(messages)
    size: int | None = None
    applied = []
    for one in (asked and asked.edits) or ():
        if isinstance(one, Compact):
            continue
        edited, num_cleared = one.cleared(now)
        if not num_cleared:
            continue
        size = count(now) if size is None else size
        if isinstance(one, ClearToolUses) and not one.is_due(now, size):
            continue
        new_size = count(edited)
        num_saved = max(0, size - new_size)
        if isinstance(one, ClearToolUses) and one.clear_at_least and num_saved < one.clear_at_least.value:
            continue
        applied.append(one.told(num_cleared, num_saved))
        now, size = edited, new_size
    return EditedMessages(now, applied)


_THINKING = (ThinkingBlock, RedactedThinkingBlock)


def _turns(messages: Sequence[InputMessage]) -> list[int]:
    """Returns the number of the turn that each message belongs to."""
    turns, turn = [], 0
    for message in messages:
        if message.role == "user" and not all(isinstance(block, ToolResultBlock) for block in message.content):
            turn += 1
        turns.append(turn)
    return turns


def _has(message: InputMessage, kinds: tuple[type[Strict], ...]) -> bool:
    return any(isinstance(block, kinds) for block in message.content)


def _without(message: InputMessage, kinds: tuple[type[Strict], ...]) -> InputMessage:
    return message.model_copy(update={"content": [block for block in message.content if not isinstance(block, kinds)]})
