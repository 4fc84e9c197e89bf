"""Structural tags: free text in which some parts have a form, such as the calls of tools.

There are two forms, both of which vLLM takes over from xgrammar. The older is a list of `structures`, each with
`begin`, `schema` and `end`, and the `triggers` after which one must follow. The newer is one `format`, a tree of parts.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.core.value_checks import shown

MAX_TAGS = 256
MAX_DEPTH = 16
_ANY = r"/(.|\n)*/"


class PartTerms(Protocol):
    """Turns the parts of a tag that have a form of their own into what stands for them in a rule."""

    def schema(self, schema: Any) -> str:
        """Returns the term for a JSON schema."""

    def regex(self, pattern: Any) -> str:
        """Returns the term for a regular expression."""

    def lark(self, text: Any) -> str:
        """Returns a grammar in Lark."""


def structural_tag_grammar(params: StructuredOutputsParams, special_tokens: dict[str, int], parts: PartTerms) -> str:
    """Returns the grammar of `params.structural_tag`, as llguidance reads it.

    `special_tokens` of the vocabulary have an id of their own, which their text alone does not allow. Raises
    ParameterError for a tag that is not well-formed, or that asks for what cannot be enforced.
    """
    assert params.structural_tag is not None
    try:
        tag = json.loads(params.structural_tag)
    except (ValueError, RecursionError) as error:
        raise _error(f"is not valid JSON: {error}") from error
    if not isinstance(tag, dict):
        raise _error(f"must be an object, not {shown(tag)}")
    rules = _Rules(special_tokens, parts)
    if "structures" in tag:
        return rules.grammar(rules.triggered(_of_structures(tag)))
    if "format" not in tag:
        raise _error("must have structures and triggers, or a format")
    return rules.grammar(rules.part(tag["format"], end="", depth=0))


def _error(rule: str) -> ParameterError:
    return ParameterError(f"structural_tag {rule}", "structural_tag")


def _of_structures(tag: dict[str, Any]) -> dict[str, Any]:
    """Returns a tag of the older form as a part of the newer."""
    structures = _list(tag, "structures")
    tags = []
    for structure in structures:
        if not isinstance(structure, dict):
            raise _error(f"has a structure that is not an object: {shown(structure)}")
        schema = structure.get("schema", structure.get("parameters", {}))
        if isinstance(schema, str):  # as its text
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise _error(f"has a schema that is not valid JSON: {error}") from error
        content = {"type": "json_schema", "json_schema": schema}
        tags.append(
            {"type": "tag", "begin": _text(structure, "begin"), "content": content, "end": _text(structure, "end")}
        )
    return {"type": "triggered_tags", "triggers": _list(tag, "triggers"), "tags": tags}


class _Rules:
    """The rules of one grammar, which grow as its parts are read."""

    def __init__(self, special_tokens: dict[str, int], parts: PartTerms):
        self._special_tokens = special_tokens
        self._parts = parts
        self._rules: list[str] = []
        self._grammars: list[dict[str, str]] = []  # that rules refer to

    def grammar(self, start: str) -> str:
        """Returns the whole grammar, in which `start` is the first rule's right side."""
        lark = "\n".join(["%llguidance {}", f"start: {start}", *self._rules])
        first = {"name": "structural_tag", "lark_grammar": lark}
        return json.dumps({"grammars": [first, *self._grammars]}, ensure_ascii=False)

    def part(self, part: Any, end: str, depth: int) -> str:
        """Returns the term for one part, and for the text `end` after it."""
        if depth > MAX_DEPTH:
            raise _error(f"is nested more than {MAX_DEPTH} levels deep, which is the limit: make it flatter")
        if not isinstance(part, dict):
            raise _error(f"has a part that is not an object: {shown(part)}")
        kind = part.get("type", "sequence" if "elements" in part else None)
        if kind == "any_text":
            return self._until(end)
        readers: dict[str, Callable[[], str]] = {
            "const_string": lambda: self._text(_text(part, "value")),
            "json_schema": lambda: self._rule(self._parts.schema(part.get("json_schema"))),
            "regex": lambda: self._parts.regex(part.get("pattern")),
            "grammar": lambda: self._nested(self._parts.lark(part.get("grammar"))),
            "sequence": lambda: self._sequence(_list(part, "elements"), depth),
            "or": lambda: " | ".join(self.part(one, "", depth + 1) for one in _list(part, "elements")),
            "tag": lambda: self._tag(part, "", depth),
            "triggered_tags": lambda: self.triggered(part, depth),
            "tags_with_separator": lambda: self._separated(part, depth),
        }
        if not isinstance(kind, str) or kind not in readers:
            raise _error(f"has a part of type {shown(kind)}: the types are any_text, {', '.join(readers)}")
        return f"({readers[kind]()}) {self._text(end)}"

    def triggered(self, part: dict[str, Any], depth: int = 0) -> str:
        """Returns a rule for free text, in which each trigger is followed by the tag that begins with it."""
        triggers, tags = _list(part, "triggers"), _list(part, "tags")
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise _error("has a trigger that is not a text, or is empty")
        options = []
        for trigger in dict.fromkeys(triggers):
            of_trigger = [tag for tag in tags if isinstance(tag, dict) and _text(tag, "begin").startswith(trigger)]
            if of_trigger:
                rest = " | ".join(self._tag(tag, trigger, depth) for tag in of_trigger)
                options.append(self._rule(f"{self._until(trigger)} ({rest})"))
        for tag in tags:
            if not isinstance(tag, dict) or not any(_text(tag, "begin").startswith(trigger) for trigger in triggers):
                raise _error(f"has a tag that begins with none of its triggers: {shown(tag)}")
        one = f"({' | '.join(options)})"
        count = "" if part.get("stop_after_first") else "+" if part.get("at_least_one") else "*"
        if part.get("stop_after_first"):
            return one if part.get("at_least_one") else f"{one} | {_ANY}"
        return f"{one}{count} {_ANY}"

    def _separated(self, part: dict[str, Any], depth: int) -> str:
        one = self._rule(" | ".join(self._tag(tag, "", depth) for tag in _list(part, "tags")))
        more = "" if part.get("stop_after_first") else f" ({self._text(_text(part, 'separator'))} {one})*"
        return f"{one}{more}" if part.get("at_least_one") else f"({one}{more})?"

    def _tag(self, tag: Any, trigger: str, depth: int) -> str:
        """Returns a rule for a tag whose `trigger` was read already."""
        if not isinstance(tag, dict):
            raise _error(f"has a tag that is not an object: {shown(tag)}")
        ends = tag.get("end", "")
        if isinstance(ends, list):
            if len(ends) != 1:
                raise _error(f"has a tag with {len(ends)} ends, and one is supported: choose one")
            ends = ends[0]
        if not isinstance(ends, str):
            raise _error(f"has an end that is not a text: {shown(ends)}")
        begin = self._text(_text(tag, "begin").removeprefix(trigger))
        return self._rule(f"{begin} {self.part(tag.get('content'), ends, depth + 1)}")

    def _sequence(self, elements: Sequence[Any], depth: int) -> str:
        terms = []
        for index, element in enumerate(elements):
            is_text = isinstance(element, dict) and element.get("type") == "any_text"
            if is_text and index < len(elements) - 1:
                raise _error("has any_text before another element: put it into a tag, whose end says where it ends")
            terms.append(self.part(element, "", depth + 1))
        return " ".join(terms)

    def _until(self, end: str) -> str:
        """Returns a rule for any text up to the first `end`, or for all text if `end` is empty."""
        if not end:
            return _ANY
        if end in self._special_tokens:
            return f"{_ANY} {self._text(end)}"
        return self._rule(f"{_ANY} {quoted(end)}", attributes="[lazy]")

    def _text(self, text: str) -> str:
        """Returns the terms of a fixed text, in which special tokens stand for themselves."""
        terms = []
        while text:
            at, token = min(
                ((at, token) for token in self._special_tokens if (at := text.find(token)) >= 0),
                key=lambda found: (found[0], -len(found[1])),
                default=(len(text), ""),
            )
            if at:
                terms.append(quoted(text[:at]))
            if token:
                terms.append(f"<[{self._special_tokens[token]}]>")
            text = text[at + len(token) :]
        return " ".join(terms)

    def _nested(self, lark: str) -> str:
        name = f"grammar_{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": lark})
        return f"@{name}"

    def _rule(self, right: str, attributes: str = "") -> str:
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {right}")
        return name


def quoted(text: str) -> str:
    """Returns `text` as a string in Lark, which takes every character as it is but the control characters."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _text(part: dict[str, Any], name: str) -> str:
    value = part.get(name)
    if not isinstance(value, str):
        raise _error(f"has a part whose {name} is not a text: {shown(value)}")
    return value


def _list(part: dict[str, Any], name: str) -> list[Any]:
    value = part.get(name)
    if not isinstance(value, list) or not value:
        raise _error(f"has a part whose {name} is not a list, or is empty: {shown(value)}")
    if len(value) > MAX_TAGS:
        raise _error(f"has {len(value)} {name}, the limit is {MAX_TAGS}: give fewer")
    return value
