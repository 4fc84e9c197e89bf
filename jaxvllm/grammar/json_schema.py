"""JSON schemas on their way to llguidance: the options of a request are written in, and keywords are found again."""

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.grammar.schema_numbers import hold_numbers, unheld_numbers
from jaxvllm.grammar.schema_patterns import as_rust, looks_around
from jaxvllm.text.json_pointer import escaped

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
# How a message begins about several patterns and lengths of one string, of which llguidance cannot tell whether any
# text has all.
TOO_HARD = "Unable to determine if regex is empty"
# Keywords of the oldest draft that restrict values. llguidance does not know them, and takes them for annotations.
FORGOTTEN = ("extends", "disallow", "divisibleBy")
# The characters that stay as they are in a `$ref`; "%" escapes others.
_IN_REFERENCES = "#%/:?@!$&'()*+,;="
# llguidance takes the year 0, a 29 February of every year and a 60th second of every minute. The 29 February need not
# exist. Most of what reads a time, Python for one, cannot read the other two: they are left out.
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_EXISTING_DAY = f"(?:{_LEAP_YEAR}|{_YEAR}-(?:0[13-9]|1|02-(?:[01]|2[0-8])))"
_NO_LEAP_SECOND = "[0-9]{2}:[0-9]{2}:[0-5]"
# What a string of these formats has to match besides what llguidance knows of the format.
STRICTER_FORMATS = {
    "date": f"^{_EXISTING_DAY}",
    "time": f"^{_NO_LEAP_SECOND}",
    "date-time": f"^{_EXISTING_DAY}.*[tT]{_NO_LEAP_SECOND}",
    "email": r"^[^@]{1,64}@(?:\[|[^.]{1,63}(?:\.[^.]{1,63})*$)",
    "hostname": "^.{1,253}$",
}
# The options of llguidance that a request has names of its own for: a schema within a grammar cannot set them.
RESERVED_OPTIONS = ("lenient", "coerce_one_of", "json_allowed_escapes")
# The letters of the escapes of JSON, without that of a character's number.
SHORT_ESCAPES = 'nrbtf\\"'
_LONG_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\u|\x7f")
# Objects within objects of a schema; llguidance parses by recursion and stops at 128.
MAX_DEPTH = 64
# Compiling takes more than linear time: 2000 properties of an object took 0.5 s and 9000 took 27 s, and a pattern of
# 15 KB 0.3 s and one of 120 KB 30 s.
MAX_SCHEMA_BYTES = 2**19
MAX_PROPERTIES = 2000  # of one object
MAX_SUBSCHEMAS = 10_000
MAX_PATTERN_BYTES = 2**14  # of all patterns together
MOST_NAMED = 50  # keywords that are not enforced, in an error or in warnings


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
    """Returns `schema` with the options of `params` in the form in which llguidance reads them from a schema.

    Raises ParameterError for a number that the grammar cannot hold, unless `params` are lenient: then what has such a
    number is left out.
    """
    options: dict[str, Any] = {"lenient": params.lenient, "coerce_one_of": params.lenient}
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = params.whitespace_pattern or WHITESPACE
    if any(map(_has_other_keys, _parts(schema))):
        # Otherwise a key that is spelled with escapes, such as "\\u0061" for "a", would count as one not declared.
        options["json_allowed_escapes"] = SHORT_ESCAPES
        _check_characters(schema, params)
    schema = json.loads(json.dumps(schema))  # a copy
    for number in unheld_numbers(schema):
        if not params.is_lenient_at(number.place):
            raise ParameterError(f"{params.kind} has {number}", "structured_outputs")
        if isinstance(part := _pointed_to(number.place, schema), dict):
            part.pop(number.keyword, None)
    for place, part in list(subschemas(schema)):
        hold_numbers(part)
        if looks_around(part.get("pattern")):
            if not params.is_lenient_at(place):
                raise ParameterError(
                    f'{params.kind} has the keyword "pattern" at {place} with an expression that looks ahead or back, '
                    f"which cannot be enforced: leave it out, or {params.way_out}",
                    "structured_outputs",
                )
            del part["pattern"]
        if isinstance(pattern := part.get("pattern"), str):
            part["pattern"] = as_rust(pattern)
        if isinstance(by_pattern := part.get("patternProperties"), dict):
            part["patternProperties"] = {as_rust(pattern): one for pattern, one in by_pattern.items()}
        if params.disable_additional_properties and ("properties" in part or "patternProperties" in part):
            part.setdefault("additionalProperties", False)
        stricter = [{"pattern": pattern} for name, pattern in STRICTER_FORMATS.items() if part.get("format") == name]
        if stricter and isinstance(others := part.get("allOf", []), list):
            part["allOf"] = [*others, *stricter]
        if isinstance(reference := part.get("$ref"), str):  # schemas made from types have "#/$defs/List<Item>"
            part["$ref"] = quote(reference, safe=_IN_REFERENCES)
    return schema | {"x-guidance": options}


def _parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (part for _, part in subschemas(schema))


def _has_other_keys(part: dict[str, Any]) -> bool:
    """Returns whether a schema names some properties of an object and leaves it others."""
    is_open = "patternProperties" in part or part.get("additionalProperties") is not False
    return is_open and any(part.get(name) for name in ("properties", "patternProperties", "required"))


def _check_characters(schema: dict[str, Any], params: StructuredOutputsParams) -> None:
    """Raises ParameterError for a value that cannot be written without an escape of the form \\u, unless lenient."""
    for place, part in subschemas(schema):
        for keyword in ("const", "enum"):
            if not params.is_lenient_at(place) and _LONG_ESCAPE.search(
                json.dumps(part.get(keyword), ensure_ascii=False)
            ):
                raise ParameterError(
                    f'{params.kind} has the keyword "{keyword}" at {place} with a control character that is written '
                    "as \\u, which is not possible beside objects that have further properties: leave it out, or set "
                    "additionalProperties to false",
                    "structured_outputs",
                )


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
        if isinstance(reference := part.get("$ref"), str) and "#/" in reference:  # maybe after the schema's own `$id`
            found.append((pointer := unquote(reference[reference.index("#") :]), _pointed_to(pointer, schema)))
        for name, value in part.items():
            below = f"{place}/{escaped(name)}"
            if name in _BY_NAME and isinstance(value, dict):
                found += [(f"{below}/{escaped(key)}", one) for key, one in value.items()]
            elif (name in _IN_LISTS or name in _SINGLE) and isinstance(value, list):
                found += [(f"{below}/{index}", one) for index, one in enumerate(value)]
            elif name in _SINGLE:
                found.append((below, value))


def places_of(keyword: str, schema: dict[str, Any]) -> list[str]:
    """Returns the JSON pointers of the schemas within `schema` that have `keyword`, the outermost first."""
    return sorted((place for place, part in subschemas(schema) if keyword in part), key=len)


def unenforced(message: str, schema: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the keywords that a message of llguidance says it does not implement, with their places in `schema`.

    The message does not tell a place, so these are all places that have the keyword, the outermost first.
    """
    keywords: list[str] = []
    if match := re.search(r"Unimplemented keys: (\[.*?\])", message):
        keywords = json.loads(match[1])
    elif message.startswith("Unknown format"):
        wanted = message.removeprefix("Unknown format:").strip()
        if places := [place for place, part in subschemas(schema) if part.get("format") == wanted]:
            return [(f"format: {wanted}", place) for place in sorted(places, key=len)]
        keywords = ["format"]
    elif message.startswith("oneOf "):
        keywords = ["oneOf"]
    elif message.startswith(TOO_HARD):
        keywords = ["pattern"]
    return [(keyword, place) for keyword in keywords for place in places_of(keyword, schema) or ["#"]]


def forgotten(schema: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the keywords of `schema` that llguidance forgets, each with the place of a schema that has it.

    They are those with numbers that it cannot hold, patterns that look ahead or back, the `FORGOTTEN` ones,
    `minProperties` where the same key could be written twice to satisfy it, and `required` where it is said of a
    property, as the oldest draft did.
    """
    found = [(number.keyword, number.place) for number in unheld_numbers(schema)]
    found += [(keyword, place) for keyword in FORGOTTEN for place in places_of(keyword, schema)]
    found += [("pattern", place) for place, part in subschemas(schema) if looks_around(part.get("pattern"))]
    found += [("minProperties", place) for place, part in subschemas(schema) if _may_repeat_keys(part)]
    return found + [("required", place) for place, part in subschemas(schema) if part.get("required") is True]


def keyword_at(keyword: str, place: str) -> str:
    """Returns how messages name a keyword of a schema and its place."""
    return f"the keyword {json.dumps(keyword)} at {place}"


def first_named(texts: list[str]) -> list[str]:
    """Returns the first `MOST_NAMED` of some texts, and how many others there are."""
    left = len(texts) - MOST_NAMED
    return texts if left <= 0 else [*texts[:MOST_NAMED], f"and {left} more"]


def _may_repeat_keys(part: dict[str, Any]) -> bool:
    """Returns whether an object needs two keys that are not named. llguidance takes the same key twice."""
    least, required = part.get("minProperties"), part.get("required")
    is_closed = part.get("additionalProperties") is False and not part.get("patternProperties")
    num_named = len(set(map(str, required))) if isinstance(required, list) else 0
    return isinstance(least, int | float) and least >= num_named + 2 and not is_closed


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
    """Returns how many objects and arrays contain each other, counted without recursion."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            return depth
        level = [child for one in level for child in (one.values() if isinstance(one, dict) else one)]
    return depth


def _pointed_to(pointer: str, schema: dict[str, Any]) -> Any:
    """Returns the value at `pointer`, which begins with `#/`, or None."""
    part: Any = schema
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        try:
            part = part[int(name) if isinstance(part, list) else name]
        except (KeyError, IndexError, ValueError, TypeError):
            return None
    return part
