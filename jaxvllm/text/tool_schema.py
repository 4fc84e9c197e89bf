"""`moved`: the schema of a tool's parameters as a part of a larger schema, in which its references still lead to it."""

from collections.abc import Mapping
from typing import Any

# What these keywords hold are values and no schemas.
_VALUES = frozenset(("const", "enum", "default", "example", "examples"))
# What these keywords hold are schemas by names, which may read like keywords.
_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"))


def moved(schema: Mapping[str, Any], pointer: str) -> dict[str, Any]:
    """Returns `schema` for the place `pointer` of another schema, such as "#/$defs/tool".

    A `$ref` that leads to the schema itself, by "#" or by its own `$id`, leads there.
    """
    own = schema.get("$id")
    inner = {name: value for name, value in schema.items() if name not in ("$id", "$schema")}
    starts = ("#", f"{own.removesuffix('#')}#") if isinstance(own, str) and own else ("#",)
    found: dict[str, Any] = _moved(inner, pointer, starts)
    return found


def _moved(schema: Any, pointer: str, starts: tuple[str, ...]) -> Any:
    if isinstance(schema, list):
        return [_moved(one, pointer, starts) for one in schema]
    if (
        not isinstance(schema, Mapping) or "$id" in schema
    ):  # references within a part with an id of its own lead to that
        return schema
    made: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "$ref" and isinstance(value, str):
            made[name] = _moved_reference(value, pointer, starts)
        elif name in _VALUES:
            made[name] = value
        elif name in _BY_NAME and isinstance(value, Mapping):
            made[name] = {key: _moved(one, pointer, starts) for key, one in value.items()}
        else:
            made[name] = _moved(value, pointer, starts)
    return made


def _moved_reference(reference: str, pointer: str, starts: tuple[str, ...]) -> str:
    start = next((start for start in starts if reference.startswith(start)), None)
    if start is None:
        return reference
    rest = reference.removeprefix(start)
    # Other than a path, it is the name of an anchor, which is found wherever it stands.
    return pointer + rest if not rest or rest.startswith("/") else f"#{rest}"
