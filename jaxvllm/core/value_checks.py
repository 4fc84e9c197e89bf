"""Checks of the values that callers give. Each returns the value in its stored form, or raises a `ParameterError`."""

import json
import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from jaxvllm.core.errors import ParameterError

MAX_INT32 = 2**31 - 1  # counts and token ids cross to the device as int32


def integer(param: str, value: object, low: int, high: int, what: str | None = None) -> int:
    """Returns `value` as an int. Errors call it `what`, or by the name of its parameter."""
    rule = f"{what or param} must be an integer from {low} to {high}, not"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ParameterError(f"{rule} {shown(value)}", param)
    number = int(value)
    if not low <= number <= high:
        raise ParameterError(f"{rule} {number}", param)
    return number


def number(param: str, value: object, low: float, high: float) -> float:
    """Returns `value` as a float from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ParameterError(f"{param} must be a number from {low:g} to {high:g}, not {shown(value)}", param)
    try:
        result = float(value)
    except OverflowError:  # a huge int
        result = math.inf
    if not low <= result <= high:  # NaN is never within
        raise ParameterError(f"{param} must be a number from {low:g} to {high:g}, not {value}", param)
    return result


def boolean(param: str, value: object) -> bool:
    """Returns `value`, which must be True or False."""
    if type(value) is not bool:
        raise ParameterError(f"{param} must be True or False, not {value!r}", param)
    return value


def strings(param: str, value: object, most: int, most_chars: int, what: str) -> tuple[str, ...]:
    """Returns a string, a list of strings or None as a tuple of at most `most` strings of 1 to `most_chars`.

    Errors call a string `what`.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, list | tuple):
        raise ParameterError(f"{param} must be a string or a list of strings, not {shown(value)}", param)
    if len(value) > most:
        raise ParameterError(f"{param} has {len(value)} strings, the limit is {most}: give fewer", param)
    for item in value:
        if not isinstance(item, str):
            raise ParameterError(f"{param} must be a string or a list of strings, not a list with {shown(item)}", param)
        if not 1 <= len(item) <= most_chars:
            raise ParameterError(f"{what} must have 1 to {most_chars} characters, not {len(item)}", param)
    return tuple(value)


def token_ids(param: str, value: object, most: int, what: str) -> tuple[int, ...]:
    """Returns a list of at most `most` token ids as a tuple, () for None. Errors call an item `what`."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise ParameterError(f"{param} must be a list of token ids, not {shown(value)}", param)
    if len(value) > most:
        raise ParameterError(f"{param} has {len(value)}, the limit is {most}: give fewer", param)
    names = (f"{param}[{index}]" for index in range(len(value)))
    return tuple(integer(name, item, 0, MAX_INT32, f"{name}: {what}") for name, item in zip(names, value, strict=True))


def token_biases(param: str, value: object, most: int, limit: float) -> tuple[tuple[int, float], ...]:
    """Returns a mapping from token ids (or their digits, as in JSON) to numbers as sorted pairs, () for None.

    As in vLLM, a number beyond `limit` means `limit`.
    """
    if value is None:
        return ()
    if isinstance(value, tuple):  # the stored form
        value = dict(value)
    if not isinstance(value, Mapping):
        raise ParameterError(f"{param} must be an object from token ids to numbers, not {shown(value)}", param)
    if len(value) > most:
        raise ParameterError(f"{param} has {len(value)} tokens, the limit is {most}: give fewer", param)
    pairs = {}
    for key, bias in value.items():
        token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 11 else key
        token_id = integer(param, token_id, 0, MAX_INT32, f"{param}: a token id")
        pairs[token_id] = min(max(number(param, bias, -math.inf, math.inf), -limit), limit)
    return tuple(sorted(pairs.items()))


def json_object(param: str, value: object) -> dict[str, Any]:
    """Returns a mapping, or the JSON object that a text is, as a dict."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ParameterError(f"{param} {shown(value)} is not valid JSON: {error}", param) from None
    if not isinstance(value, Mapping):
        raise ParameterError(f"{param} must be a JSON object, not {shown(value)}", param)
    return dict(value)


def json_members(value: object) -> Mapping[str, Any]:
    """Returns an object that is given as a mapping or as JSON. Raises ValueError for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            pass
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a JSON object, not {value!r}")
    return value


def check_members(
    members: Mapping[str, Any], names: Sequence[str], no_choice: Mapping[str, tuple[tuple[Any, ...], str]] | None = None
) -> None:
    """Raises ValueError for a member that is none of `names`.

    Members that exist elsewhere only are in `no_choice`. Each has the values that change nothing, and the reason why
    another one is an error.
    """
    known = no_choice or {}
    for name, (neutral, why) in known.items():
        if name in members and members[name] not in neutral:
            raise ValueError(f"{name} = {members[name]!r} is not supported ({why}): leave it out")
    if unknown := [str(name) for name in members if name not in names and name not in known]:
        raise ValueError(f"has no {unknown[0]!r}: it may have {', '.join(names)}")


def shown(value: object) -> str:
    """Returns a short quotation of the value for an error message, however long the value is."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
