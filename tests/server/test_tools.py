"""Tools, forms of the answer, and reasoning in `/v1/chat/completions`."""

import json
import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from jaxvllm.server.config import ServerConfig
from jaxvllm.server.protocol.chat_completions import ChatChunk, ChatResponse
from jaxvllm.text.chat_template import ChatTemplate
from tests.grammar.demo import compiled, takes
from tests.server.conftest import Server
from tests.server.judges import judge
from tests.server.scripted import TWO_CALLS, Says

PATH = "/v1/chat/completions"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
ASKED = [{"role": "user", "content": "What is the weather in Oslo?"}]
BODY: dict[str, Any] = dict(messages=ASKED, tools=[WEATHER, CLOCK], temperature=0)
NAMED = {"type": "function", "function": {"name": "get_weather"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
# What a whole message has beside its role and content, and a stream only where there is something.
NULLS = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))


def letters(text: str) -> list[str]:
    return list(text)


def functions(message: Any) -> list[tuple[str, Any]]:
    calls = message.get("tool_calls") or []
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def joined(chunks: list[Any]) -> tuple[dict[str, Any], str]:
    """The message that chunks amount to, by the contract of OpenAI's streams, and the finish_reason."""
    message: dict[str, Any] = {"role": None, "content": None}
    calls: list[dict[str, Any]] = []
    reasons = []
    for chunk in chunks:
        ChatChunk.model_validate(chunk)
        judge("openai.types.chat.ChatCompletionChunk").validate_python(chunk)
        for choice in chunk["choices"]:
            assert not any(reasons), "a chunk after the last"
            reasons.append(choice["finish_reason"])
            delta = choice["delta"]
            if "role" in delta:
                assert message["role"] is None, "a second role"
                message["role"] = delta["role"]
            for name in ("content", "reasoning", "reasoning_content"):
                if delta.get(name) is not None:
                    message[name] = (message.get(name) or "") + delta[name]
            for part in delta.get("tool_calls", []):
                if part["index"] == len(calls):
                    assert len(part["id"]) >= 9
                    assert part["type"] == "function"
                    assert part["function"]["name"]
                    calls.append({"id": part["id"], "type": "function", "function": dict(part["function"])})
                    continue
                assert part["index"] == len(calls) - 1, "a call that is not the last goes on"
                assert part.keys() == {"index", "function"}
                assert part["function"].keys() == {"arguments"}
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    assert reasons[-1]
    return message | ({"tool_calls": calls} if calls else {}), reasons[-1]


def without_ids(message: Any) -> Any:
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return {name: message.get(name) for name in ("role", "content", "reasoning", "reasoning_content")} | {
        "calls": calls
    }


# ---- the demo model ----


def test_the_demo_model_calls_a_tool(server: Server) -> None:
    answer = server.answer(PATH, **BODY)
    ChatResponse.model_validate(answer)
    judge("openai.types.chat.ChatCompletion").validate_python(answer)
    [choice] = answer["choices"]
    assert functions(choice["message"]) == [("get_weather", {"city": "Oslo"})]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    chunks = [event.data for event in server.events(PATH, **BODY)][:-1]
    message, reason = joined(chunks)
    assert without_ids(message) == without_ids(choice["message"])
    assert reason == "tool_calls"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_is_asked_for_has_no_other_form(server: Server, choice: Any) -> None:
    """`response_format` is the form of a text. OpenAI and vLLM take both fields, and clients send them."""
    body = BODY | dict(tool_choice=choice, parallel_tool_calls=False)
    messages = [
        server.answer(PATH, **body | more)["choices"][0]["message"] for more in ({}, {"response_format": JSON_SCHEMA})
    ]
    assert without_ids(messages[0]) == without_ids(messages[1])
    assert functions(messages[1]) == [("get_weather", {"city": "Oslo"})]
    bad = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "objekt"}}}]
    status, error = server.error(PATH, **body | dict(tools=bad, response_format=JSON_SCHEMA))
    assert (status, error["param"]) == (400, "tools")


def test_the_result_of_a_tool_goes_back(server: Server) -> None:
    message = server.answer(PATH, **BODY)["choices"][0]["message"]
    result = {
        "role": "tool",
        "tool_call_id": message["tool_calls"][0]["id"],
        "content": '{"sky":"rainy","degrees":3}',
    }
    answer = server.answer(PATH, **BODY | {"messages": [*ASKED, message, result]})
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "rainy" in answer["choices"][0]["message"]["content"]


def test_logprobs_stay_per_token(server: Server) -> None:
    body = BODY | dict(logprobs=True)
    [choice] = server.answer(PATH, **body)["choices"]
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert "".join(tokens).startswith('<tool_call>{"name": "get_weather"')
    chunks = [event.data for event in server.events(PATH, **body)][:-1]
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [entry["token"] for entry in streamed] == tokens
    assert functions(joined(chunks)[0]) == functions(choice["message"])


def test_the_client_of_openai(server: Server) -> None:
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(model="demo", **BODY).choices[0]
        [call] = whole.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
        strict = BODY | dict(tools=[WEATHER])
        with client.chat.completions.stream(model="demo", **strict) as stream:
            kinds = {event.type for event in stream}
            [choice] = stream.get_final_completion().choices
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert choice.message.tool_calls[0].function.parsed_arguments == {"city": "Oslo"}
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)


# ---- any model ----


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_text_and_two_calls(says: Says, size: int) -> None:
    script = says([TWO_CALLS[i : i + size] for i in range(0, len(TWO_CALLS), size)])
    whole = script.choice(PATH, **BODY)
    assert functions(whole["message"]) == [("get_weather", {"city": "Oslo"}), ("get_time", {})]
    assert (whole["message"]["content"], whole["finish_reason"]) == ("I look.", "tool_calls")
    chunks = script.chunks(PATH, **BODY)
    message, reason = joined(chunks)
    assert (without_ids(message), reason) == (without_ids(whole["message"]), "tool_calls")
    if size == 1:
        arguments = [part for chunk in chunks for part in chunk["choices"][0]["delta"].get("tool_calls", [])]
        assert len(arguments) > 3, "the arguments come as the model writes them"


def test_openais_helper_accumulates_the_same_message(says: Says) -> None:
    script = says(letters(TWO_CALLS))
    clock = {"type": "function", "function": CLOCK["function"] | {"strict": True}}
    body = BODY | dict(tools=[WEATHER, clock])
    [choice] = script.openai_stream(**body)["choices"]
    assert without_ids(choice["message"])["calls"][0]["name"] == "get_weather"
    assert functions(choice["message"]) == functions(script.choice(PATH, **body)["message"])
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I look.", "tool_calls")


def test_only_the_first_call_without_parallel_calls(says: Says) -> None:
    script = says(letters(TWO_CALLS))
    body = BODY | dict(parallel_tool_calls=False)
    first = [("get_weather", {"city": "Oslo"})]
    assert functions(script.choice(PATH, **body)["message"]) == first
    assert functions(joined(script.chunks(PATH, **body))[0]) == first


@pytest.mark.parametrize("text", ["Cold.", "", "<tool_call>oops</tool_call>", '{"city": "Oslo"}', "a <tool_"])
def test_an_answer_without_a_call_is_content(says: Says, text: str) -> None:
    script = says(letters(text) or [""])
    choice = script.choice(PATH, **BODY)
    assert choice["message"] == {"role": "assistant", "content": text} | NULLS
    message, reason = joined(script.chunks(PATH, **BODY))
    assert (message["content"] or "", reason, choice["finish_reason"]) == (text, "stop", "stop")


def test_a_call_that_breaks_is_content_of_a_whole_answer(says: Says) -> None:
    """A stream has shown its beginning by then. It says nothing twice, and does not end as if it had a call."""
    text = '<tool_call>{"name": "get_time", "arguments": {"a": }}</tool_call>'
    script = says(letters(text))
    choice = script.choice(PATH, **BODY)
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in choice["message"]
    message, reason = joined(script.chunks(PATH, **BODY))
    assert reason == "stop"
    assert message["content"] == "}}</tool_call>"


def test_a_cut_answer_says_so(says: Says) -> None:
    """Its calls before the cut are whole."""
    script = says(letters(TWO_CALLS[:-30]), finish_reason="length")
    choice = script.choice(PATH, **BODY)
    assert (functions(choice["message"]), choice["finish_reason"]) == ([("get_weather", {"city": "Oslo"})], "length")
    assert joined(script.chunks(PATH, **BODY))[1] == "length"


def test_without_tools_nothing_is_searched_for(says: Says) -> None:
    script = says(letters(TWO_CALLS))
    for body in (dict(messages=ASKED), BODY | dict(tool_choice="none"), BODY | dict(tools=[])):
        assert script.choice(PATH, **body)["message"]["content"] == TWO_CALLS


FORMATS = {
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
    "pythonic": "[get_weather(city='Oslo')]",
    "qwen3_coder": "<tool_call><function=get_weather><parameter=city>Oslo</parameter></function></tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>',
    "openai": '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Oslo"}',
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_parser_is_an_option_of_the_server(says: Says, name: str) -> None:
    script = says(letters(FORMATS[name]), options={"tool_call_parser": name})
    whole = script.choice(PATH, **BODY)["message"]
    assert functions(whole) == [("get_weather", {"city": "Oslo"})]
    assert without_ids(joined(script.chunks(PATH, **BODY))[0]) == without_ids(whole)


def test_the_choice_may_be_kept_from_the_model(says: Says) -> None:
    script = says([TWO_CALLS], options={"enable_auto_tool_choice": False})
    response, _ = script.post(PATH, **BODY)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")
    assert script.choice(PATH, **BODY | dict(tool_choice="none"))["message"]["content"] == TWO_CALLS


def test_a_template_that_shows_no_format_needs_the_option(says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChatTemplate, "source_with_tools", "{{ messages }}")
    script = says(["Cold."], options={"access_log": True})  # of its own, because a server reads the template once
    response, _ = script.post(PATH, **BODY)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert "--tool-call-parser" in response.json()["error"]["message"]
    assert script.choice(PATH, **BODY | dict(tool_choice="none"))["message"]["content"] == "Cold."


def test_a_parser_must_be_known() -> None:
    with pytest.raises(ValueError, match=r"tool_call_parser must be auto or one of .*hermes.*, not 'x'"):
        ServerConfig(tool_call_parser="x")


def test_special_tokens_are_seen_where_they_are_marks(says: Says) -> None:
    """In the demo model's vocabulary <|end|> is special, as it is in harmony."""
    for parser, skips in (("hermes", True), ("openai", False)):
        script = says(["hello"], options={"tool_call_parser": parser})
        _, [request] = script.post(PATH, **BODY)
        assert request.params.skip_special_tokens is skips


# ---- the older form: functions ----

FUNCTIONS: dict[str, Any] = dict(messages=ASKED, functions=[WEATHER["function"], CLOCK["function"]], temperature=0)


def joined_function(chunks: list[Any]) -> tuple[dict[str, Any], str]:
    """The message that chunks amount to, and the finish_reason."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for chunk in chunks:
        ChatChunk.model_validate(chunk)
        judge("openai.types.chat.ChatCompletionChunk").validate_python(chunk)
        [choice] = chunk["choices"]
        delta = choice["delta"]
        assert "tool_calls" not in delta
        if delta.get("content") is not None:
            message["content"] = (message["content"] or "") + delta["content"]
        if (part := delta.get("function_call")) is None:
            continue
        if "function_call" in message:
            assert part.keys() == {"arguments"}
            message["function_call"]["arguments"] += part["arguments"]
        else:
            message["function_call"] = dict(part)
    return message, choice["finish_reason"]


def test_the_demo_model_calls_a_function(server: Server) -> None:
    answer = server.answer(PATH, **FUNCTIONS)
    ChatResponse.model_validate(answer)
    judge("openai.types.chat.ChatCompletion").validate_python(answer)
    [choice] = answer["choices"]
    message, call = choice["message"], choice["message"]["function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Oslo"})
    assert (message["content"], choice["finish_reason"]) == (None, "function_call")
    assert "tool_calls" not in message
    # It is the call that the same tools get.
    [as_tool] = server.answer(PATH, **BODY)["choices"][0]["message"]["tool_calls"]
    assert as_tool["function"] == call
    chunks = [event.data for event in server.events(PATH, **FUNCTIONS)][:-1]
    streamed, reason = joined_function(chunks)
    assert NULLS | streamed == message
    assert reason == "function_call"
    result = {"role": "function", "name": "get_weather", "content": '{"sky":"rainy","degrees":3}'}
    last = server.answer(PATH, **FUNCTIONS | {"messages": [*ASKED, message, result]})["choices"][0]
    assert last["finish_reason"] == "stop" and "rainy" in last["message"]["content"]


def test_functions_are_tools_of_which_one_is_called(says: Says) -> None:
    script = says(letters(TWO_CALLS))
    [prompt, same] = [script.post(PATH, **body)[1][0].prompt.text for body in (FUNCTIONS, BODY)]
    assert prompt == same
    call = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    whole = script.choice(PATH, **FUNCTIONS)
    assert json.loads(whole["message"]["function_call"]["arguments"]) == json.loads(call["arguments"])
    assert (whole["message"]["content"], whole["finish_reason"]) == ("I look.", "function_call")
    streamed, reason = joined_function(script.chunks(PATH, **FUNCTIONS))
    assert NULLS | streamed == whole["message"] and reason == "function_call"
    assert script.choice(PATH, **FUNCTIONS, function_call="none")["message"]["content"] == TWO_CALLS
    with_auto = script.choice(PATH, **FUNCTIONS, function_call="auto")
    assert with_auto["message"]["function_call"] == whole["message"]["function_call"]


def test_a_named_function(says: Says) -> None:
    script = says(letters('{"city": "Oslo"}'))
    body = FUNCTIONS | dict(function_call={"name": "get_weather"})
    response, [request] = script.post(PATH, **body, response_format=JSON_SCHEMA)
    [choice] = response.json()["choices"]
    assert choice["message"]["function_call"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert choice["finish_reason"] == "function_call"
    assert json.loads(request.params.structured_outputs.json) == WEATHER["function"]["parameters"]
    assert joined_function(script.chunks(PATH, **body))[0]["function_call"] == choice["message"]["function_call"]


def test_the_client_of_openai_knows_functions(server: Server) -> None:
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        [choice] = client.chat.completions.create(model="demo", **FUNCTIONS).choices
        assert json.loads(choice.message.function_call.arguments) == {"city": "Oslo"}


OBJEKT = [{"name": "f", "parameters": {"type": "objekt"}}]
BAD_FUNCTIONS: list[tuple[dict[str, Any], str]] = [
    (dict(tools=[CLOCK]), "functions"),
    (dict(tool_choice="auto"), "functions"),
    (dict(functions=None, function_call="auto", tools=[CLOCK]), "function_call"),
    (dict(functions=None, function_call={"name": "get_time"}), "function_call"),
    (dict(function_call={"name": "get_rain"}), "function_call"),
    (dict(function_call="required"), "function_call"),
    (dict(function_call={}), "function_call"),
    (dict(functions=[CLOCK]), "functions[0].name"),
    (dict(functions=[{"name": "f"}] * 1025), "functions"),
    (dict(functions=OBJEKT, function_call={"name": "f"}), "functions"),
    (dict(function_call={"name": "get_time"}, structured_outputs={"json": SCHEMA}), "structured_outputs"),
    (dict(messages=[*ASKED, {"role": "function", "content": "3"}]), "messages[1].name"),
]


@pytest.mark.parametrize(
    ("body", "param"), BAD_FUNCTIONS, ids=[f"{i}-{param}" for i, (_, param) in enumerate(BAD_FUNCTIONS)]
)
def test_a_bad_field_of_the_older_form_is_named(server: Server, body: dict[str, Any], param: str) -> None:
    status, error = server.error(PATH, **FUNCTIONS | body)
    assert (status, error["param"]) == (400, param)
    assert param in error["message"]


# ---- answers that must be a call ----


@pytest.mark.parametrize("size", [1, 1000])
def test_required_calls(says: Says, size: int) -> None:
    text = '[{"name": "get_weather", "parameters": {"city": "Oslo"}}, {"name": "get_time", "parameters": {}}]'
    script = says([text[i : i + size] for i in range(0, len(text), size)])
    body = BODY | dict(tool_choice="required")
    whole = script.choice(PATH, **body)
    assert functions(whole["message"]) == [("get_weather", {"city": "Oslo"}), ("get_time", {})]
    assert (whole["message"]["content"], whole["finish_reason"]) == (None, "tool_calls")
    message, reason = joined(script.chunks(PATH, **body))
    assert (without_ids(message), reason) == (without_ids(whole["message"]), "tool_calls")


def test_a_required_call_forces_a_schema(says: Says) -> None:
    _, [request] = says(["[]"]).post(PATH, **BODY | dict(tool_choice="required"))
    assert request.params.structured_outputs is not None
    schema = json.loads(request.params.structured_outputs.json)
    assert schema["minItems"] == 1
    accepts = Draft202012Validator(schema).is_valid
    assert accepts([{"name": "get_weather", "parameters": {"city": "Oslo"}}, {"name": "get_time", "parameters": {}}])
    assert not accepts([])
    assert not accepts([{"name": "get_weather", "parameters": {"city": 5}}])
    assert not accepts([{"name": "get_rain", "parameters": {}}])
    assert not accepts([{"name": "get_time"}])
    two = [{"name": "get_time", "parameters": {}}] * 2
    assert accepts(two)
    _, [request] = says(["[]"]).post(PATH, **BODY | dict(tool_choice="required", parallel_tool_calls=False))
    accepts = Draft202012Validator(json.loads(request.params.structured_outputs.json)).is_valid
    assert accepts(two[:1])
    assert not accepts(two)


def test_schemas_of_tools_keep_their_definitions(says: Says) -> None:
    def tool(name: str, kind: str) -> dict[str, Any]:
        parameters = {"properties": {"a": {"$ref": "#/$defs/t"}}, "$defs": {"t": {"type": kind}}}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    script = says(["[]"])
    body = dict(messages=ASKED, tool_choice="required")
    _, [request] = script.post(PATH, **body, tools=[tool("f", "string"), tool("g", "string")])
    accepts = Draft202012Validator(json.loads(request.params.structured_outputs.json)).is_valid
    assert accepts([{"name": "g", "parameters": {"a": "x"}}])
    assert not accepts([{"name": "g", "parameters": {"a": 1}}])
    # Two tools may define different schemas by one name.
    _, [request] = script.post(PATH, **body, tools=[tool("f", "string"), tool("g", "integer")])
    accepts = Draft202012Validator(json.loads(request.params.structured_outputs.json)).is_valid
    assert accepts([{"name": "f", "parameters": {"a": "x"}}, {"name": "g", "parameters": {"a": 1}}])
    assert not accepts([{"name": "g", "parameters": {"a": "x"}}])


TREE = {"properties": {"v": {"type": "integer"}, "l": {"$ref": "#"}}, "required": ["v"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("parameters", "given", "wrong"),
    [
        (TREE, {"v": 1, "l": {"v": 2}}, {"v": 1, "l": {"name": "f"}}),
        (TREE | {"$id": "https://x/tree"}, {"v": 1, "l": {"v": 2}}, {"v": 1, "l": {"w": 2}}),
        (
            {"properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "integer"}}},
            {"a": 1},
            {"a": "x"},
        ),
        (
            {"properties": {"a": {"$ref": "#/definitions/t"}}, "definitions": {"t": {"type": "null"}}},
            {"a": None},
            {"a": 0},
        ),
        # A value that looks like a reference is none, nor is a property of that name.
        ({"properties": {"a": {"const": {"$ref": "#"}}}}, {"a": {"$ref": "#"}}, {"a": {"$ref": "#/$defs/tool0"}}),
        ({"properties": {"$ref": {"type": "string"}}}, {"$ref": "#"}, {"$ref": 5}),
    ],
)
def test_references_lead_to_the_schema_of_their_own_tool(
    says: Says, parameters: dict[str, Any], given: Any, wrong: Any
) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("e", "f")]
    _, [request] = says(["[]"]).post(PATH, messages=ASKED, tool_choice="required", tools=tools)
    schema = request.params.structured_outputs.json
    accepts, grammar = Draft202012Validator(json.loads(schema)).is_valid, compiled(json=schema, lenient=True)
    for arguments, is_right in ((given, True), (wrong, False)):
        calls = [{"name": "f", "parameters": arguments}]
        assert accepts(calls) == takes(grammar, json.dumps(calls)) == is_right


UNENFORCED = [
    {"propertyNames": {"pattern": "^a"}},
    {"properties": {"a": {"type": "array", "uniqueItems": True}}},
    {"properties": {"a": {"not": {"type": "string"}}}},
    {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
    {"properties": {"a": {"type": "array", "contains": {"type": "null"}}}},
    {"dependentRequired": {"a": ["b"]}},
    {"properties": {"a": {"type": "string", "format": "color"}}},
    {"properties": {"a": {"type": "string", "pattern": "^(?!x)"}}},
    {"properties": {"a": {"type": "integer", "maximum": 10**30}}},
]


@pytest.mark.parametrize("rule", UNENFORCED, ids=[next(iter(rule)) + str(i) for i, rule in enumerate(UNENFORCED)])
def test_only_strict_tools_are_refused_for_what_cannot_be_enforced(server: Server, rule: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"z": {"type": "null"}}} | rule
    body = BODY | dict(tool_choice=NAMED, max_tokens=64)

    def tools(strict: bool | None) -> list[Any]:
        return [{"type": "function", "function": {"name": "get_weather", "parameters": parameters, "strict": strict}}]

    free = server.post(PATH, **body | dict(tools=tools(None)))
    assert free.status_code == 200, free.text
    warned = free.headers["x-warnings"]
    strict, error = server.error(PATH, **body | dict(tools=tools(True)))
    assert strict == 400 and 'the keyword "' in error["message"]
    assert any(f'keyword \\"{word}' in warned for word in re.findall(r'the keyword "([^":]+)', error["message"]))


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_that_is_cut_is_a_part_of_a_call(says: Says, choice: Any, stream: bool) -> None:
    text = '{"city": "Os' if choice == NAMED else '[{"name": "get_weather", "parameters": {"city": "Os'
    script, body = says(letters(text), finish_reason="length"), BODY | dict(tool_choice=choice)
    if stream:
        message, reason = joined(script.chunks(PATH, **body))
    else:
        chosen = script.choice(PATH, **body)
        message, reason = chosen["message"], chosen["finish_reason"]
    [call] = message["tool_calls"]
    assert (call["function"], reason) == ({"name": "get_weather", "arguments": '{"city": "Os'}, "length")
    assert not message["content"]


def test_a_named_tool(says: Says) -> None:
    script = says(letters('{"city": "Oslo"}'))
    body = BODY | dict(tool_choice=NAMED)
    whole = script.choice(PATH, **body)
    assert functions(whole["message"]) == [("get_weather", {"city": "Oslo"})]
    assert whole["finish_reason"] == "tool_calls"
    assert without_ids(joined(script.chunks(PATH, **body))[0]) == without_ids(whole["message"])
    _, [request] = script.post(PATH, **body)
    assert json.loads(request.params.structured_outputs.json) == WEATHER["function"]["parameters"]


HELLO = [{"role": "user", "content": "Hello!"}]


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_the_demo_model_must_call_a_tool(server: Server, choice: Any) -> None:
    """Even where it would not."""
    body = dict(messages=HELLO, tools=[WEATHER], tool_choice=choice, temperature=0, parallel_tool_calls=False)
    [whole] = server.answer(PATH, **body)["choices"]
    [(name, arguments)] = functions(whole["message"])
    assert (name, list(arguments), whole["finish_reason"]) == ("get_weather", ["city"], "tool_calls")
    message, reason = joined([event.data for event in server.events(PATH, **body)][:-1])
    assert (without_ids(message), reason) == (without_ids(whole["message"]), "tool_calls")


def test_the_demo_model_keeps_to_a_response_format(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    given = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    [choice] = server.answer(PATH, messages=HELLO, response_format=given, temperature=0, max_tokens=60)["choices"]
    assert json.loads(choice["message"]["content"])["a"] in (1, 2)


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, ("json_object", True)),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}, ("json", SCHEMA)),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, ("json_object", True)),
        (
            {"type": "structural_tag", "triggers": ["<a"], "structures": []},
            ("structural_tag", {"type": "structural_tag", "triggers": ["<a"], "structures": []}),
        ),
    ],
)
def test_a_response_format_is_a_form_of_the_output(says: Says, given: Any, form: Any) -> None:
    script = says(["{}"])
    for path, body in ((PATH, dict(messages=ASKED)), ("/v1/completions", dict(prompt="a"))):
        response, [request] = script.post(path, **body, response_format=given)
        assert response.status_code == 200, response.text
        asked = request.params.structured_outputs
        if form is None:
            assert asked is None
        else:
            kind, value = form
            told = getattr(asked, kind)
            assert (asked.kind, json.loads(told) if isinstance(told, str) else told) == (kind, value)


JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
BAD: list[tuple[dict[str, Any], str]] = [
    (dict(tools=[{"type": "custom", "custom": {"name": "f"}}]), "tools[0].type"),
    (dict(tools=[{"type": "function"}]), "tools[0].function"),
    (dict(tools=[{"type": "function", "function": {"name": ""}}]), "tools[0].function.name"),
    (dict(tools=[{"type": "function", "function": {"name": "f", "parameters": 5}}]), "tools[0].function.parameters"),
    (dict(tools=[CLOCK] * 1025), "tools"),
    (dict(tools=None, tool_choice="required"), "tool_choice"),
    (dict(tools=[], tool_choice=NAMED), "tool_choice"),
    (dict(tool_choice={"type": "function", "function": {"name": "get_rain"}}), "tool_choice"),
    (dict(tool_choice="always"), "tool_choice"),
    (dict(tool_choice={"type": "function"}), "tool_choice"),
    (dict(reasoning_effort="heavy"), "reasoning_effort"),
    (dict(response_format={"type": "xml"}), "response_format.type"),
    (dict(response_format={"type": "json_schema"}), "response_format.json_schema"),
    (dict(response_format={"type": "json_schema", "json_schema": {}}), "response_format.json_schema.name"),
    (dict(response_format=JSON_SCHEMA, structured_outputs={"json": SCHEMA}), "response_format"),
    (dict(structured_outputs={"json": SCHEMA}, tool_choice=NAMED), "structured_outputs"),
]


def test_a_call_that_is_forced_has_its_own_form(says: Says) -> None:
    """As in OpenAI's API: the form of the text does not count where there is none."""
    script = says(['{"city": "Oslo"}'])
    response, [request] = script.post(PATH, **BODY, tool_choice=NAMED, response_format=JSON_SCHEMA)
    assert functions(response.json()["choices"][0]["message"]) == [("get_weather", {"city": "Oslo"})]
    assert "city" in request.params.structured_outputs.json


@pytest.mark.parametrize(("body", "param"), BAD, ids=[f"{i}-{param}" for i, (_, param) in enumerate(BAD)])
def test_a_bad_field_is_named(server: Server, body: dict[str, Any], param: str) -> None:
    status, error = server.error(PATH, **BODY | body)
    assert (status, error["param"]) == (400, param)
    assert param in error["message"]


def test_a_schema_that_cannot_be_enforced_is_an_error_of_the_field_that_has_it(server: Server) -> None:
    schema = {"type": "objekt"}
    given = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    for body, param in (
        (dict(response_format=given), "response_format"),
        (dict(tools=tools, tool_choice="required"), "tools"),
        (dict(structured_outputs={"json": schema}), "structured_outputs"),
    ):
        status, error = server.error(PATH, messages=ASKED, **body)
        assert (status, error["param"]) == (400, param)
        assert error["message"].startswith(("structured_outputs", "json") if param == "structured_outputs" else param)
    status, error = server.error("/v1/completions", prompt="a", response_format=given)
    assert (status, error["param"]) == (400, "response_format")


# ---- reasoning ----

THOUGHT = "<think>\nOslo is far north.\n</think>\n\nIt is cold."


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_reasoning_is_split_off(says: Says, size: int) -> None:
    parts = [THOUGHT[i : i + size] for i in range(0, len(THOUGHT), size)]
    script = says(parts, reasoning_parser="qwen3")
    whole = script.choice(PATH, messages=ASKED)["message"]
    assert whole["content"] == "\n\nIt is cold."
    assert whole["reasoning"] == whole["reasoning_content"] == "\nOslo is far north.\n"
    assert NULLS | joined(script.chunks(PATH, messages=ASKED))[0] == whole


def test_reasoning_may_be_left_out(says: Says) -> None:
    script = says(letters(THOUGHT), reasoning_parser="qwen3")
    for body in (dict(include_reasoning=False), dict(reasoning_effort="none")):
        message = script.choice(PATH, messages=ASKED, **body)["message"]
        assert message == {"role": "assistant", "content": "\n\nIt is cold."} | NULLS
        assert joined(script.chunks(PATH, messages=ASKED, **body))[0] == {
            "role": "assistant",
            "content": "\n\nIt is cold.",
        }


def test_without_a_parser_reasoning_is_content(says: Says) -> None:
    assert says([THOUGHT]).choice(PATH, messages=ASKED)["message"]["content"] == THOUGHT


def test_reasoning_before_a_call(says: Says) -> None:
    text = "They ask.</think>\n\n" + TWO_CALLS.removeprefix("I look.")
    script = says(letters(text), reasoning_parser="deepseek_r1")
    whole = script.choice(PATH, **BODY)["message"]
    assert (whole["reasoning"], whole["content"]) == ("They ask.", None)
    assert functions(whole) == [("get_weather", {"city": "Oslo"}), ("get_time", {})]
    assert without_ids(joined(script.chunks(PATH, **BODY))[0]) == without_ids(whole)
    forced = says(letters('They ask.</think>\n{"city": "Oslo"}'), reasoning_parser="deepseek_r1")
    whole = forced.choice(PATH, **BODY | dict(tool_choice=NAMED))["message"]
    assert (whole["reasoning"], functions(whole)) == ("They ask.", [("get_weather", {"city": "Oslo"})])


def test_reasoning_that_does_not_end(says: Says) -> None:
    script = says(["<think>It is", " so"], finish_reason="length", reasoning_parser="qwen3")
    choice = script.choice(PATH, messages=ASKED)
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == (None, "It is so")
    assert choice["finish_reason"] == "length"


def test_draft_spans_are_what_the_model_wrote(says: Says) -> None:
    parts = ["<think>", "It is", " cold.</think>", "Yes", "."]
    script = says(parts, reasoning_parser="qwen3")
    chunks = script.chunks(PATH, messages=ASKED, stream_options={"include_draft_spans": True})
    for chunk in chunks:
        ChatChunk.model_validate(chunk)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "draft_spans" not in choices[0]  # which only begins the message
    told = [{"text": text, "accepted": number % 2 == 1} for number, text in enumerate(parts)]
    assert [choice["draft_spans"] for choice in choices[1:]] == [[span] for span in told]
    completed = script.chunks("/v1/completions", prompt="a", stream_options={"include_draft_spans": True})
    assert [chunk["choices"][0]["draft_spans"] for chunk in completed] == [[span] for span in told]
    for path, body in ((PATH, dict(messages=ASKED)), ("/v1/completions", dict(prompt="a"))):
        plain = script.chunks(path, **body, stream_options={"include_usage": True})
        assert not any("draft_spans" in choice for chunk in plain for choice in chunk["choices"])


def test_tokens_of_reasoning_are_counted(says: Says) -> None:
    script = says(letters(THOUGHT), reasoning_parser="qwen3")
    usage = script.post(PATH, messages=ASKED)[0].json()["usage"]
    details = usage["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] < usage["completion_tokens"]
    *_, last = script.chunks(PATH, messages=ASKED, stream_options={"include_usage": True})
    assert last["usage"]["completion_tokens_details"] == details
    assert "completion_tokens_details" not in says(["a"]).post(PATH, messages=ASKED)[0].json()["usage"]


def test_effort_is_a_variable_of_the_template(says: Says) -> None:
    """The demo model's template has no such variable, so it renders alike; a wrong name would be an error."""
    script = says(["a"])
    prompts = [
        script.post(PATH, messages=ASKED, reasoning_effort=effort)[1][0].prompt.text for effort in (None, "low", "high")
    ]
    assert len(set(prompts)) == 1
