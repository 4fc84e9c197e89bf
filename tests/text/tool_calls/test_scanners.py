"""The scanners of values, those of JSON and Python against the parsers of Python's library."""

import ast
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxvllm.text.tool_calls.gemma_scanner import GemmaScanner
from jaxvllm.text.tool_calls.json_scanner import MAX_DEPTH, JsonScanner, json_kind
from jaxvllm.text.tool_calls.python_scanner import PythonScanner, python_as_json
from jaxvllm.text.tool_calls.typed_values import as_json, types_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
SOUP = st.lists(
    st.sampled_from(
        [*'{}[]:,"0123456789-+.eE \n\\', "true", "null", "nul", '"a"', '{"a":', "\\u00", "\\n", "\x01", "é"]
    ),
    max_size=12,
).map("".join)


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=lambda _: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return False
    return True


@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_json_is_accepted(value: Any, indent: int | None, is_ascii: bool) -> None:
    assert json_kind(json.dumps(value, indent=indent, ensure_ascii=is_ascii))


@given(SOUP)
def test_soup_is_json_where_the_library_says_so(text: str) -> None:
    assert bool(json_kind(text)) == is_json(text)


@given(SOUP, st.integers(0, 40))
def test_the_first_wrong_character_does_not_depend_on_parts(text: str, place: int) -> None:
    whole, parted = JsonScanner(), JsonScanner()
    end = whole.scan(text, 0)
    head, tail = text[:place], text[place:]
    stop = parted.scan(head, 0)
    if stop == len(head) and not parted.done:
        stop += parted.scan(tail, 0)
    assert (stop, parted.done, parted.complete) == (end, whole.done, whole.complete)


def test_depth_has_a_limit() -> None:
    assert json_kind("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert not json_kind("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))
    assert python_as_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert python_as_json("[" * 100_000) is None


@given(VALUES)
def test_literals_of_python_become_json(value: Any) -> None:
    made = python_as_json(repr(value))
    assert made is not None
    assert json.loads(made) == value


PYTHON_SOUP = st.lists(
    st.sampled_from(
        [*"{}[]:,'\"0123456789-+.e \n\\xau", "True", "None", "Nine", "'a'", "{'a':", "f(", "()", "1j", "*"]
    ),
    max_size=10,
).map("".join)


def is_plain_literal(value: Any) -> bool:
    match value:
        case dict():
            return all(isinstance(key, str) for key in value) and all(map(is_plain_literal, value.values()))
        case list():
            return all(map(is_plain_literal, value))
        case float():
            return math.isfinite(value)
    return value is None or isinstance(value, str | int | bool)


@given(PYTHON_SOUP)
def test_soup_becomes_what_the_library_evaluates(text: str) -> None:
    made = python_as_json(text)
    if made is None:
        return
    value = json.loads(made)
    if not any(word in text for word in ("true", "false", "null")):
        expected = ast.literal_eval(text.strip())
        assert is_plain_literal(expected)
        assert value == expected


@pytest.mark.parametrize(
    "text",
    [
        "f()",
        "a",
        "1+1",
        "(1,)",
        "{1}",
        "{1: 2}",
        "'a' 'b'",
        "b'a'",
        "'\\N{BULLET}'",
        "'\\777'",
        "nan",
        "1e999",
        "0x1f",
        "'a\nb'",
        "[1,,2]",
        "{'a'}",
        "'",
    ],
)
def test_other_expressions_of_python_are_refused(text: str) -> None:
    assert python_as_json(text) is None


@given(PYTHON_SOUP, st.integers(0, 30))
def test_python_does_not_depend_on_parts(text: str, place: int) -> None:
    whole, parted = PythonScanner(), PythonScanner()
    end = whole.scan(text, 0)
    head, tail = text[:place], text[place:]
    stop = parted.scan(head, 0)
    if stop == len(head) and not parted.done:
        stop += parted.scan(tail, 0)
    assert (stop, parted.done, parted.take()) == (end, whole.done, whole.take())


QUOTE = '<|"|>'
GEMMA_SOUP = st.lists(
    st.sampled_from([*'{}[]:,<|"> \n', QUOTE, "{a:", f"{QUOTE}k{QUOTE}:", "true", "-1.5", "x y", "é"]), max_size=12
).map(lambda parts: "{" + "".join(parts))


def in_gemma(value: Any) -> str:
    """A value in Gemma's notation."""
    match value:
        case str():
            return f"{QUOTE}{value}{QUOTE}"
        case dict():
            return "{" + ", ".join(f"{in_gemma(key)}:{in_gemma(inner)}" for key, inner in value.items()) + "}"
        case list():
            return "[" + ",".join(map(in_gemma, value)) + "]"
    return json.dumps(value)


@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_objects_of_gemma_become_json(value: dict[str, Any]) -> None:
    scanner, text = GemmaScanner(QUOTE), in_gemma(value)
    assert scanner.scan(text + "}", 0) == len(text)
    assert scanner.done
    assert json.loads(scanner.take()) == value


@given(GEMMA_SOUP, st.integers(0, 30))
def test_soup_of_gemma_is_json_if_it_ends_and_does_not_depend_on_parts(text: str, place: int) -> None:
    whole, parted = GemmaScanner(QUOTE), GemmaScanner(QUOTE)
    end = whole.scan(text, 0)
    head, tail = text[:place], text[place:]
    stop = parted.scan(head, 0)
    if stop == len(head) and not parted.done:
        stop += parted.scan(tail, 0)
    made = whole.take()
    assert (stop, parted.done, parted.take()) == (end, whole.done, made)
    assert not whole.done or is_json(made)


def test_depth_of_an_object_of_gemma_has_a_limit() -> None:
    for depth in (MAX_DEPTH, MAX_DEPTH + 1):
        scanner = GemmaScanner(QUOTE)
        scanner.scan("{a:" + "[" * (depth - 1) + "]" * (depth - 1) + "}", 0)
        assert scanner.done is (depth == MAX_DEPTH)


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"integer"}, 5),
        ("5", {"string"}, "5"),
        ("5.5", {"integer"}, "5.5"),
        ("5.5", {"number"}, 5.5),
        (" TRUE ", {"boolean"}, True),
        ("true", {"integer"}, "true"),
        ("null", {"integer", "null"}, None),
        ("None", {"null", "string"}, None),
        ('{"a": [1]}', {"object"}, {"a": [1]}),
        ("{'a': [True]}", {"object"}, {"a": [True]}),
        ("[1, 2", {"array"}, "[1, 2"),
        ("[1]", {"object"}, "[1]"),
        ("7", set(), 7),
        ("seven", set(), "seven"),
        ("1" * 5000, {"integer"}, None),
    ],
)
def test_a_value_has_a_type_of_the_schema(text: str, types: set[str], value: Any) -> None:
    made = as_json(text, frozenset(types))
    assert made == text if len(text) == 5000 else json.loads(made) == value


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"anyOf": [{"type": "string"}, {"oneOf": [{"type": "null"}]}]}, {"string", "null"}),
        ({"enum": ["a", "b"]}, {"string"}),
        ({"enum": ["a", 1]}, set()),
        ({"$ref": "#/$defs/t"}, {"array"}),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"type": 5, "anyOf": 7}, set()),
        (5, set()),
    ],
)
def test_the_schema_tells_the_types(schema: Any, types: set[str]) -> None:
    definitions = {"t": {"type": "array"}, "loop": {"$ref": "#/$defs/loop"}}
    assert types_of({"properties": {"a": schema}, "$defs": definitions}, "a") == types
    assert types_of({"properties": {"a": schema}}, "b") == types_of(None, "a") == frozenset()
