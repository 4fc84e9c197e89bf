"""`StructuredOutputsParams`: the form that the text of a completion must have. The names are vLLM's."""

import json
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import unquote

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.value_checks import boolean, shown, strings

MAX_GRAMMAR_BYTES = 2**20  # of a schema, an expression or a grammar as text
MAX_CHOICES = 10_000
MAX_CHOICE_CHARS = 10_000
MAX_PARTS = 1024
MAX_PART_CHARS = 10_000

# Exactly one of these is set.
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """One constraint on the text of a completion, and how it is read. Whether it can be enforced is known later.

    `json` may be given as an object or as text, and is stored as text; so is `structural_tag`.
    """

    json: str | None = None  # a JSON schema
    regex: str | None = None  # the whole text matches this expression
    choice: tuple[str, ...] | None = None  # the text is one of these
    grammar: str | None = None  # EBNF in Lark's form, or GBNF
    json_object: bool | None = None  # True: any JSON object
    structural_tag: str | None = None  # free text in which tagged parts have a form, as JSON
    disable_any_whitespace: bool = False  # JSON has no spaces between its parts
    disable_additional_properties: bool = False  # objects have only the properties that the schema names
    whitespace_pattern: str | None = None  # the expression for the spaces between parts of JSON
    lenient: bool = False  # keywords of a JSON schema that cannot be enforced are ignored, with a warning
    strict_parts: tuple[str, ...] = ()  # JSON pointers, such as #/$defs/a, to parts of `json` that are not lenient

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name in ("json", "structural_tag"):
            put(self, name, _json_text(name, getattr(self, name)))
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ParameterError(f"{name} must be a string that is not empty, not {shown(value)}", name)
        if self.choice is not None:
            put(self, "choice", strings("choice", self.choice, MAX_CHOICES, MAX_CHOICE_CHARS, "a choice"))
            if not self.choice:
                raise ParameterError("choice must have at least one string", "choice")
        for name in ("disable_any_whitespace", "disable_additional_properties", "lenient"):
            boolean(name, getattr(self, name))
        if self.strict_parts:
            put(self, "strict_parts", strings("strict_parts", self.strict_parts, MAX_PARTS, MAX_PART_CHARS, "a part"))
        if self.json_object is not None:
            put(self, "json_object", boolean("json_object", self.json_object) or None)
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ParameterError(
                f"structured_outputs needs exactly one of {', '.join(KINDS)}, not {' and '.join(given) or 'none'}",
                "structured_outputs",
            )
        for choice in self.choice or ():
            _num_bytes("choice", choice)
        for name in (given[0], "whitespace_pattern"):
            value = getattr(self, name)
            if isinstance(value, str) and (num_bytes := _num_bytes(name, value)) > MAX_GRAMMAR_BYTES:
                raise ParameterError(
                    f"{name} has {num_bytes} bytes, the limit is {MAX_GRAMMAR_BYTES}: make it smaller", name
                )

    @property
    def kind(self) -> str:
        """The one of `KINDS` that is set."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def way_out(self) -> str:
        """Returns what a caller may do to have ignored what cannot be enforced."""
        return "leave strict out to ignore it" if self.strict_parts else "set lenient to ignore it"

    def is_lenient_at(self, place: str) -> bool:
        """Returns whether what cannot be enforced is ignored at `place`, a JSON pointer without a URI's escapes."""
        parts = map(unquote, self.strict_parts)
        return self.lenient and not any(place == part or place.startswith(f"{part}/") for part in parts)

    @classmethod
    def of(cls, value: object) -> "StructuredOutputsParams | None":
        """Returns `value`, which may also be None or a mapping with the names of the fields."""
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            raise ParameterError(f"structured_outputs must be an object, not {shown(value)}", "structured_outputs")
        names = [field.name for field in fields(cls)]
        for name in value:
            if name not in names:
                raise ParameterError(
                    f"structured_outputs has no {shown(name)}: it has {', '.join(names)}", "structured_outputs"
                )
        return cls(**value)


def _num_bytes(name: str, text: str) -> int:
    """Returns how many bytes `text` is. Raises ParameterError where it is no text."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise ParameterError(f"{name} must be valid Unicode without lone surrogates: {error}", name) from error


def _json_text(name: str, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        if value == "":
            raise ParameterError(f"{name} must not be empty", name)
        return value
    if not isinstance(value, dict | bool):
        raise ParameterError(f"{name} must be an object or JSON text, not {shown(value)}", name)
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ParameterError(f"{name} is not valid JSON: {error}", name) from error
