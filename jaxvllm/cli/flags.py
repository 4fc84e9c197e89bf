"""Command-line flags from the fields of a dataclass: one flag a field, its help the field's comment."""

import argparse
import inspect
import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any, Literal, get_args, get_origin

_FIELD = re.compile(r"^    (\w+): [^#]*?(?:#\s*(.*))?$")


def add_flags(
    parser: argparse.ArgumentParser,
    source: type,
    title: str,
    skip: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Adds `--name-of-field` for every field of the dataclass `source` that is not in `skip`.

    A flag that is not given stays out of the namespace, so that the dataclass's own default holds, unless
    `defaults` has another.
    """
    group = parser.add_argument_group(title)
    helps = _comments(source)
    for field in fields(source):
        if field.name in skip:
            continue
        default = (defaults or {}).get(field.name, None if field.default is MISSING else field.default)
        text = f"{helps.get(field.name, '')} (default: {default})".strip().replace("%", "%%")
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            dest=field.name,
            default=argparse.SUPPRESS,
            help=text,
            **_kind(field.type),
        )


def given(namespace: argparse.Namespace, source: type) -> dict[str, Any]:
    """The fields of `source` that the command line set."""
    names = {field.name for field in fields(source)}
    values = {name: value for name, value in vars(namespace).items() if name in names}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _kind(annotation: Any) -> dict[str, Any]:
    """argparse's settings for a field of that type."""
    if isinstance(annotation, UnionType):
        [annotation] = [part for part in get_args(annotation) if part is not type(None)]
    if annotation is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(annotation) is Literal:
        return {"choices": get_args(annotation)}
    if get_origin(annotation) is tuple:
        # Repeated, not a list of words: that would swallow the prompts behind it.
        element = get_args(annotation)[0]
        return {"type": element, "action": "append", "metavar": element.__name__.upper()}
    return {"type": annotation, "metavar": annotation.__name__.upper()}


def _comments(source: type) -> dict[str, str]:
    matches = (_FIELD.match(line) for line in inspect.getsource(source).splitlines())
    return {match[1]: match[2] or "" for match in matches if match}
