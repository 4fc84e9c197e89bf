"""Functions, forms of the text and reasoning in `/v1/responses`, with OpenAI's types and client as judges."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter

from jaxvllm.server.protocol.response_items import InputItem, messages_of
from jaxvllm.server.protocol.responses import ResponsesResponse
from tests.server.conftest import Server, events_of
from tests.server.judges import judge
from tests.server.scripted import TWO_CALLS, Says, Script

PATH = "/v1/responses"
OURS = "jaxvllm.server.protocol.response_events.ResponsesEvent"
THEIRS = "openai.types.responses.ResponseStreamEvent"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Returns the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
CLOCK: dict[str, Any] = {"type": "function", "name": "get_time", "parameters": None}
BODY: dict[str, Any] = dict(input="What is the weather in Oslo?", tools=[WEATHER, CLOCK], temperature=0)
THOUGHT = "<think>It is cold there.</think>\n\n" + TWO_CALLS


def whole(script: Script, **body: Any) -> Any:
    response, _ = script.post(PATH, **BODY | body)
    assert response.status_code == 200, response.text
    ResponsesResponse.model_validate(response.json())
    judge("openai.types.responses.Response").validate_python(response.json())
    return response.json()


def checked(events: list[Any]) -> list[Any]:
    """The data of events, after checking their order, their fields, and that the parts of a text amount to it."""
    texts: dict[str, str] = {}
    open_item = None
    for number, event in enumerate(events):
        data = event.data
        judge(OURS).validate_python(data)
        judge(THEIRS).validate_python(data)
        assert (event.name, data["sequence_number"]) == (data["type"], number)
        if data["type"] == "response.output_item.added":
            assert open_item is None, "two items are open"
            open_item = data["item"]["id"]
            texts[open_item] = ""
        elif "item_id" in data:
            assert data["item_id"] == open_item
            if data["type"].endswith(".delta"):
                texts[open_item] += data["delta"]
            elif data["type"].endswith((".output_text.done", ".reasoning_text.done")):
                assert texts[open_item] == data["text"]
            elif data["type"].endswith("arguments.done"):
                assert texts[open_item] == data["arguments"]
            elif data["type"].endswith("tool_call_input.done"):
                assert texts[open_item] == data["input"]
        elif data["type"] == "response.output_item.done":
            assert data["item"]["id"] == open_item
            open_item = None
    assert open_item is None
    return [event.data for event in events]


def stream(script: Script, **body: Any) -> list[Any]:
    response, _ = script.post(PATH, **BODY | body, stream=True)
    assert response.status_code == 200, response.text
    return checked(list(events_of(response.text)))


def said(output: Any) -> list[Any]:
    """Items without their ids."""
    shown = []
    for item in output:
        if item["type"] == "function_call":
            shown.append(("call", item["name"], json.loads(item["arguments"]), item["status"]))
        elif item["type"] == "custom_tool_call":
            shown.append(("custom", item["name"], item["input"], item["status"]))
        else:
            [part] = item["content"]
            shown.append((item["type"], part["text"], item["status"]))
    return shown


# ---- the demo model ----


def test_the_demo_model_calls_a_function_and_reads_its_result(server: Server) -> None:
    answer = server.answer(PATH, **BODY)
    [call] = answer["output"]
    assert said([call]) == [("call", "get_weather", {"city": "Oslo"}, "completed")]
    assert answer["status"] == "completed" and [tool["name"] for tool in answer["tools"]] == ["get_weather", "get_time"]
    streamed = checked(server.events(PATH, **BODY))[-1]["response"]["output"]
    assert said(streamed) == said([call])
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": '{"weather": "rainy"}'}
    history = [{"role": "user", "content": BODY["input"]}, call, result]
    [message] = server.answer(PATH, **BODY | {"input": history})["output"]
    assert message["type"] == "message" and message["content"][0]["text"]
    # It is the same prompt as that of a chat.
    function = {"name": call["name"], "arguments": call["arguments"]}
    chat = [
        {"role": "user", "content": BODY["input"]},
        {"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "x", "content": '{"weather": "rainy"}'},
    ]
    tools = [{"type": "function", "function": {k: v for k, v in one.items() if k != "type"}} for one in BODY["tools"]]
    other = server.answer("/v1/chat/completions", messages=chat, tools=tools, temperature=0)
    assert other["choices"][0]["message"]["content"] == message["content"][0]["text"]


# ---- what a model might say ----


@pytest.mark.parametrize("split", [list, lambda text: [text], lambda text: [text[:70], text[70:]]])
def test_calls_whole_and_streamed(says: Says, split: Callable[[str], list[str]]) -> None:
    answer = whole(says([TWO_CALLS]))
    text, *calls = said(answer["output"])
    assert (text[0], text[1].strip(), text[2]) == ("message", "I look.", "completed")
    assert calls == [("call", "get_weather", {"city": "Oslo"}, "completed"), ("call", "get_time", {}, "completed")]
    events = stream(says(split(TWO_CALLS)))
    assert said(events[-1]["response"]["output"]) == said(answer["output"])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    ids = [item["id"] for item in done]
    assert len(set(ids)) == 3 and ids[1].startswith("fc_") and len(done[1]["call_id"]) >= 9


@pytest.mark.parametrize("effort", [None, "none"])
def test_reasoning_is_an_item(says: Says, effort: str | None) -> None:
    options = {} if effort is None else {"reasoning": {"effort": effort}}
    answer = whole(says([THOUGHT], reasoning_parser="qwen3"), **options)
    kinds = [item["type"] for item in answer["output"]]
    assert kinds == ["reasoning"] * (effort is None) + ["message", "function_call", "function_call"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    events = stream(says(list(THOUGHT), reasoning_parser="qwen3"), **options)
    assert said(events[-1]["response"]["output"]) == said(answer["output"])
    if effort is None:
        assert answer["output"][0]["content"] == [{"type": "reasoning_text", "text": "It is cold there."}]
        assert "response.reasoning_text.delta" in {event["type"] for event in events}


def test_an_answer_that_ends_within_a_call(says: Says) -> None:
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os'
    answer = whole(says([text], finish_reason="length"))
    assert [(item["type"], item["status"]) for item in answer["output"]] == [("message", "incomplete")]
    assert answer["status"] == "incomplete"
    last = stream(says(list(text), finish_reason="length"))[-1]["response"]
    assert last["output"][0]["type"] == "function_call" and last["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"type": "function", "name": "get_weather"}, '{"city": "Os'),
        ("required", '[{"name": "get_weather", "parameters": {"city": "Os'),
    ],
)
def test_a_forced_call_that_is_cut_is_a_part_of_a_call(says: Says, choice: Any, text: str) -> None:
    for answer in (
        whole(says([text], finish_reason="length"), tool_choice=choice),
        stream(says(list(text), finish_reason="length"), tool_choice=choice)[-1]["response"],
    ):
        [item] = answer["output"]
        assert (item["type"], item["name"], item["arguments"]) == ("function_call", "get_weather", '{"city": "Os')
        assert (item["status"], answer["status"]) == ("incomplete", "incomplete")


def test_an_answer_of_nothing_is_an_empty_message(says: Says) -> None:
    for output in (whole(says([""]))["output"], stream(says([""]))[-1]["response"]["output"]):
        assert said(output) == [("message", "", "completed")]


def test_only_the_first_of_parallel_calls(says: Says) -> None:
    assert len(whole(says([TWO_CALLS]), parallel_tool_calls=False)["output"]) == 2
    assert len(stream(says(list(TWO_CALLS)), parallel_tool_calls=False)[-1]["response"]["output"]) == 2


@pytest.mark.parametrize(
    ("choice", "text", "call"),
    [
        ("required", '[{"name": "get_time", "parameters": {}}]', ("get_time", {})),
        ({"type": "function", "name": "get_weather"}, '{"city": "Bergen"}', ("get_weather", {"city": "Bergen"})),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]},
            '[{"name": "get_time", "parameters": {}}]',
            ("get_time", {}),
        ),
    ],
)
def test_a_choice_of_functions_forces_a_form(says: Says, choice: Any, text: str, call: Any) -> None:
    # As in OpenAI's API, the form of the text does not count where there is none.
    options = {"text": {"format": {"type": "json_object"}}}
    response, [request] = says([text]).post(PATH, **BODY, **options, tool_choice=choice)
    [item] = response.json()["output"]
    assert (item["name"], json.loads(item["arguments"])) == call
    assert response.json()["tool_choice"] == choice
    assert request.params.structured_outputs is not None and request.params.structured_outputs.json is not None


def test_no_functions_although_there_are_some(says: Says) -> None:
    assert [item["type"] for item in whole(says([TWO_CALLS]), tool_choice="none")["output"]] == ["message"]


@pytest.mark.parametrize(
    ("format", "form"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_object": True}),
        (
            {"type": "json_schema", "name": "a", "schema": {"type": "integer"}, "strict": True},
            {"json": '{"type": "integer"}'},
        ),
    ],
)
def test_the_form_of_the_text(says: Says, format: Any, form: Any) -> None:
    response, [request] = says(["5"]).post(PATH, input="Hello", text={"format": format})
    assert response.json()["text"] == {"format": format}
    given = request.params.structured_outputs
    assert form is None and given is None or given is not None and {k: getattr(given, k) for k in form} == form


def test_the_effort_is_a_variable_of_the_template(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = server.llm.reader
    assert reader.tokenizer is not None
    shown = reader.tokenizer.with_chat_template("{{ reasoning_effort }}|{{ enable_thinking }}|{{ other }}")
    monkeypatch.setattr(server.llm, "_reader", replace(reader, tokenizer=shown))
    for effort, prompt in ((None, "||5"), ("low", "low||5"), ("none", "none|False|5")):
        reasoning = {} if effort is None else {"reasoning": {"effort": effort}}
        # In a server of its own, because a server reads its template once.
        _, [asked] = Script(server, {}, ["a"]).post(PATH, input="a", chat_template_kwargs={"other": 5}, **reasoning)
        assert asked.prompt.text == prompt


# ---- conversations ----


def test_items_of_one_turn_are_one_message() -> None:
    items = TypeAdapter(list[InputItem]).validate_python(
        [
            {"role": "user", "content": "a"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": '{"x": 1}'},
            {"type": "function_call_output", "call_id": "2", "output": "two"},
            {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "one"}]},
            {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "3", "output": ""},
            {"role": "assistant", "content": "c"},
            {"role": "assistant", "content": "d"},
        ]
    )

    def text(value: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": value}]

    def call(id: str, name: str, arguments: str) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert messages_of(items) == [
        {"role": "user", "content": text("a")},
        {
            "role": "assistant",
            "reasoning": "hm",
            "content": text("b"),
            "tool_calls": [call("1", "f", "{}"), call("2", "g", '{"x": 1}')],
        },
        {"role": "tool", "tool_call_id": "2", "content": text("two"), "name": "g"},
        {"role": "tool", "tool_call_id": "1", "content": text("one"), "name": "f"},
        {"role": "assistant", "content": None, "tool_calls": [call("3", "f", "{}")]},
        {"role": "tool", "tool_call_id": "3", "content": text(""), "name": "f"},
        {"role": "assistant", "content": text("c")},
        {"role": "assistant", "content": text("d")},
    ]


def test_an_answer_goes_back_in_as_it_came(says: Says) -> None:
    answer = whole(says([THOUGHT], reasoning_parser="qwen3"))
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "x"}
        for item in answer["output"]
        if item["type"] == "function_call"
    ]
    history = [{"role": "user", "content": BODY["input"]}, *answer["output"], *results]
    response, [request] = says(["Cold."]).post(PATH, **BODY | {"input": history})
    assert response.status_code == 200, response.text
    assert '{"name": "get_weather", "arguments": {"city": "Oslo"}}' in request.prompt.text


# ---- refusals ----

ITEM = {"role": "user", "content": "a"}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
BAD: list[tuple[dict[str, Any], str]] = [
    (dict(input=[CALL | {"arguments": "{"}]), "input"),
    (dict(input=[{"type": "function_call", "call_id": "1", "arguments": "{}"}]), "input[0].name"),
    (dict(input=[{"type": "function_call_output", "call_id": "1"}]), "input[0].output"),
    (dict(input=[{"type": "custom_tool_call", "call_id": "1", "name": "f"}]), "input[0].input"),
    (dict(input=[{"type": "shell_call"}]), "input[0].type"),
    (dict(input=[ITEM, {"type": "reasoning", "summary": [5]}]), "input[1].summary[0]"),
    (dict(tools=[{"type": "hammer"}]), "tools[0].type"),
    (dict(tools=[{"type": "function"}]), "tools[0].name"),
    (dict(tools=[WEATHER | {"parameters": 5}]), "tools[0].parameters"),
    (dict(tools=[WEATHER] * 1025), "tools"),
    (dict(tool_choice="required"), "tool_choice"),
    (dict(tools=[WEATHER], tool_choice={"type": "function", "name": "g"}), "tool_choice"),
    (
        dict(
            tools=[WEATHER],
            tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]},
        ),
        "tool_choice.tools[0]",
    ),
    (dict(text={"format": {"type": "json_schema", "name": "a"}}), "text.format.schema"),
    (dict(text={"format": {"type": "json_schema", "name": "a", "schema": {"type": "what"}}}), "text.format"),
    (dict(tools=[WEATHER | {"parameters": {"type": "what"}}], tool_choice="required"), "tools"),
    (dict(text={"format": {"type": "yaml"}}), "text.format.type"),
    (dict(text={"format": {"type": "json_object"}}, structured_outputs={"regex": "a"}), "text.format"),
    (dict(reasoning={"effort": "huge"}), "reasoning.effort"),
    (dict(reasoning={"summary": "rhymed"}), "reasoning.summary"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[f"{i}-{param}" for i, (_, param) in enumerate(BAD)])
def test_a_bad_field_is_named(server: Server, body: dict[str, Any], param: str) -> None:
    status, error = server.error(PATH, **dict(input="Hello", max_output_tokens=4) | body)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)


# ---- OpenAI's client ----


class City(BaseModel):
    name: str
    country: str


def test_the_client_of_openai(server: Server) -> None:
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        body: dict[str, Any] = dict(model="demo", **BODY)
        with client.responses.stream(**body) as events:
            deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
            final = events.get_final_response()
        [call] = final.output
        assert call.type == "function_call" and "".join(deltas) == call.arguments
        assert call.parsed_arguments == {"city": "Oslo"}
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": '{"weather": "rainy"}'}
        own = {name: value for name, value in call.to_dict().items() if name != "parsed_arguments"}
        history: Any = [{"role": "user", "content": BODY["input"]}, own, result]
        assert client.responses.create(**body | {"input": history}).output_text
        parsed = client.responses.parse(
            model="demo", input="Name a city.", text_format=City, temperature=0, max_output_tokens=200
        )
        assert isinstance(parsed.output_parsed, City)
