"""Tools, thinking and forms of the text in `/v1/messages`, with Anthropic's types and client as judges."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pydantic_core import from_json

from jaxvllm.server.protocol.messages import CountTokensRequest, MessagesResponse
from tests.server.conftest import Server, events_of
from tests.server.judges import judge
from tests.server.scripted import TWO_CALLS, Says, Script

PATH = "/v1/messages"
OURS = "jaxvllm.server.protocol.message_events.MessagesEvent"
THEIRS = "anthropic.types.RawMessageStreamEvent"
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Returns the weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CLOCK: dict[str, Any] = {"name": "get_time", "input_schema": {"type": "object"}, "type": "custom"}
USER = {"role": "user", "content": "What is the weather in Oslo?"}
BODY: dict[str, Any] = dict(messages=[USER], tools=[WEATHER, CLOCK], temperature=0, max_tokens=60)
THOUGHT = "<think>It is cold there.</think>\n\n" + TWO_CALLS


def whole(script: Script, **body: Any) -> Any:
    response, _ = script.post(PATH, **BODY | body)
    assert response.status_code == 200, response.text
    MessagesResponse.model_validate(response.json())
    judge("anthropic.types.Message").validate_python(response.json())
    return response.json()


def joined(events: list[Any]) -> Any:
    """The message that events amount to, by the rules of Anthropic's streams."""
    message: Any = None
    parts: dict[int, list[str]] = {}
    open_index = None
    for event in events:
        data = event.data
        judge(OURS).validate_python(data)
        if event.name != "ping":
            judge(THEIRS).validate_python(data)
        assert event.name == data["type"]
        match event.name:
            case "message_start":
                message = data["message"]
            case "content_block_start":
                assert open_index is None and data["index"] == len(message["content"])
                open_index = data["index"]
                message["content"].append(data["content_block"])
                parts[open_index] = []
            case "content_block_delta":
                assert data["index"] == open_index
                [text] = (value for name, value in data["delta"].items() if name != "type")
                parts[open_index].append(text)
            case "content_block_stop":
                assert data["index"] == open_index
                block, text = message["content"][open_index], "".join(parts[open_index])
                name = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
                block[name] = text if name != "input" else json.loads(text or "{}")
                open_index = None
            case "message_delta":
                assert open_index is None
                message |= data["delta"] | {"usage": data["usage"]}
    assert events[-1].name == "message_stop"
    return message


def stream(script: Script, **body: Any) -> Any:
    response, _ = script.post(PATH, **BODY | body, stream=True)
    assert response.status_code == 200, response.text
    return joined(list(events_of(response.text)))


def shown(message: Any) -> Any:
    """A message without what differs from one to the other."""
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return [message["stop_reason"], message["stop_sequence"], *blocks]


def use(name: str, given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "name": name, "input": given}


# ---- the demo model ----


def test_the_demo_model_calls_a_tool_and_reads_its_result(server: Server) -> None:
    answer = server.answer(PATH, **BODY)
    assert shown(answer) == ["tool_use", None, use("get_weather", {"city": "Oslo"})]
    assert shown(joined(server.events(PATH, **BODY))) == shown(answer)
    [call] = answer["content"]
    assert len(call["id"]) >= 9
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": '{"sky":"rainy","degrees":3}'}
    history = [USER, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    after = server.answer(PATH, **BODY | {"messages": history})
    assert after["stop_reason"] == "end_turn" and "rainy" in after["content"][0]["text"]
    counted = server.answer(f"{PATH}/count_tokens", messages=history, tools=BODY["tools"])["input_tokens"]
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert counted == sum(after["usage"][part] for part in parts)


# ---- what a model might say ----


@pytest.mark.parametrize("split", [list, lambda text: [text], lambda text: [text[:70], text[70:]]])
def test_calls_whole_and_streamed(says: Says, split: Callable[[str], list[str]]) -> None:
    answer = whole(says([TWO_CALLS]))
    reason, _, text, *calls = shown(answer)
    assert (reason, text["text"].strip()) == ("tool_use", "I look.")
    assert calls == [use("get_weather", {"city": "Oslo"}), use("get_time", {})]
    assert shown(stream(says(split(TWO_CALLS)))) == shown(answer)


@pytest.mark.parametrize(
    ("thinking", "is_shown"),
    [
        (None, True),
        ({"type": "adaptive"}, True),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, False),
        ({"type": "disabled"}, False),
    ],
)
def test_thinking_is_a_block(says: Says, thinking: Any, is_shown: bool) -> None:
    options = {} if thinking is None else {"thinking": thinking}
    script = says([THOUGHT], reasoning_parser="qwen3")
    answer = whole(script, **options)
    kinds = [block["type"] for block in answer["content"]]
    assert kinds == ["thinking"] * is_shown + ["text", "tool_use", "tool_use"]
    if is_shown:
        assert answer["content"][0] == {"type": "thinking", "thinking": "It is cold there.", "signature": ""}
    assert shown(stream(says(list(THOUGHT), reasoning_parser="qwen3"), **options)) == shown(answer)
    _, [request] = script.post(PATH, **BODY, **options)
    assert request.params.thinking_token_budget == (thinking or {}).get("budget_tokens")


def test_thinking_needs_a_model_that_does(says: Says) -> None:
    assert says(["a"]).post(PATH, **BODY, thinking={"type": "adaptive"})[0].status_code == 200
    # Without --reasoning-parser nothing is thinking, so there is nothing to show or to end.
    response, [request] = says(["a"]).post(PATH, **BODY, thinking={"type": "enabled", "budget_tokens": 1024})
    assert (response.status_code, request.params.thinking_token_budget) == (200, None)


def test_an_answer_that_ends_within_a_call(says: Says) -> None:
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os'
    answer = whole(says([text], finish_reason="length"))
    assert [block["type"] for block in answer["content"]] == ["text"] and answer["stop_reason"] == "max_tokens"
    response, _ = says(list(text), finish_reason="length").post(PATH, **BODY, stream=True)
    *_, block_stop, delta, stop = events_of(response.text)
    assert (block_stop.name, delta.data["delta"]["stop_reason"]) == ("content_block_stop", "max_tokens")


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"type": "tool", "name": "get_weather"}, '{"city": "Oslo", "when": "no'),
        ({"type": "any"}, '[{"name": "get_weather", "parameters": {"city": "Oslo", "when": "no'),
    ],
)
def test_a_forced_call_that_is_cut_is_a_part_of_a_call(says: Says, choice: Any, text: str) -> None:
    answer = whole(says([text], finish_reason="length"), tool_choice=choice)
    [block] = answer["content"]
    assert (block["type"], block["input"], answer["stop_reason"]) == ("tool_use", {"city": "Oslo"}, "max_tokens")
    response, _ = says(list(text), finish_reason="length").post(PATH, **BODY, tool_choice=choice, stream=True)
    parts = [event.data["delta"].get("partial_json", "") for event in events_of(response.text) if "delta" in event.data]
    # Anthropic's client reads the parts in the same way.
    assert from_json("".join(parts), allow_partial=True) == block["input"]


def test_an_answer_of_nothing_is_an_empty_text(says: Says) -> None:
    for answer in (whole(says([""])), stream(says([""]))):
        assert shown(answer) == ["end_turn", None, {"type": "text", "text": "", "citations": None}]


def test_only_the_first_of_parallel_calls(says: Says) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(whole(says([TWO_CALLS]), tool_choice=choice)["content"]) == 2
    assert len(stream(says(list(TWO_CALLS)), tool_choice=choice)["content"]) == 2


@pytest.mark.parametrize(
    ("choice", "text", "call"),
    [
        ({"type": "any"}, '[{"name": "get_time", "parameters": {}}]', use("get_time", {})),
        ({"type": "tool", "name": "get_weather"}, '{"city": "Bergen"}', use("get_weather", {"city": "Bergen"})),
    ],
)
def test_a_choice_of_tools_forces_a_form(says: Says, choice: Any, text: str, call: Any) -> None:
    response, [request] = says([text]).post(PATH, **BODY, tool_choice=choice)
    assert shown(response.json()) == ["tool_use", None, call]
    assert request.params.structured_outputs is not None and request.params.structured_outputs.json is not None


def test_no_tools_although_there_are_some(says: Says) -> None:
    assert [block["type"] for block in whole(says([TWO_CALLS]), tool_choice={"type": "none"})["content"]] == ["text"]


@pytest.mark.parametrize("place", ["output_config", "output_format"])
def test_the_form_of_the_text(says: Says, place: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "integer"}}
    options = {"output_format": form} if place == "output_format" else {"output_config": {"format": form}}
    _, [request] = says(["5"]).post(PATH, messages=[USER], max_tokens=4, **options)
    assert request.params.structured_outputs.json == '{"type": "integer"}'


def test_variables_of_the_template(server: Server, says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = server.llm.reader
    assert reader.tokenizer is not None
    template = "{{ reasoning_effort }}|{{ enable_thinking }}|{{ thinking }}|"
    shown = replace(reader, tokenizer=reader.tokenizer.with_chat_template(template))
    monkeypatch.setattr(server.llm, "_reader", shown)
    for options, prompt in (
        ({}, "|||"),
        ({"output_config": {"effort": "low"}}, "low|||"),
        ({"thinking": {"type": "disabled"}}, "|False|False|"),
        ({"thinking": {"type": "enabled"}}, "|True|True|"),
    ):
        script = says(["a"], reasoning_parser="qwen3")
        _, [asked] = script.post(PATH, messages=[USER], max_tokens=4, **options)
        assert asked.prompt.text == prompt


# ---- conversations ----


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def test_what_templates_read() -> None:
    result = {"type": "tool_result", "tool_use_id": "1"}
    body = CountTokensRequest.model_validate(
        {
            "system": "s",
            "messages": [
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "x"},
                        {"type": "redacted_thinking", "data": "?"},
                        text("b"),
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
                    ],
                },
                {"role": "user", "content": [result | {"content": [text("one"), text("two")]}, text("c"), text("d")]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "2", "name": "g", "input": {}}]},
                {"role": "user", "content": [result | {"tool_use_id": "2", "is_error": True}]},
            ],
        }
    )
    first = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    second = {"id": "2", "type": "function", "function": {"name": "g", "arguments": {}}}
    assert body.conversation() == [
        {"role": "system", "content": [text("s")]},
        {"role": "user", "content": [text("a")]},
        {"role": "assistant", "content": [text("b")], "reasoning": "hm", "tool_calls": [first]},
        {"role": "tool", "tool_call_id": "1", "content": [text("one"), text("two")], "name": "f"},
        {"role": "user", "content": [text("c"), text("d")]},
        {"role": "assistant", "content": None, "tool_calls": [second]},
        {"role": "tool", "tool_call_id": "2", "content": [], "name": "g"},
    ]
    assert body.continued is None


# ---- refusals ----

CALL = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
BAD: list[tuple[dict[str, Any], str]] = [
    (dict(messages=[{"role": "user", "content": [CALL]}]), "messages[0].content[0] is a tool_use"),
    (
        dict(messages=[{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]),
        "messages[0].content[0] is a tool_result",
    ),
    (dict(messages=[{"role": "assistant", "content": [CALL | {"input": "{}"}]}]), "messages[0].content[0].input"),
    (dict(messages=[{"role": "user", "content": [{"type": "image"}]}]), "messages[0].content[0].type"),
    (dict(tools=[{"name": "f"}]), "tools[0].input_schema"),
    (dict(tools=[{"type": "bash", "name": "bash"}]), "tools[0].type"),
    (dict(tools=[WEATHER] * 1025), "tools"),
    (dict(tool_choice={"type": "any"}), "tool_choice"),
    (dict(tools=[WEATHER], tool_choice={"type": "tool"}), "tool_choice.name is missing"),
    (dict(tools=[WEATHER], tool_choice={"type": "tool", "name": "g"}), "tool_choice names 'g'"),
    (dict(tool_choice={"type": "some"}), "tool_choice.type"),
    (dict(thinking={"type": "enabled", "budget_tokens": 0}), "thinking.budget_tokens"),
    (
        dict(output_config={"format": {"type": "json_schema", "schema": {"type": "what"}}}),
        "output_config.format: ",
    ),
    (dict(output_config={"effort": "huge"}), "output_config.effort"),
    (dict(output_config={"format": {"type": "json_schema"}}), "output_config.format.schema"),
    (
        dict(
            output_config={"format": {"type": "json_schema", "schema": {}}},
            output_format={"type": "json_schema", "schema": {}},
        ),
        "output_config.format and output_format",
    ),
]


@pytest.mark.parametrize(("body", "told"), BAD, ids=[f"{i}-{told}" for i, (_, told) in enumerate(BAD)])
def test_a_bad_field_is_named(server: Server, body: dict[str, Any], told: str) -> None:
    status, error = server.error(PATH, **dict(messages=[USER], max_tokens=4) | body)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert told in error["message"]


# ---- Anthropic's client ----


def test_the_client_of_anthropic(server: Server) -> None:
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        body: dict[str, Any] = {name: value for name, value in BODY.items() if name != "temperature"}
        body |= {"model": "demo", "extra_body": {"temperature": 0}}
        with client.messages.stream(**body) as events:
            parts = [event.partial_json for event in events if event.type == "input_json"]
            final = events.get_final_message()
        [call] = final.content
        assert call.type == "tool_use" and call.input == {"city": "Oslo"} == json.loads("".join(parts))
        assert final.stop_reason == "tool_use"
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": '{"sky":"rainy","degrees":3}'}
        history = [USER, {"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
        after = client.messages.create(**body | {"messages": history})
        assert after.content[0].type == "text" and "rainy" in after.content[0].text
