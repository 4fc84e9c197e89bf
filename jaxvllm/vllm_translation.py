"""`translate`: what options of vLLM mean here, for the command line and for `LLM(...)`."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxvllm.vllm_options import ALIASES, OBJECTS, VALUES, Option, Refused, Translated, Unneeded, find_option


class Spelling(Protocol):
    """Writes options the way their user writes them: as flags, or as keyword arguments."""

    def ours(self, field: str, value: str) -> str:
        """Returns one of our options with its value; a switch has an empty one."""

    def given(self, name: str) -> str:
        """Returns the name of an option as its user has given it."""


@dataclass(frozen=True)
class Translation:
    """The translation of options that are not ours into ours."""

    options: Mapping[str, Any]  # of ours; those that several options of vLLM stand for are text
    unneeded: Mapping[str, str]  # options that change nothing here, as they were given, and why
    problems: tuple[str, ...]  # a sentence for each option that cannot be, with the way out
    unknown: tuple[str, ...]  # names of options that nobody knows, or that mean nothing there

    @property
    def note(self) -> str | None:
        """One line that names all options that change nothing here; None: there are none."""
        if not self.unneeded:
            return None
        by_reason: dict[str, list[str]] = {}
        for name, why in self.unneeded.items():
            by_reason.setdefault(why, []).append(name)
        listed = "; ".join(f"{', '.join(names)} ({why})" for why, names in by_reason.items())
        return f"these options of vLLM change nothing here: {listed}"


@dataclass(frozen=True)
class _Meaning:
    """Several options of vLLM that together are one of ours."""

    option: Translated
    names: list[str] = field(default_factory=list)  # with their values, as they were given
    values: dict[str, Any] = field(default_factory=dict)


def translate(
    given: Mapping[str, Any], ours: Collection[str], fields: Collection[str], spelling: Spelling
) -> Translation:
    """Says what the options `given`, by their names with underscores, are here.

    A switch has the value True or False. `fields` are the names of our options, and `ours` are those that the user has
    given beside the options of vLLM.
    """
    options: dict[str, Any] = {}
    unneeded: dict[str, str] = {}
    problems: list[str] = []
    unknown: list[str] = []
    meanings: dict[str, _Meaning] = {}
    for name, value in _members(given):
        written = spelling.given(name)
        if name in ALIASES and ALIASES[name] in fields:
            options[ALIASES[name]] = value
            continue
        option, is_on = _find(name, value)
        ours_name = None if option is None or isinstance(option, Unneeded) else option.field
        if option is None or (ours_name is not None and ours_name not in fields):
            unknown.append(name)
        elif value is None or not is_on:
            unneeded[written] = "it is so without the option"
        elif isinstance(option, Unneeded):
            unneeded[written] = option.why
        elif isinstance(option, Refused) and option.takes != "nothing" and _text(value) in option.neutral:
            unneeded[written] = "it is so without the option"
        elif isinstance(option, Refused):
            instead = (
                "leave it out" if option.field is None else f"use {spelling.ours(option.field, option.value or '')}"
            )
            # What is refused for its value alone is told with it. Others may be secrets, such as hf_token.
            refused = f"{written} {_text(value)}" if name in VALUES else written
            problems.append(f"{refused}: {instead} ({option.why})")
        else:
            meaning = meanings.setdefault(option.field, _Meaning(option))
            meaning.names.append(written if option.takes == "nothing" else f"{written} {_text(value)}")
            meaning.values[name] = value
    for field_name, meaning in meanings.items():
        value, is_whole = _value(meaning)
        written = " ".join(meaning.names)
        if field_name in ours:
            problems.append(f"{written}: {spelling.given(field_name)} says the same: give one of them")
        elif is_whole:
            options[field_name] = value
        else:
            why = f" ({meaning.option.why})" if meaning.option.why else ""
            problems.append(f"{written}: use {spelling.ours(field_name, _text(value))}{why}")
    return Translation(options, unneeded, tuple(problems), tuple(unknown))


def translated_value(field: str, value: Any) -> Any:
    """Returns what a value of vLLM's is here, for an option that exists here under the same name.

    It is None where the value means the same as leaving the option out, as an `Unneeded` does and says why, and a
    `Refused` says why it cannot be.
    """
    found = (ours for pattern, ours in VALUES.get(field, {}).items() if re.fullmatch(pattern, str(value)))
    return next(found, value)


def _members(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the options, and instead of an option that is an object its members. Raises ValueError if it is none."""
    for name, value in given.items():
        if name not in OBJECTS:
            yield name, value
            continue
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ValueError(f"{name} {value} is not valid JSON: {error}") from None
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must be a JSON object, not {value!r}")
        for member, one in value.items():
            yield f"{name}.{member}", one


def _find(name: str, value: Any) -> tuple[Option | None, bool]:
    """Returns what becomes of an option, or None if nobody knows it, and whether it is on, if it is a switch."""
    found = find_option(f"no_{name}") if value is False else None
    if found is None and isinstance(ours := translated_value(name, value), Unneeded | Refused):
        return ours, True
    return found or find_option(name) or (None, True)


def _value(meaning: _Meaning) -> tuple[Any, bool]:
    """Returns the value of our option, and whether nothing is left in it for the user to fill in."""
    option, values = meaning.option, meaning.values
    if option.value == "{}":
        return next(iter(values.values())), True
    if not option.value:
        return True, True
    defaults = option.defaults or {}
    # A mesh begins with its stages only where somebody has asked for some.
    text = option.value.format_map({**defaults, **values}).removeprefix("x")
    return text, not any(default.isupper() for name, default in defaults.items() if name not in values)


def _text(value: Any) -> str:
    """Returns a value as somebody would type it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
