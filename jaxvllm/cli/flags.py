"""Makes command-line flags from a dataclass: a flag for each field, with the field's comment as its help."""

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from decimal import Decimal
from itertools import dropwhile, islice, takewhile
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.ranges import Range, range_of, without_range
from jaxvllm.vllm_options import ALIASES, JSON_LISTS

_FIELD = re.compile(r"^    (\w+): [^#]*?(?:#\s*(.*))?$")
# The part of a comment that says what happens without the option. Nobody can type None at a terminal.
_UNSET = re.compile(r"[;,.]? *(?:None|\(\))(?::| =) (.*)$")
# A number with a unit, as in vLLM: k, m, g and t are powers of 1000, K, M, G and T of 1024.
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])")
_METAVARS = {int: "N", float: "NUMBER", str: "TEXT"}
# Sampling parameters for which clients have no flag. Clients show one text, and these do not change how it is drawn.
_NOT_OF_CLIENTS = (
    "n",
    "best_of",
    "flat_logprobs",
    "stream_interval",
    "skip_clone",
    "allowed_token_ids",
    "bad_words",
    "thinking_token_budget",
    "truncate_prompt_tokens",
    "skip_reading_prefix_cache",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "output_kind",
)


def add_flags(
    parser: argparse.ArgumentParser,
    source: type,
    title: str,
    skip: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
    takes_lists: bool = False,
    shows_defaults: bool = True,
) -> None:
    """Adds `--name-of-field` for every field of the dataclass `source` that is not in `skip` and has a simple type.

    A flag that is not given is absent from the namespace, so that the dataclass's own default holds. `defaults` replace
    defaults in the help. The flag of a field with several values may be repeated; with `takes_lists`, several values
    may also follow one flag, which would swallow prompts after it. Without `shows_defaults`, for example because a
    server chooses them, the help has no defaults.
    """
    group = parser.add_argument_group(title)
    helps = _helps(source)
    for field in fields(source):
        plain = without_range(field.type)
        if field.name in skip or not _is_simple(plain):
            continue
        default = (defaults or {}).get(field.name, None if field.default is MISSING else field.default)
        names = [field.name, *(alias for alias, ours in ALIASES.items() if ours == field.name)]
        group.add_argument(
            *(flag_of(name) for name in names),
            dest=field.name,
            default=argparse.SUPPRESS,
            help=_help(helps.get(field.name, ""), default, shows_defaults).replace("%", "%%"),
            **_kind(plain, takes_lists, range_of(field.type)),
        )


def add_client_sampling_flags(parser: argparse.ArgumentParser, skip: Collection[str] = ()) -> None:
    """Adds a flag for each of the `SamplingParams` by which a client tells its server how to draw tokens."""
    title = "sampling (the server's own defaults hold for what is not given)"
    add_flags(parser, SamplingParams, title, (*_NOT_OF_CLIENTS, *skip), shows_defaults=False)


def given(namespace: argparse.Namespace, source: type, skip: Collection[str] = ()) -> dict[str, Any]:
    """Returns the fields of `source` that the command line set, without those in `skip`."""
    names = {field.name for field in fields(source)} - set(skip)
    values = {name: value for name, value in vars(namespace).items() if name in names}
    return {name: tuple(_flat(name, value)) if isinstance(value, list) else value for name, value in values.items()}


def with_model(options: dict[str, Any], name: str | None) -> dict[str, Any]:
    """Returns the options with the model that was given without --model, if any.

    Raises ValueError when --model names another model.
    """
    if name is not None and options.setdefault("model", name) != name:
        raise ValueError(f"the model is {name} and --model {options['model']}: give one")
    return options


def _flat(name: str, values: list[Any]) -> Iterator[Any]:
    for value in values:
        for one in value if isinstance(value, list) else [value]:
            if name in JSON_LISTS and one.startswith("["):
                yield from _json_list(name, one)
            else:
                yield one


def _json_list(name: str, text: str) -> list[str]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{flag_of(name)} {text} is not valid JSON: {error}") from None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{flag_of(name)} must be strings, or a JSON list of strings, not {text}")
    return values


def _is_simple(annotation: Any) -> bool:
    """Returns whether a value of this type can be typed at a terminal: it is a word, or a list of words."""
    parts = [part for part in get_args(annotation) if part is not Ellipsis and part is not type(None)]
    if get_origin(annotation) is tuple:
        return get_origin(parts[0]) is not tuple
    if get_origin(annotation) is dict:
        return False
    return all(map(_is_simple, parts)) if get_origin(annotation) in (Union, UnionType) else not is_dataclass(annotation)


def _kind(annotation: Any, takes_lists: bool, bounds: tuple[type, Range] | None) -> dict[str, Any]:
    """Returns argparse's settings for a field with this type, whose numbers must be within `bounds`."""
    if get_origin(annotation) in (Union, UnionType):  # of a Literal and None Python makes the former
        [annotation] = [part for part in get_args(annotation) if part is not type(None)]
    if annotation is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(annotation) is Literal:
        return {"choices": get_args(annotation)}
    if get_origin(annotation) is tuple:
        several = {"action": "append", **({"nargs": "+"} if takes_lists else {})}
        return several | _kind(get_args(annotation)[0], takes_lists, bounds)
    read = whole_number if annotation is int else annotation
    if bounds is not None:
        read = _within(*bounds)
    return {"type": read, "metavar": _METAVARS.get(annotation, "TEXT")}


def flag_of(name: str) -> str:
    """Returns the flag for the field `name`."""
    return f"--{name.replace('_', '-')}"


def whole(low: int, high: int) -> Callable[[str], int]:
    """Returns the `type` of a flag that stands for no field: whole numbers from `low` to `high`."""
    return _within(int, Range(low, high))


def real(low: float, high: float) -> Callable[[str], float]:
    """Returns the `type` of a flag that stands for no field: numbers from `low` to `high`."""
    return _within(float, Range(low, high))


def _within(kind: type, allowed: Range) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            value = whole_number(text) if kind is int else float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"give a number, not {text!r}") from None
        try:
            return allowed.check("", value, kind)
        except ParameterError as error:
            raise argparse.ArgumentTypeError(str(error).strip()) from None

    return read


seed_number = whole(0, 2**63 - 1)  # what jax and NumPy take


def whole_number(text: str) -> int:
    """Reads an integer such as 4096, 4k (4000) or 4K (4096), as vLLM does."""
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


def _help(comment: str, default: Any, shows_default: bool) -> str:
    """Returns the help of a field, with the default as a user would type it."""
    unset = _UNSET.search(comment)
    text = comment if unset is None else comment[: unset.start()]
    if not shows_default:
        return text
    if default is True:
        shown = "on"
    elif default is None or default is False or default == ():
        shown = "" if unset is None else unset[1]
    elif isinstance(default, tuple):
        shown = " ".join(map(str, default))
    else:
        shown = f"{default:g}" if isinstance(default, float) else str(default)
    return f"{text} (default: {shown})".strip() if shown else text


def _helps(source: type) -> dict[str, str]:
    """Returns the comments of the fields: those beside them, or else those above them.

    Names of other fields in them are replaced by their flags.
    """
    names = re.compile("|".join(rf"\b{field.name}\b" for field in fields(source) if "_" in field.name) or "$^")
    found: dict[str, str] = {}
    above: list[str] = []
    for one in reversed(source.__mro__):
        for line in _body(one) if is_dataclass(one) else ():
            if match := _FIELD.match(line):
                comment = match[2] or " ".join(above).removesuffix(".")
                found[match[1]] = names.sub(lambda name: flag_of(name[0]), comment)
            above = [*above, line.strip(" #")] if line.startswith("    # ") else []
    return found


def _body(source: type) -> list[str]:
    """Returns the lines of a class at the top of a module, the first one left out.

    `inspect.getsource` finds their end by tokenizing them, which took 12 ms of each start of a command.
    """
    lines = iter(inspect.getsource(sys.modules[source.__module__]).splitlines())
    after = dropwhile(lambda line: re.match(rf"class {source.__name__}\b", line) is None, lines)
    return list(takewhile(lambda line: not line or line[0].isspace() or line[0] in "#)", islice(after, 1, None)))
