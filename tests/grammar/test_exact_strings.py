"""Texts within an answer: keys, formats and choices are those that were asked for, however they are written."""

import calendar
import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxvllm.core.errors import ParameterError
from tests.grammar.demo import compiled, takes
from tests.grammar.random_walk import random_walk

INTEGER = {"type": "integer"}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": INTEGER}},
        {"patternProperties": {"^a$": INTEGER}},
        {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": INTEGER}}}},
        {"$id": "http://a/b", "$ref": "http://a/b#/x", "x": {"properties": {"a": INTEGER}}},
        {"anyOf": [{"type": "null"}, {"properties": {"a": INTEGER}}]},
        {"properties": {"a": INTEGER}, "additionalProperties": {"type": ["string", "integer"]}},
        {"allOf": [{"properties": {"a": INTEGER}}, {"properties": {"b": INTEGER}}]},
        {"properties": {"a": INTEGER}, "patternProperties": {"^b": INTEGER}, "additionalProperties": False},
    ],
    ids=json.dumps,
)
def test_a_key_that_is_spelled_with_escapes_does_not_evade_its_schema(schema: dict[str, Any]) -> None:
    grammar = compiled(json=schema | {"type": ["object", "null"]})
    assert takes(grammar, '{"a": 1}') and not takes(grammar, '{"a": "text"}')
    assert not takes(grammar, r'{"\u0061": "text"}') and not takes(grammar, r'{"a": 1, "\u0061": "text"}')
    if "$id" in schema:
        return
    inner = compiled(json={"type": "array", "items": schema, "$defs": schema.get("$defs", {})})
    assert takes(inner, '[{"a": 1}]') and not takes(inner, r'[{"\u0061": "text"}]')


def test_a_key_with_a_line_break_has_one_spelling() -> None:
    grammar = compiled(json={"properties": {"a\nb": INTEGER}})
    assert takes(grammar, r'{"a\nb": 1}')
    assert not takes(grammar, r'{"a\u000ab": "text"}') and not takes(grammar, r'{"a\u000Ab": "text"}')


def test_control_characters_are_written_or_refused_by_name() -> None:
    closed = {"properties": {"a": {"const": "\x01"}}, "additionalProperties": False}
    assert takes(compiled(json=closed), r'{"a": "\u0001"}')
    with pytest.raises(ParameterError, match='keyword "enum" at #/properties/a with a control character'):
        compiled(json={"properties": {"a": {"enum": ["x", "\x01"]}}})
    assert takes(compiled(json={"properties": {"a": {"const": "\\u0001\n"}}}), r'{"a": "\\u0001\n"}')


def test_repeated_keys_do_not_count_as_several_properties() -> None:
    for schema in ({"minProperties": 2}, {"required": ["a"], "minProperties": 3}):
        with pytest.raises(ParameterError, match='"minProperties" at #/items'):
            compiled(json={"type": "array", "items": {"type": "object", **schema}})
    assert takes(compiled(json={"type": "object", "required": ["a"], "minProperties": 2}), '{"a": 1, "b": 2}')


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        ("^[a&&b]$", ["a", "&", "b"], ["ab"]),
        ("^[+--]$", ["+", ",", "-"], ["."]),
        ("^[--/]$", ["-", ".", "/"], [","]),
        ("^[^-a]$", ["b"], ["-", "a"]),
        ("^[a~~b]$", ["~"], ["c"]),
        ("^[[a]$", ["[", "a"], ["]"]),
        ("^[[:a]$", ["[", ":", "a"], ["b"]),
        ("^[^]$", ["a", "\n", "]"], ["", "ab"]),
        ("^a.b$", ["axb", "a]b"], ["a\nb", "a\rb", "a\u2028b"]),
        (r"^[\].]\.$", ["].", ".."], ["]x", "\\."]),
    ],
)
def test_a_pattern_is_one_of_ecmascript(pattern: str, texts: list[str], others: list[str]) -> None:
    value = compiled(json={"type": "string", "pattern": pattern})
    key = compiled(json={"type": "object", "patternProperties": {pattern: {}}, "additionalProperties": False})
    for text in [*texts, *others]:
        assert takes(value, json.dumps(text, ensure_ascii=False)) == (text in texts), text
        assert takes(key, json.dumps({text: 1}, ensure_ascii=False)) == (text in texts), text


@given(st.integers(0, 9999), st.integers(0, 13), st.integers(0, 32))
@settings(max_examples=150, deadline=None)
def test_a_date_is_taken_if_it_exists(year: int, month: int, day: int) -> None:
    exists = 0 < year and 1 <= month <= 12 and 1 <= day <= calendar.monthrange(year, month)[1]
    date = f"{year:04}-{month:02}-{day:02}"
    for format_, text in (("date", date), ("date-time", f"{date}T23:59:59Z")):
        grammar = compiled(json={"type": "string", "format": format_})
        assert takes(grammar, json.dumps(text)) == exists, text


@pytest.mark.parametrize("year", ["0000", "0004", "0100", "0400", "1900", "2000", "2023", "2024"])
def test_the_29_february_exists_in_leap_years(year: str) -> None:
    exists = year != "0000" and calendar.isleap(int(year))
    assert takes(compiled(json={"type": "string", "format": "date"}), f'"{year}-02-29"') == exists


@pytest.mark.parametrize(
    "name", ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
def test_what_is_written_in_a_format_is_valid(name: str) -> None:
    grammar = compiled(json={"type": "string", "format": name})
    for seed in range(8):
        if written := random_walk(grammar, seed, num_free=40):
            assert jsonschema_rs.is_valid({"format": name}, json.loads(written), validate_formats=True), written


@pytest.mark.parametrize(
    ("name", "longest", "too_long"),
    [
        ("email", "a" * 64 + "@b.c", "a" * 65 + "@b.c"),
        ("email", "a@" + "b" * 63 + ".c", "a@" + "b" * 64 + ".c"),
        ("hostname", "a." * 126 + "a", "a." * 127 + "a"),
    ],
)
def test_a_format_has_its_lengths(name: str, longest: str, too_long: str) -> None:
    grammar = compiled(json={"type": "string", "format": name})
    assert takes(grammar, f'"{longest}"') and not takes(grammar, f'"{too_long}"')


@pytest.mark.parametrize("length", [1, 60])
def test_ten_thousand_choices(length: int) -> None:
    choices = tuple(f"{'name ' * length}{number}"[-100:] for number in range(10_000))
    grammar = compiled(choice=choices)
    assert takes(grammar, choices[0]) and takes(grammar, choices[-1])
    assert not takes(grammar, choices[0] + "x") and not takes(grammar, choices[0][:-1])


def test_choices_may_have_every_character_and_be_the_beginning_of_others() -> None:
    odd = [chr(code) for code in (*range(33), *range(0x7E, 0xA1), 0x2028, 0xFEFF, 0x1F600)]
    choices = ("a", "ab", "abc", *(f"a{char}c" for char in odd), *odd, '"', "\\", "/a/", "\\n", "[a]*")
    grammar = compiled(choice=choices)
    assert [choice for choice in choices if not takes(grammar, choice)] == []
    assert not any(takes(grammar, text) for text in ("", "a/", "abcd", "aa", "a~~c"))
