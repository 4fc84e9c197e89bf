"""Forced calls are checked by what the grammar could not hold of their schemas, and what they break is told."""

import asyncio
import json
from typing import Any

import pytest

from jaxvllm.server.argument_check import ArgumentCheck, ForcedCall
from jaxvllm.server.argument_check_process import broken_rules
from tests.server.conftest import Server, events_of

# A call of the demo model breaks this: it is one object with two required properties, and "not" is no grammar's.
BROKEN = {
    "type": "object",
    "properties": {"a": {"enum": [1]}, "b": {"enum": [1]}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "not": {"required": ["a"]},
}
WARNING = 'the keyword "not" at # is not enforced'
TOLD = 'the call of f breaks the keyword "not" at #'
ASKED = [{"role": "user", "content": "Hello!"}]


@pytest.mark.parametrize(
    ("schema", "arguments", "broken"),
    [
        ({"properties": {"a": {"uniqueItems": True}}}, {"a": [1, 1]}, ['"uniqueItems" at #/properties/a']),
        ({"properties": {"a/b": {"not": {}}}}, {"a/b": 1}, ['"not" at #/properties/a~1b']),
        ({"propertyNames": {"pattern": "^(?!x)"}}, {"x": 1}, ['"pattern" at #/propertyNames']),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, {"a": 1}, ['"required" at #/then']),
        ({"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"not": {}}}}, {"a": 1}, ['"not" at #/$defs/n']),
        ({"dependentRequired": {"a": ["b"]}}, {"a": 1, "b": 2}, []),
        ({"properties": {"a": {"format": "color"}}}, {"a": "x"}, []),
    ],
)
def test_what_a_call_breaks_is_named_with_its_place(schema: Any, arguments: Any, broken: list[str]) -> None:
    told = broken_rules("f", json.dumps(arguments), schema)
    assert told == [f"the call of f breaks the keyword {one}" for one in broken]


@pytest.mark.parametrize("schema", [{"$ref": "https://example.com/x"}, {"pattern": "("}, {"$schema": "https://x/y"}])
def test_a_schema_that_cannot_be_read_is_said_to_be_unchecked(schema: Any) -> None:
    [told] = broken_rules("f", "{}", schema)
    assert told.startswith("the call of f was not checked")


def test_a_check_that_takes_for_ever_is_given_up() -> None:
    twice = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}
    schema = {"$ref": "#/$defs/d0", "$defs": twice | {"d60": {"not": {"required": ["a"]}}}}
    check = ArgumentCheck(seconds=60)  # the limit is of computing
    [told] = asyncio.run(check.warnings([ForcedCall("f", "{}", schema)]))
    assert "could not be checked" in told


def test_no_answer_waits_for_a_check_longer_than_its_limit() -> None:
    [told] = asyncio.run(ArgumentCheck(seconds=0).warnings([ForcedCall("f", "{}", {})]))
    assert "could not be checked" in told


BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        dict(
            messages=ASKED,
            tools=[{"type": "function", "function": {"name": "f", "parameters": BROKEN}}],
            tool_choice={"type": "function", "function": {"name": "f"}},
            n=2,
        ),
    ),
    (
        "/v1/responses",
        dict(
            input="Hello!",
            tools=[{"type": "function", "name": "f", "parameters": BROKEN}],
            tool_choice={"type": "function", "name": "f"},
        ),
    ),
    (
        "/v1/messages",
        dict(
            model="demo",
            max_tokens=100,
            messages=ASKED,
            tools=[{"name": "f", "input_schema": BROKEN}],
            tool_choice={"type": "tool", "name": "f"},
        ),
    ),
]


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[path for path, _ in BODIES])
def test_an_answer_tells_what_its_calls_break(server: Server, path: str, body: dict[str, Any]) -> None:
    whole = server.post(path, **body)
    assert whole.status_code == 200, whole.text
    assert json.loads(whole.headers["x-warnings"]) == [TOLD, WARNING]
    stream = server.post(path, **body, stream=True)
    assert json.loads(stream.headers["x-warnings"]) == [WARNING]
    assert stream.text.endswith(f": x-warnings {json.dumps([TOLD])}\n\n")
    assert list(events_of(stream.text)), "the comment is no event"


def test_calls_that_are_cut_or_not_forced_are_not_checked(server: Server) -> None:
    path, body = BODIES[0]
    cut = server.post(path, **body, max_tokens=2)
    assert json.loads(cut.headers["x-warnings"]) == [WARNING]
    assert "x-warnings" not in server.post(path, **body | dict(tool_choice="auto", max_tokens=2)).headers
