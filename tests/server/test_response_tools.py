"""Namespaces, custom tools and tools of OpenAI's servers in `/v1/responses`."""

import json
import logging
from typing import Any

import pytest

from jaxvllm.core.structured_outputs import StructuredOutputsParams
from tests.server.conftest import Server
from tests.server.scripted import Says
from tests.server.test_response_items import PATH, WEATHER, checked, said, stream, whole

PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** " ("add" | "delete") "\\n"'},
}
CODE: dict[str, Any] = {"type": "custom", "name": "run_code"}
AGENTS: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [WEATHER | {"strict": False}, {"type": "function", "name": "stop", "defer_loading": True}, CODE],
}
HOSTED: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": True},
    {"type": "image_generation"},
    {"type": "mcp", "server_label": "a", "server_url": "https://example.com"},
    {"type": "tool_search"},
]
TOOLS = [WEATHER, PATCH, AGENTS, *HOSTED]
SHAPED = {"tools": TOOLS, "input": "Go on."}


def called(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.mark.parametrize("split", [list, lambda text: [text], lambda text: [text[:55], text[55:]]])
def test_calls_whole_and_streamed(says: Says, split: Any) -> None:
    patch = '*** add\n"é\\n\U0001f600'
    text = "\n".join(
        [
            called("apply_patch", {"input": patch}),
            called("agents__stop", {}),
            called("agents__run_code", {"input": "1"}),
        ]
    )
    answer = whole(says([text]), **SHAPED)
    assert said(answer["output"]) == [
        ("custom", "apply_patch", patch, "completed"),
        ("call", "stop", {}, "completed"),
        ("custom", "run_code", "1", "completed"),
    ]
    assert [item.get("namespace") for item in answer["output"]] == [None, "agents", "agents"]
    assert [item["id"].partition("_")[0] for item in answer["output"]] == ["ctc", "fc", "ctc"]
    events = stream(says(split(text)), **SHAPED)
    last = events[-1]["response"]
    assert said(last["output"]) == said(answer["output"])
    assert [item.get("namespace") for item in last["output"]] == [None, "agents", "agents"]
    done = [event["input"] for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert done == [patch, "1"]


def test_tools_come_back_as_they_were_sent(says: Says) -> None:
    answer = whole(says(["a"]), **SHAPED)
    assert answer["tools"] == TOOLS


def test_the_model_is_told_of_what_the_client_runs(says: Says) -> None:
    response, [request] = says(["a"]).post(PATH, **SHAPED)
    assert response.status_code == 200, response.text
    prompt = request.prompt.text
    for told in ("agents__get_weather", "agents__run_code", "Other agents.", "lark grammar", "apply_patch(input)"):
        assert told in prompt
    assert "web_search" not in prompt and "tool_search" not in prompt


def test_the_log_says_once_what_is_ignored(says: Says, caplog: pytest.LogCaptureFixture) -> None:
    script = says(["a"])
    with caplog.at_level(logging.INFO, "jaxvllm.server.service"):
        for _ in range(2):
            script.post(PATH, input="a", tools=[{"type": "computer"}])
    assert [record.getMessage().split(" cannot")[0] for record in caplog.records] == ["tools of type computer"]


def test_calls_and_results_go_back_in(says: Says) -> None:
    text = "\n".join([called("apply_patch", {"input": "*** add\n"}), called("agents__stop", {})])
    answer = whole(says([text]), **SHAPED)
    results = [
        {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "done"} for item in answer["output"]
    ]
    history = [{"role": "user", "content": "Go on."}, *answer["output"], *results]
    response, [request] = says(["Fine."]).post(PATH, **SHAPED | {"input": history})
    assert response.status_code == 200, response.text
    assert '{"name": "apply_patch", "arguments": {"input": "*** add\\n"}}' in request.prompt.text
    assert '{"name": "agents__stop", "arguments": {}}' in request.prompt.text
    assert request.prompt.text.count("done") == 2


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "name": "apply_patch"}])
def test_the_grammar_of_a_forced_tool_is_the_form_of_the_answer(server: Server, choice: Any) -> None:
    tools = [PATCH] if choice == "required" else TOOLS
    body: dict[str, Any] = dict(input="Go on.", tools=tools, tool_choice=choice, temperature=0)
    answer = server.answer(PATH, **body)
    [item] = answer["output"]
    assert (item["type"], item["name"], item["status"]) == ("custom_tool_call", "apply_patch", "completed")
    assert item["input"] in ("*** add\n", "*** delete\n")
    assert answer["tool_choice"] == choice
    assert said(checked(server.events(PATH, **body))[-1]["response"]["output"]) == said([item])


def test_a_forced_input_that_is_cut(server: Server) -> None:
    asked: dict[str, Any] = dict(input="Go on.", tools=[PATCH], tool_choice="required", temperature=0)
    body = asked | dict(max_output_tokens=2)
    answer = server.answer(PATH, **body)
    assert answer["status"] == "incomplete"
    [(kind, name, text, status)] = said(answer["output"])
    [(_, _, whole_text, _)] = said(server.answer(PATH, **asked)["output"])
    assert (kind, name, status) == ("custom", "apply_patch", "incomplete")
    assert text and text != whole_text and whole_text.startswith(text)
    assert said(checked(server.events(PATH, **body))[-1]["response"]["output"]) == said(answer["output"])


def test_reasoning_comes_before_a_forced_input(says: Says) -> None:
    text = "<think>Hm.</think>*** add\n"
    choice = {"type": "custom", "name": "apply_patch"}
    answer = whole(says([text], reasoning_parser="qwen3"), **SHAPED, tool_choice=choice)
    last = stream(says(list(text), reasoning_parser="qwen3"), **SHAPED, tool_choice=choice)[-1]["response"]
    for output in (answer["output"], last["output"]):
        assert said(output) == [("reasoning", "Hm.", "completed"), ("custom", "apply_patch", "*** add\n", "completed")]


REGEX = PATCH | {"name": "digits", "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]{2}"}}


@pytest.mark.parametrize(
    ("tools", "choice", "form"),
    [
        ([REGEX], {"type": "custom", "name": "digits"}, StructuredOutputsParams(regex="[0-9]{2}")),
        ([REGEX, CODE], "required", '"pattern": "^(?:[0-9]{2})$"'),
        ([CODE], {"type": "custom", "name": "run_code"}, '"input": {"type": "string"'),
        ([AGENTS], {"type": "function", "name": "get_weather"}, '"city"'),
        ([AGENTS], {"type": "function", "name": "agents__get_weather"}, '"city"'),
        (
            [PATCH, WEATHER, {"type": "web_search"}],
            {"type": "allowed_tools", "mode": "auto", "tools": HOSTED[:1]},
            None,
        ),
    ],
)
def test_the_form_that_a_choice_asks_for(says: Says, tools: Any, choice: Any, form: Any) -> None:
    response, [request] = says(["a"]).post(PATH, input="a", tools=tools, tool_choice=choice)
    assert response.status_code == 200, response.text
    given = request.params.structured_outputs
    if isinstance(form, str):
        assert given is not None and given.json is not None and form in given.json
    else:
        assert given == form


NAMED: dict[str, Any] = {"type": "custom", "name": "apply_patch"}
BAD: list[tuple[dict[str, Any], str]] = [
    (dict(tools=TOOLS, tool_choice={"type": "web_search"}), "tool_choice"),
    (dict(tools=TOOLS, tool_choice={"type": "mcp", "server_label": "a"}), "tool_choice"),
    (dict(tools=HOSTED, tool_choice="required"), "tool_choice"),
    (dict(tools=TOOLS, tool_choice="required"), "tool_choice"),  # a grammar, and others beside it
    (dict(tools=TOOLS, tool_choice={"type": "function", "name": "apply_patch"}), "tool_choice"),
    (dict(tools=TOOLS, tool_choice={"type": "custom", "name": "get_weather"}), "tool_choice"),
    (dict(tools=[WEATHER, {"type": "custom", "name": "get_weather"}]), "tools"),
    (dict(tools=[AGENTS, {"type": "function", "name": "agents__stop"}]), "tools"),
    (dict(tools=[AGENTS | {"tools": [WEATHER] * 1024}, WEATHER]), "tools"),
    (dict(tools=[AGENTS | {"tools": [{"type": "web_search"}]}]), "tools[0].tools[0].type"),
    (dict(tools=[PATCH | {"format": {"type": "grammar", "syntax": "lark"}}]), "tools[0].format.definition"),
    (dict(tools=[PATCH | {"format": {"type": "grammar", "syntax": "gbnf"}}]), "tools[0].format.syntax"),
    (dict(tools=[PATCH | {"format": PATCH["format"] | {"definition": "start: ("}}], tool_choice=NAMED), "tools"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[f"{i}-{param}" for i, (_, param) in enumerate(BAD)])
def test_what_cannot_be_is_refused_by_name(server: Server, body: dict[str, Any], param: str) -> None:
    status, error = server.error(PATH, **dict(input="Hello", max_output_tokens=4) | body)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param), error
