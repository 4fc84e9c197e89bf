"""The forms of calls that `tool_choice` forces: each tool's own schema holds for its arguments, and no other's."""

import json
from typing import Any

import pytest

from jaxvllm.core.errors import ParameterError
from jaxvllm.grammar.constraint import CompiledGrammar
from jaxvllm.text.tool_use import Tool, ToolUse
from tests.grammar.demo import compiler, takes


def form(*tools: Tool, name: str | None = None) -> CompiledGrammar:
    """The grammar of a call of one of the tools, or of the arguments of the one with `name`."""
    asked = ToolUse(tools, "required" if name is None else "named", name).structured_outputs()
    assert asked is not None
    return compiler().compile(asked).result()


def referring(reference: str, kind: str, of_definition: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A schema with a property whose schema is referred to."""
    definitions = {"n": {"type": kind, **(of_definition or {})}}
    return {"properties": {"a": {"$ref": reference}}, "$defs": definitions, **more}


REFERENCES: dict[str, tuple[str, dict[str, Any] | None, dict[str, Any]]] = {
    "pointer": ("#/$defs/n", None, {}),
    "anchor": ("#n", {"$anchor": "n"}, {}),
    "anchor of draft 7": ("#n", {"$id": "#n"}, {}),
    "own id": ("https://x/t#/$defs/n", None, {"$id": "https://x/t"}),
    "own id without its folder": ("t#/$defs/n", None, {"$id": "https://x/t"}),
    "own id that is a URN": ("urn:uuid:1#/$defs/n", None, {"$id": "urn:uuid:1"}),
    "id of a part": ("n", {"$id": "n"}, {}),
    "id of a part, with a base": ("n", {"$id": "n"}, {"$id": "https://x/t"}),
    "whole id of a part": ("https://x/n", {"$id": "n"}, {"$id": "https://x/t"}),
    "anchor in another document": ("https://x/t#n", {"$anchor": "n"}, {"$id": "https://x/t"}),
    "draft 4": (
        "http://x/t#/$defs/n",
        None,
        {"id": "http://x/t", "$schema": "http://json-schema.org/draft-04/schema#"},
    ),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_two_tools_with_equal_references_keep_their_own_schemas(name: str) -> None:
    reference, of_definition, more = REFERENCES[name]
    grammar = form(
        Tool("f", referring(reference, "string", of_definition, **more)),
        Tool("g/ ~%", referring(reference, "null", of_definition, **more)),
    )
    for tool, value, is_right in (("f", "x", True), ("f", None, False), ("g/ ~%", None, True), ("g/ ~%", "x", False)):
        assert takes(grammar, json.dumps([{"name": tool, "parameters": {"a": value}}])) == is_right


def test_a_reference_within_a_part_with_an_id_leads_to_that_part() -> None:
    inner = {"$id": "https://x/n", "properties": {"b": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "string"}}}
    grammar = form(Tool("f", {"properties": {"a": inner}, "$defs": {"n": {"type": "null"}}}), Tool("g"))
    assert takes(grammar, '[{"name": "f", "parameters": {"a": {"b": "x"}}}]')
    assert not takes(grammar, '[{"name": "f", "parameters": {"a": {"b": null}}}]')


def test_a_reference_to_another_document_is_named() -> None:
    with pytest.raises(ParameterError, match="https://y/t"):
        form(Tool("f", referring("https://y/t#/n", "null")), Tool("g"))


def test_two_tools_of_one_name_may_both_be_called() -> None:
    grammar = form(*(Tool("f", {"properties": {"a": {"type": kind}}}) for kind in ("string", "null")))
    for value, is_right in (("x", True), (None, True), (1, False)):
        assert takes(grammar, json.dumps([{"name": "f", "parameters": {"a": value}}])) == is_right


# What a grammar does not hold.
UNENFORCED = [
    {"propertyNames": {"pattern": "^a"}},
    {"properties": {"a": {"type": "array", "uniqueItems": True}}},
    {"properties": {"a": {"not": {"type": "string"}}}},
    {"properties": {"a": {"type": "string", "format": "color"}}},
    {"properties": {"a": {"type": "string", "pattern": "^(?!x)"}}},
    {"properties": {"a": {"type": "integer", "maximum": 10**30}}},
    {"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}},
    {"minProperties": 2},
]


@pytest.mark.parametrize("rule", UNENFORCED, ids=[next(iter(rule)) + str(i) for i, rule in enumerate(UNENFORCED)])
def test_a_strict_tool_is_not_refused_for_what_another_tool_has(rule: dict[str, Any]) -> None:
    held = {"properties": {"z": {"type": "null"}}, "additionalProperties": False}
    grammar = form(Tool("held", held, is_strict=True), Tool("free", rule))
    [warning] = grammar.warnings
    assert "#/$defs/free" in warning or "oneOf" in warning
    assert not takes(grammar, '[{"name": "held", "parameters": {"y": null}}]')
    for tools, name in (((Tool("held", held), Tool("free", rule, is_strict=True)), None), (None, "free")):
        with pytest.raises(ParameterError, match='the keyword "') as raised:
            form(*(tools or [Tool("free", rule, is_strict=True)]), name=name)
        assert ("#/$defs/free" in str(raised.value)) == (name is None)


def test_a_strict_tool_names_each_of_its_own_places() -> None:
    with pytest.raises(ParameterError) as raised:
        form(Tool("free", {"not": {}}), Tool("f", {"items": {"not": {}}, "not": {}}, is_strict=True))
    named = str(raised.value)
    assert '"not" at #/$defs/f;' in named and '"not" at #/$defs/f/items' in named and "/free" not in named
