"""`context_management` of `/v1/messages`: what its edits clear, and what answers tell of them."""

from collections.abc import Sequence
from typing import Any

import pytest

from jaxvllm.server.protocol.context_management import CLEARED, ContextManagement, edit
from jaxvllm.server.protocol.message_blocks import InputMessage
from jaxvllm.server.protocol.messages import ConversationFields
from tests.server.conftest import Server, events_of
from tests.server.judges import judge

PATH = "/v1/messages"
TRIGGERED = {"type": "tool_uses", "value": 3}
THINKING, TOOLS = "clear_thinking_20251015", "clear_tool_uses_20250919"
LOOK: dict[str, Any] = {"name": "look", "input_schema": {"type": "object"}}


def asks(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def uses(number: int, name: str = "look", thinks: bool = True) -> list[dict[str, Any]]:
    """A call, and its result."""
    call = {"type": "tool_use", "id": f"call{number}", "name": name, "input": {"number": number}}
    thought = [{"type": "thinking", "thinking": f"I use number {number}.", "signature": ""}] if thinks else []
    result = {"type": "tool_result", "tool_use_id": f"call{number}", "content": f"The result of number {number}."}
    return [{"role": "assistant", "content": [*thought, call]}, {"role": "user", "content": [result]}]


def says(text: str) -> dict[str, Any]:
    thought = {"type": "thinking", "thinking": f"I say {text}", "signature": ""}
    return {"role": "assistant", "content": [thought, {"type": "text", "text": text}]}


# Three turns of the assistant, of which the first has two uses of tools.
TURNS = [asks("a"), *uses(1), *uses(2), says("b"), asks("c"), says("d"), asks("e"), *uses(3), asks("f"), *uses(4)]


def size(messages: Sequence[InputMessage]) -> int:
    """A number that stands for tokens: 10 for each thinking block and each result that is there."""
    kinds = [block.type for message in messages for block in message.content]
    texts = [block.content[0].text for m in messages for block in m.content if block.type == "tool_result"]
    return 10 * kinds.count("thinking") + 10 * sum(text != CLEARED for text in texts)


def edited(*edits: dict[str, Any], turns: Sequence[Any] = TURNS) -> tuple[list[Any], list[Any]]:
    body = ConversationFields.model_validate({"messages": turns, "context_management": {"edits": list(edits)}})
    made = edit(body.context_management, body.messages, size)
    return [message.model_dump() for message in made.messages], made.applied


def blocks(messages: Sequence[Any], kind: str) -> list[Any]:
    return [block for message in messages for block in message["content"] if block["type"] == kind]


@pytest.mark.parametrize(
    ("keep", "num_cleared", "left"),
    [
        ({}, 3, ["I use number 4."]),
        ({"keep": None}, 3, ["I use number 4."]),
        ({"keep": {"type": "thinking_turns", "value": 1}}, 3, ["I use number 4."]),
        ({"keep": {"type": "thinking_turns", "value": 2}}, 2, ["I use number 3.", "I use number 4."]),
        ({"keep": {"type": "thinking_turns", "value": 3}}, 1, ["I say d", "I use number 3.", "I use number 4."]),
    ],
)
def test_thinking_of_earlier_turns_is_cleared(keep: dict[str, Any], num_cleared: int, left: list[str]) -> None:
    messages, applied = edited({"type": THINKING, **keep})
    assert [block["thinking"] for block in blocks(messages, "thinking")] == left
    tokens = 10 * (6 - len(left))
    assert applied == [{"type": THINKING, "cleared_thinking_turns": num_cleared, "cleared_input_tokens": tokens}]
    assert len(blocks(messages, "tool_use")) == 4 and len(blocks(messages, "text")) == 6


@pytest.mark.parametrize("keep", ["all", {"type": "all"}, {"type": "thinking_turns", "value": 4}])
def test_thinking_that_is_kept(keep: Any) -> None:
    messages, applied = edited({"type": THINKING, "keep": keep})
    assert len(blocks(messages, "thinking")) == 6 and applied == []


def test_old_results_are_cleared() -> None:
    always = dict(type=TOOLS, trigger={"type": "input_tokens", "value": 50}, keep={"type": "tool_uses", "value": 1})
    messages, applied = edited(always)
    assert [block["content"][0]["text"] == CLEARED for block in blocks(messages, "tool_result")] == [True] * 3 + [False]
    assert [block["input"] for block in blocks(messages, "tool_use")] == [{"number": n} for n in (1, 2, 3, 4)]
    assert applied == [{"type": TOOLS, "cleared_tool_uses": 3, "cleared_input_tokens": 30}]
    messages, _ = edited(always | {"clear_tool_inputs": True})
    assert [block["input"] for block in blocks(messages, "tool_use")] == [{}, {}, {}, {"number": 4}]
    messages, _ = edited(always | {"clear_tool_inputs": ["other"]})
    assert [block["input"] for block in blocks(messages, "tool_use")] == [{"number": n} for n in (1, 2, 3, 4)]
    turns = [asks("a"), *uses(1, "read"), *uses(2), *uses(3)]
    _, applied = edited(always | {"exclude_tools": ["read"]}, turns=turns)
    assert applied == [{"type": TOOLS, "cleared_tool_uses": 1, "cleared_input_tokens": 10}]


@pytest.mark.parametrize(
    ("fields", "is_applied"),
    [
        ({}, False),  # 100,000 tokens, and the last three stay
        ({"trigger": {"type": "input_tokens", "value": 99}}, True),
        ({"trigger": {"type": "input_tokens", "value": 100}}, False),
        ({"trigger": TRIGGERED}, True),
        ({"trigger": {"type": "tool_uses", "value": 4}}, False),
        ({"trigger": TRIGGERED, "keep": {"type": "tool_uses", "value": 4}}, False),
        ({"trigger": TRIGGERED, "clear_at_least": {"type": "input_tokens", "value": 10}}, True),
        (
            {"trigger": TRIGGERED, "clear_at_least": {"type": "input_tokens", "value": 11}},
            False,
        ),
    ],
)
def test_results_are_cleared_where_the_trigger_says(fields: dict[str, Any], is_applied: bool) -> None:
    messages, applied = edited({"type": TOOLS, **fields})
    assert bool(applied) is is_applied
    assert (CLEARED in str(messages)) is is_applied


def test_edits_follow_each_other_and_the_conversation_is_only_counted_where_one_applies() -> None:
    after = {"type": TOOLS, "trigger": {"type": "input_tokens", "value": 50}}  # 100 before, and 50 after the first edit
    assert [one["type"] for one in edited({"type": THINKING}, after)[1]] == [THINKING]
    assert [one["type"] for one in edited(after, {"type": THINKING})[1]] == [TOOLS, THINKING]

    def fails(messages: Sequence[InputMessage]) -> int:
        raise AssertionError("it is counted")

    asked = ContextManagement.model_validate({"edits": [{"type": THINKING, "keep": "all"}, {"type": TOOLS}]})
    edit(asked, ConversationFields(messages=[InputMessage(role="user", content=[])]).messages, fails)
    edit(None, [], fails)


def test_answers_and_counts_tell_what_was_cleared(server: Server) -> None:
    one = {"type": "tool_uses", "value": 1}
    asked = {"edits": [{"type": TOOLS, "trigger": one, "keep": one}]}
    long = uses(1, thinks=False)
    long[1]["content"][0]["content"] = "word " * 60
    turns = [asks("Look."), *long, *uses(2, thinks=False)]
    body: dict[str, Any] = dict(messages=turns, tools=[LOOK], tool_choice={"type": "none"})
    edited_body = body | dict(context_management=asked)
    plain = server.answer(f"{PATH}/count_tokens", **body)
    assert plain["context_management"] is None
    counted = server.answer(f"{PATH}/count_tokens", **edited_body)
    judge("anthropic.types.beta.BetaMessageTokensCount").validate_python(counted)
    assert counted["context_management"] == {"original_input_tokens": plain["input_tokens"]}
    saved = plain["input_tokens"] - counted["input_tokens"]
    assert saved > 30

    sent = edited_body | dict(max_tokens=4, temperature=0)
    whole = server.answer(PATH, **sent)
    judge("anthropic.types.beta.BetaMessage").validate_python(whole)
    applied = {"applied_edits": [{"type": TOOLS, "cleared_tool_uses": 1, "cleared_input_tokens": saved}]}
    assert whole["context_management"] == applied
    usage = whole["usage"]
    told = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert sum(usage[name] for name in told) == counted["input_tokens"]
    with server.client.stream("POST", PATH, json=sent | {"stream": True}) as response:
        events = list(events_of("".join(response.iter_text())))
    ending = next(event.data for event in events if event.name == "message_delta")
    judge("anthropic.types.beta.BetaRawMessageDeltaEvent").validate_python(ending)
    assert ending["context_management"] == applied
