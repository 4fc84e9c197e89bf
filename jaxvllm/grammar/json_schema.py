"""JSON schemas on their way to llguidance: the options of a request are written in, and keywords are found again."""

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.structured_outputs import StructuredOutputsParams

# Where a schema has others: under names of the caller's choice, in a list, or one (or a list, in old drafts).
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_IN_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = (
    "items",
    "additionalItems",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
)
# The spaces between the parts of JSON, where a request does not say: what printers of JSON write there. With any number
# of spaces, small models never come to an end.
WHITESPACE = r" |\r?\n[ \t]{0,64}"
# Keywords of the oldest draft that restrict values. llguidance does not know them, and takes them for annotations.
FORGOTTEN = ("extends", "disallow", "divisibleBy")
# The characters that stay as they are in a `$ref`; "%" escapes others.
_IN_REFERENCES = "#%/:?@!$&'()*+,;="
# llguidance takes a 29 February of every year and a 60th second of every minute. The first need not exist. The second
# exists at the end of some years, but most of what reads a time cannot read it, Python for one: it is left out.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_EXISTING_DAY = f"(?:{_LEAP_YEAR}|[0-9]{{4}}-(?:0[13-9]|1|02-(?:[01]|2[0-8])))"
_NO_LEAP_SECOND = "[0-9]{2}:[0-9]{2}:[0-5]"
# What a string of these formats has to match besides what llguidance knows of the format.
STRICTER_FORMATS = {
    "date": f"^{_EXISTING_DAY}",
    "time": f"^{_NO_LEAP_SECOND}",
    "date-time": f"^{_EXISTING_DAY}.*[tT]{_NO_LEAP_SECOND}",
}
# Objects within objects of a schema; llguidance parses by recursion and stops at 128.
MAX_DEPTH = 64
# Compiling takes more than linear time: 2000 properties of an object took 0.5 s and 9000 took 27 s, and a pattern of
# 15 KB 0.3 s and one of 120 KB 30 s.
MAX_SCHEMA_BYTES = 2**19
MAX_PROPERTIES = 2000  # of one object
MAX_SUBSCHEMAS = 10_000
MAX_PATTERN_BYTES = 2**14  # of all patterns together


def read_schema(text: str, name: str) -> dict[str, Any]:
    """Returns the schema in the JSON `text` as an object. Raises ParameterError, which names the parameter `name`."""
    if (size := len(text.encode())) > MAX_SCHEMA_BYTES:
        raise ParameterError(f"{name} has {size} bytes, the limit is {MAX_SCHEMA_BYTES}: make it smaller", name)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ParameterError(f"{name} is not valid JSON: {reason}", name) from error
    return check_schema(schema, name)


def check_schema(schema: Any, name: str) -> dict[str, Any]:
    """Returns `schema`, which may also be true, as an object. Raises ParameterError where it is no schema."""
    if schema is True:
        return {}
    if schema is False:
        raise ParameterError(f"{name} is the schema false, which no text satisfies: give another", name)
    if not isinstance(schema, dict):
        raise ParameterError(f"{name} must be a JSON schema, which is an object, not {type(schema).__name__}", name)
    if _depth(schema) > MAX_DEPTH:
        raise ParameterError(
            f"{name} is nested more than {MAX_DEPTH} levels deep, which is the limit: make it flatter", name
        )
    try:
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = json.dumps(error.object[error.start])
        raise ParameterError(f"{name} has {half}, which is half a character: give both surrogates", name) from error
    _check_size(schema, name)
    return schema


def guided(schema: dict[str, Any], params: StructuredOutputsParams) -> dict[str, Any]:
    """Returns `schema` with the options of `params` in the form in which llguidance reads them from a schema."""
    options: dict[str, Any] = {"lenient": params.lenient, "coerce_one_of": params.lenient}
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = params.whitespace_pattern or WHITESPACE
    schema = json.loads(json.dumps(schema))  # a copy
    for _, part in list(subschemas(schema)):
        if params.disable_additional_properties and ("properties" in part or "patternProperties" in part):
            part.setdefault("additionalProperties", False)
        stricter = [{"pattern": pattern} for name, pattern in STRICTER_FORMATS.items() if part.get("format") == name]
        if stricter and isinstance(others := part.get("allOf", []), list):
            part["allOf"] = [*others, *stricter]
        if isinstance(reference := part.get("$ref"), str):  # schemas made from types have "#/$defs/List<Item>"
            part["$ref"] = quote(reference, safe=_IN_REFERENCES)
    return schema | {"x-guidance": options}


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields `schema` and every schema within it, each once and with its place as a JSON pointer.

    What a `$ref` points to is a schema wherever it is, as in `{"$ref": "#/components/x", "components": {"x": {}}}`.
    """
    found: list[tuple[str, Any]] = [("#", schema)]
    seen: set[int] = set()
    while found:
        place, part = found.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield place, part
        if isinstance(reference := part.get("$ref"), str) and reference.startswith("#/"):
            found.append((pointer := unquote(reference), _pointed_to(pointer, schema)))
        for name, value in part.items():
            below = f"{place}/{_escaped(name)}"
            if name in _BY_NAME and isinstance(value, dict):
                found += [(f"{below}/{_escaped(key)}", one) for key, one in value.items()]
            elif (name in _IN_LISTS or name in _SINGLE) and isinstance(value, list):
                found += [(f"{below}/{index}", one) for index, one in enumerate(value)]
            elif name in _SINGLE:
                found.append((below, value))


def place_of(keyword: str, schema: dict[str, Any]) -> str | None:
    """Returns the JSON pointer of the first schema within `schema` that has `keyword`, or None."""
    return min((place for place, part in subschemas(schema) if keyword in part), key=len, default=None)


def unenforced(message: str, schema: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the keywords that a message of llguidance says it does not implement, each with its place in `schema`."""
    keywords: list[str] = []
    if match := re.search(r"Unimplemented keys: (\[.*?\])", message):
        keywords = json.loads(match[1])
    elif message.startswith("Unknown format"):
        keywords = ["format"]
        wanted = message.removeprefix("Unknown format:").strip()
        for place, part in subschemas(schema):
            if part.get("format") == wanted:
                return [(f"format: {wanted}", place)]
    elif message.startswith("oneOf constraints are not supported"):
        keywords = ["oneOf"]
    return [(keyword, place_of(keyword, schema) or "#") for keyword in keywords]


def forgotten(schema: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the keywords of `schema` that llguidance forgets, each with the place of the first schema that has it.

    They are the `FORGOTTEN` ones, and `required` where it is said of a property, as the oldest draft did.
    """
    found = [(keyword, place) for keyword in FORGOTTEN if (place := place_of(keyword, schema)) is not None]
    old = [place for place, part in subschemas(schema) if part.get("required") is True]
    return found + [("required", min(old, key=len))] if old else found


def _check_size(schema: dict[str, Any], name: str) -> None:
    num_subschemas = num_pattern_bytes = 0
    for place, part in subschemas(schema):
        num_subschemas += 1
        if not isinstance(properties := part.get("properties", {}), dict):
            raise ParameterError(f"{name} has properties at {place} that are not an object: make them one", name)
        if len(properties) > MAX_PROPERTIES:
            raise ParameterError(
                f"{name} has {len(properties)} properties at {place}, the limit is {MAX_PROPERTIES}: split the object",
                name,
            )
        patterns = [part.get("pattern"), *(part.get("patternProperties") or ())]
        num_pattern_bytes += sum(len(pattern.encode()) for pattern in patterns if isinstance(pattern, str))
    for what, count, limit in (
        ("schemas within it", num_subschemas, MAX_SUBSCHEMAS),
        ("bytes of patterns", num_pattern_bytes, MAX_PATTERN_BYTES),
    ):
        if count > limit:
            raise ParameterError(f"{name} has {count} {what}, the limit is {limit}: make it smaller", name)


def _depth(value: Any) -> int:
    """How many objects and arrays contain each other, counted without recursion."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            return depth
        level = [child for one in level for child in (one.values() if isinstance(one, dict) else one)]
    return depth


def _pointed_to(pointer: str, schema: dict[str, Any]) -> Any:
    """What is at `pointer`, which begins with `#/`, or None."""
    part: Any = schema
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        try:
            part = part[int(name) if isinstance(part, list) else name]
        except (KeyError, IndexError, ValueError, TypeError):
            return None
    return part


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
