"""Command-line flags from the fields of a dataclass: one flag a field, its help the field's comment."""

import argparse
import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, fields
from decimal import Decimal
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from jaxvllm.vllm_options import ALIASES

_FIELD = re.compile(r"^    (\w+): [^#]*?(?:#\s*(.*))?$")
# How comments say what happens without an option. Somebody at a terminal cannot give None.
_UNSET = re.compile(r"[;,.]? *(?:None|\(\))(?::| =) (.*)$")
# As in vLLM: k, m, g and t count by thousands, K, M, G and T by 1024.
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])")
_METAVARS = {int: "N", float: "NUMBER", str: "TEXT"}


def add_flags(
    parser: argparse.ArgumentParser,
    source: type,
    title: str,
    skip: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
    takes_lists: bool = False,
) -> None:
    """Adds `--name-of-field` for every field of the dataclass `source` that is not in `skip`.

    A flag that is not given stays out of the namespace, so that the dataclass's own default holds, unless
    `defaults` has another. A field of several values is a flag that may be repeated; with `takes_lists` several values
    may follow one flag, too, which would swallow prompts that stand behind it.
    """
    group = parser.add_argument_group(title)
    helps = _helps(source)
    for field in fields(source):
        if field.name in skip:
            continue
        default = (defaults or {}).get(field.name, None if field.default is MISSING else field.default)
        names = [field.name, *(alias for alias, ours in ALIASES.items() if ours == field.name)]
        group.add_argument(
            *(flag_of(name) for name in names),
            dest=field.name,
            default=argparse.SUPPRESS,
            help=_with_default(helps.get(field.name, ""), default).replace("%", "%%"),
            **_kind(field.type, takes_lists),
        )


def given(namespace: argparse.Namespace, source: type) -> dict[str, Any]:
    """The fields of `source` that the command line set."""
    names = {field.name for field in fields(source)}
    values = {name: value for name, value in vars(namespace).items() if name in names}
    return {name: tuple(_flat(value)) if isinstance(value, list) else value for name, value in values.items()}


def with_model(options: dict[str, Any], name: str | None) -> dict[str, Any]:
    """The options with the model that was given without --model, if any. ValueError when --model names another."""
    if name is not None and options.setdefault("model", name) != name:
        raise ValueError(f"the model is {name} and --model {options['model']}: give one")
    return options


def _flat(values: list[Any]) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, list) else [value]


def _kind(annotation: Any, takes_lists: bool) -> dict[str, Any]:
    """argparse's settings for a field of that type."""
    if isinstance(annotation, UnionType):
        [annotation] = [part for part in get_args(annotation) if part is not type(None)]
    if annotation is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(annotation) is Literal:
        return {"choices": get_args(annotation)}
    if get_origin(annotation) is tuple:
        several = {"action": "append", **({"nargs": "+"} if takes_lists else {})}
        return several | _kind(get_args(annotation)[0], takes_lists)
    return {"type": whole_number if annotation is int else annotation, "metavar": _METAVARS.get(annotation, "TEXT")}


def flag_of(name: str) -> str:
    """How the field `name` is written on the command line."""
    return f"--{name.replace('_', '-')}"


def whole_number(text: str) -> int:
    """The integer that a user typed, such as 4096, 4k (4000) or 4K (4096), as vLLM reads them."""
    match = _SIZE.fullmatch(text)
    if match is not None:
        number, unit = match.groups()
        base = 1000 if unit.islower() else 1024
        size = Decimal(number) * base ** (1 + "kmgt".index(unit.lower()))
        if size == int(size):
            return int(size)
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"give a whole number such as 4096, 4k or 4K, not {text!r}") from None


def _with_default(comment: str, default: Any) -> str:
    """The help of a field, with the default as somebody at a terminal would type it."""
    unset = _UNSET.search(comment)
    text = comment if unset is None else comment[: unset.start()]
    if default is True:
        shown = "on"
    elif default is None or default is False or default == ():
        shown = "" if unset is None else unset[1]
    else:
        shown = f"{default:g}" if isinstance(default, float) else str(default)
    return f"{text} (default: {shown})".strip() if shown else text


def _helps(source: type) -> dict[str, str]:
    """The comments of the fields. Other fields that they name are flags here."""
    names = re.compile("|".join(rf"\b{field.name}\b" for field in fields(source) if "_" in field.name) or "$^")
    matches = (_FIELD.match(line) for line in inspect.getsource(source).splitlines())
    return {match[1]: names.sub(lambda name: flag_of(name[0]), match[2] or "") for match in matches if match}
