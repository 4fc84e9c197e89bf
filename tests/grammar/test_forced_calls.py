"""The forms of calls that `tool_choice` forces: each tool's own schema holds for its arguments, and no other's."""

import json
from typing import Any

import pytest

from jaxvllm.core.errors import ParameterError
from jaxvllm.grammar.constraint import CompiledGrammar
from jaxvllm.text.tool_use import Tool, ToolUse
from tests.grammar.demo import compiler, takes
from tools.bfcl import check, tool_of


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
UNENFORCED: list[dict[str, Any]] = [
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
    strict = Tool("free", rule, is_strict=True)
    with pytest.raises(ParameterError, match='the keyword ".*#/\\$defs/free'):
        form(Tool("held", held), strict)
    with pytest.raises(ParameterError, match='the keyword "'):
        form(strict, name="free")


def test_a_strict_tool_names_each_of_its_own_places() -> None:
    with pytest.raises(ParameterError) as raised:
        form(Tool("free", {"not": {}}), Tool("f", {"items": {"not": {}}, "not": {}}, is_strict=True))
    named = str(raised.value)
    assert '"not" at #/$defs/f;' in named and '"not" at #/$defs/f/items' in named and "/free" not in named


def one(kind: str, **more: Any) -> dict[str, Any]:
    """A property as BFCL writes it, with types of Python, Java and JavaScript."""
    return {"type": kind, "description": "A value.", **more}


# Parameters with the shapes of those in the Berkeley Function-Calling Leaderboard: properties, and the required ones.
SHAPES: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"name": one("string")}, ["name"]),
    ({"count": one("integer"), "unit": one("string", enum=["m", "km"])}, ["count"]),
    ({"count": one("integer", default=10)}, []),
    ({"price": one("float"), "ratio": one("number", default=0.5)}, ["price"]),
    ({"is_open": one("boolean"), "is_new": one("bool")}, ["is_open", "is_new"]),
    ({"tags": one("array", items={"type": "string"})}, ["tags"]),
    ({"point": one("tuple", items={"type": "float"})}, ["point"]),
    ({"grid": one("array", items={"type": "array", "items": {"type": "integer"}})}, ["grid"]),
    ({"sizes": one("array", items={"type": "string", "enum": ["S", "M"]}, minItems=1, maxItems=2)}, ["sizes"]),
    ({"anything": one("any")}, ["anything"]),
    ({"nothing": {"description": "Without a type."}}, []),
    ({"of_another_kind": one("Set")}, []),
    ({"where": one("dict")}, ["where"]),
    ({"where": one("dict", properties={"lat": one("float"), "lon": one("float")}, required=["lat", "lon"])}, ["where"]),
    ({"where": one("dict", properties={"city": one("string"), "at": one("dict", properties={})})}, []),
    ({"where": one("dict", properties={"city": one("string")}, additionalProperties=False)}, ["where"]),
    ({"prices": one("dict", additionalProperties={"type": "number"})}, ["prices"]),
    ({"rows": one("list", items={"type": "dict", "properties": {"id": one("integer")}, "required": ["id"]})}, ["rows"]),
    ({"rows": one("array", items={"type": "dict"})}, ["rows"]),
    ({"age": one("integer", minimum=0, maximum=120), "rate": one("float", minimum=0, maximum=1)}, ["age", "rate"]),
    ({"code": one("string", pattern="^[A-Z]{3}$"), "zip": one("string", minLength=5, maxLength=5)}, ["code"]),
    ({"day": one("string", format="date"), "at": one("string", format="date-time")}, ["day", "at"]),
    ({"mail": one("string", format="email"), "page": one("string", format="uri")}, ["mail"]),
    ({"color": one("string", format="color")}, ["color"]),
    ({"names": one("array", items={"type": "string"}, uniqueItems=True)}, []),
    ({"level": one("integer", enum=[1, 2, 3]), "mode": one("string", enum=["a b", 'c"d', "é\n"])}, ["level", "mode"]),
    ({"mode": one("string", enum=["on", "off"], default="maybe")}, ["mode"]),
    ({"type": one("string"), "properties": one("dict"), "required": one("boolean")}, ["type", "required"]),
    ({"a-b": one("string"), "a.b": one("string"), "größe": one("integer"), "$ref": one("string")}, ["a-b", "größe"]),
    ({"missing": one("string")}, ["missing", "not_described"]),
    ({"short": one("short"), "long": one("long"), "byte": one("byte"), "big": one("Bigint")}, ["short", "big"]),
    ({"letter": one("char"), "text": one("String"), "half": one("double")}, ["letter", "text", "half"]),
    ({"list": one("ArrayList", items={"type": "String"}), "map": one("HashMap")}, ["list", "map"]),
    ({"queue": one("Queue", items={"type": "long"}), "table": one("Hashtable")}, ["queue"]),
    ({"is_optional": one("string", optional=True), "nullable": one("string", nullable=True)}, []),
    ({f"p{number}": one("string") for number in range(25)}, ["p0", "p24"]),
]
TOOLS = [
    tool_of({"name": f"shape.f{number}", "parameters": {"type": "dict", "properties": given, "required": required}})
    for number, (given, required) in enumerate(SHAPES)
]


def test_forced_calls_of_functions_like_bfcls_are_valid() -> None:
    for tool in TOOLS:
        outcome, detail = check([tool], tool.name, seeds=[0, 1])
        assert outcome == ("valid, with a warning" if detail else "valid"), (tool, detail)
        unheld = [word for word in ("uniqueItems", "format: color", "format: float") if word in str(detail)]
        assert bool(detail) == bool(unheld), detail


def test_a_forced_call_of_any_of_many_functions_is_valid() -> None:
    outcome, detail = check(TOOLS, None, seeds=range(8))
    assert outcome == "valid, with a warning", detail
