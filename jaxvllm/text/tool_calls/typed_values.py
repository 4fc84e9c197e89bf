"""Turns the values of XML parameters, which are plain text, into JSON of the types that a tool's schema names."""

import json
from collections.abc import Mapping
from typing import Any

from jaxvllm.text.tool_calls.json_scanner import json_kind
from jaxvllm.text.tool_calls.python_scanner import python_as_json

# The types that each kind of JSON value has.
_TYPES_OF_KIND = {
    "{": {"object"},
    "[": {"array"},
    '"': {"string"},
    "0": {"number", "integer"},
    "t": {"boolean"},
    "f": {"boolean"},
    "n": {"null"},
}
TYPES = frozenset(("object", "array", "string", "number", "integer", "boolean", "null"))
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_MAX_DEPTH = 8  # of schemas within schemas that say the type


def types_of(parameters: Mapping[str, Any] | None, name: str) -> frozenset[str]:
    """Returns the types that property `name` of a schema may have; an empty set where the schema does not tell."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return frozenset(_types(schema, parameters or {}, _MAX_DEPTH))


def as_json(text: str, types: frozenset[str]) -> str:
    """Returns `text` as JSON of one of `types`, or as a JSON string where it is a value of none of them.

    Without `types`, whatever is a value of JSON or Python means that value.
    """
    stripped = text.strip()
    for spelled in (_word(stripped, types), stripped, python_as_json(stripped)):
        if spelled is not None and (kind := json_kind(spelled)):
            found = _TYPES_OF_KIND[kind]
            if kind == "0" and "number" not in types and not spelled.lstrip("-").isdigit():
                found = {"number"}
            if not types or found & types:
                return spelled
    return json.dumps(text, ensure_ascii=False)


def _word(text: str, types: frozenset[str]) -> str | None:
    """Returns what a boolean or null means in any case of letters."""
    word = text.lower()
    if word in ("true", "false") and "boolean" in types:
        return word
    return "null" if word in ("null", "none") and "null" in types else None


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or not depth:
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_referred(reference, root), root, depth - 1)
    named = schema.get("type")
    types = {named} if isinstance(named, str) else set(filter(_is_text, named)) if isinstance(named, list) else set()
    if not types:
        for key in _ALTERNATIVES:
            for one in schema.get(key) or () if isinstance(schema.get(key), list) else ():
                types |= _types(one, root, depth - 1)
    if not types and isinstance(values := schema.get("enum"), list) and values and all(map(_is_text, values)):
        types = {"string"}
    if schema.get("nullable") is True and types:
        types |= {"null"}
    return types & TYPES


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _is_text(value: object) -> bool:
    return isinstance(value, str)
