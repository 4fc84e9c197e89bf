"""`moved`: the schema of a tool's parameters as a part of a larger schema, in which its references still lead to it."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, urljoin

from jaxvllm.text.json_pointer import escaped

# What these keywords hold are values and no schemas.
_VALUES = frozenset(("const", "enum", "default", "example", "examples"))
# What these keywords hold are schemas by names, which may read like keywords.
_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"))
# The drafts that call a schema's `$id` `id`.
_WITHOUT_DOLLAR = ("draft-03", "draft-04")


class _Part(NamedTuple):
    """A schema within a tool's schema."""

    schema: dict[str, Any]
    place: str  # the JSON pointer to it in the larger schema
    base: str  # the URI that its references are relative to


def moved(schema: Mapping[str, Any], pointer: str) -> dict[str, Any]:
    """Returns `schema` for the place `pointer` of another schema, such as "#/$defs/tool".

    Each `$ref` becomes a JSON pointer, and ids and anchors are left out, because other tools may have the same ones. A
    `$ref` to another document stays as it is.
    """
    made = copy.deepcopy(dict(schema))
    is_old = any(draft in str(made.get("$schema")) for draft in _WITHOUT_DOLLAR)
    id_keyword = "id" if is_old else "$id"
    parts = list(_parts(made, pointer, "", id_keyword))
    # The place of each schema that has a name, by its URI. Of equal names the outermost counts.
    places = {"": pointer}
    for part, place, base in parts:
        own, anchor = part.pop(id_keyword, None), part.pop("$anchor", None)
        if isinstance(own, str):
            is_anchor = own.startswith("#") and len(own) > 1  # as until draft 7
            places.setdefault(base + own if is_anchor else base, place)
        if isinstance(anchor, str):
            places.setdefault(f"{base}#{anchor}", place)
        part.pop("$schema", None)
    for part, _, base in parts:
        if isinstance(reference := part.get("$ref"), str):
            part["$ref"] = _moved_reference(reference, base, places)
    return made


def pointer_to(*names: str) -> str:
    """Returns the JSON pointer to what has these names, one within the other, in the form for a `$ref`."""
    return "/".join(["#", *(quote(escaped(name), safe="$~") for name in names)])


def _moved_reference(reference: str, base: str, places: Mapping[str, str]) -> str:
    document, _, fragment = reference.partition("#")
    uri = urljoin(base, document) if document else base
    if fragment and not fragment.startswith("/"):  # the name of an anchor
        return places.get(f"{uri}#{fragment}", reference)
    return places[uri] + fragment if uri in places else reference


def _parts(value: Any, place: str, base: str, id_keyword: str) -> Iterator[_Part]:
    """Yields every schema in `value`, the outer ones first."""
    if isinstance(value, list):
        for index, one in enumerate(value):
            yield from _parts(one, f"{place}/{index}", base, id_keyword)
    if not isinstance(value, dict):
        return
    if isinstance(own := value.get(id_keyword), str):
        document = own.partition("#")[0]
        base = urljoin(base, document) if document else base
    yield _Part(value, place, base)
    for name, below in value.items():
        place_below = place + pointer_to(name)[1:]
        if name in _BY_NAME and isinstance(below, dict):
            for key, one in below.items():
                yield from _parts(one, place_below + pointer_to(key)[1:], base, id_keyword)
        elif name not in _VALUES:
            yield from _parts(below, place_below, base, id_keyword)
