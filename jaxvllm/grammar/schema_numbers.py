"""The numbers of a JSON schema: each reaches llguidance as one that it takes exactly, or is named in an error.

llguidance reads every number as a double, without rounding correctly, and builds regular expressions from it: with
64-bit integers for the digits, 32-bit integers for `multipleOf`, and a group in a group for each digit after the point.
"""

import math
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple, TypeGuard

_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_BOUNDS = (*_LOWER, *_UPPER)
_VALUES = ("const", "enum")
_LEAST_SIZES = ("minLength", "minItems", "minProperties")
_MOST_SIZES = ("maxLength", "maxItems", "maxProperties")
# The keywords by which several schemas hold for one value.
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties")

# Doubles hold all integers up to this one.
MAX_INTEGER = 2**53
# Bounds of integers, which llguidance turns into 64-bit integers, may be larger where doubles hold them. From 10**18 on
# it fails where there is no other bound.
_MAX_INTEGER_BOUND = 10**18
_MAX_INT64 = 2**63 - 1  # it is what llguidance makes of the double 2**63, which it reads
# The expression of a bound with 100 digits after the point is nested too deeply, that of one with 60 is not.
MAX_FRACTION_DIGITS = 50
_NEXT_TO_ZERO = float(f"1e-{MAX_FRACTION_DIGITS}")
# llguidance multiplies a remainder by ten with 32 bits.
MAX_MULTIPLE = 2**32 // 10 - 1
# It looks at every remainder but those of the factors 2 and 5: compiling 65536 takes 0.1 s, 99999 2 s, 999999 minutes.
MAX_MULTIPLE_REMAINDERS = 2**16
MOST_LISTED = 3  # multiples between two bounds
MAX_SIZE = 2**32 - 1  # of a repetition in an expression

_LIMIT = f"the limit is {MAX_INTEGER} (2**53), beyond which digits would be lost"


class UnheldNumber(NamedTuple):
    """A number of a schema that the grammar would not take as it is."""

    keyword: str
    place: str  # the JSON pointer of the schema that has the keyword
    value: int | float
    rule: str

    def __str__(self) -> str:
        shown = str(self.value)
        shown = shown if len(shown) <= 40 else f"{shown[:20]}... ({len(shown)} characters)"
        return f'the keyword "{self.keyword}" at {self.place} with the number {shown}: {self.rule}'


def unheld_numbers(schema: Any) -> list[UnheldNumber]:
    """Returns the numbers of `schema` that the grammar cannot hold, wherever they are in it."""
    found = []
    multiples: dict[Fraction, UnheldNumber] = {}
    is_combined = False
    for place, part in _objects("#", schema):
        is_combined = is_combined or any(name in part for name in _COMBINING)
        for keyword, value in part.items():
            for number in _numbers(value) if keyword in _VALUES else [value]:
                if not _is_number(number):
                    continue
                rule = _broken_rule(keyword, number, part)
                if rule is not None:
                    found.append(UnheldNumber(keyword, place, number, rule))
                elif keyword == "multipleOf":
                    rule = "together with the schema's other multiples it exceeds the limit: use fewer different ones"
                    multiples[_exact(number)] = UnheldNumber(keyword, place, number, rule)
    if is_combined and len(multiples) > 1:
        scale = math.lcm(*(multiple.denominator for multiple in multiples))
        scaled = [int(multiple * scale) for multiple in multiples]
        if math.lcm(*scaled) * max(scaled) > MAX_MULTIPLE:
            found.append(multiples[max(multiples)])
    return found


def hold_numbers(part: dict[str, Any]) -> None:
    """Rewrites the numbers of one schema, which are all held, so that llguidance takes each as it was meant."""
    for keyword in (*_LEAST_SIZES, *_MOST_SIZES):
        if _is_number(value := part.get(keyword)) and value == int(value):
            part[keyword] = int(value)
            if keyword in _MOST_SIZES and value > MAX_SIZE:  # nothing is as large
                del part[keyword]
    for keyword in _VALUES:
        if keyword in part:
            part[keyword] = _held_values(part[keyword])
    _hold_bounds(part)


def _objects(place: str, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields every object in a JSON value with its JSON pointer. A `$ref` may make a schema of each of them."""
    found = [(place, value)]
    while found:
        place, value = found.pop()
        if isinstance(value, dict):
            yield place, value
        children = value.items() if isinstance(value, dict) else enumerate(value)
        for key, child in children:
            if isinstance(child, dict | list):
                found.append((f"{place}/{str(key).replace('~', '~0').replace('/', '~1')}", child))


def _numbers(value: Any) -> Iterator[Any]:
    """Yields every number in a JSON value."""
    found = [value]
    while found:
        value = found.pop()
        if isinstance(value, dict | list):
            found += value.values() if isinstance(value, dict) else value
        elif _is_number(value):
            yield value


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _broken_rule(keyword: str, value: int | float, part: dict[str, Any]) -> str | None:
    """Returns what is wrong with a number, and the way out, or None."""
    if not math.isfinite(value):
        return "it is no number that JSON has, or larger than a double can be: leave it out"
    if keyword in _LEAST_SIZES and value > MAX_SIZE:
        return f"the limit is {MAX_SIZE}: make it smaller"
    if keyword == "multipleOf":
        return _broken_rule_of_multiple(value)
    if keyword in _VALUES:
        if abs(value) > MAX_INTEGER:
            return f"{_LIMIT}: give it as a string"
    elif keyword in _BOUNDS:
        if abs(value) > MAX_INTEGER and not _is_integer_bound(keyword, value, part):
            return f"{_LIMIT}: give a bound within it, or none"
    else:
        return None
    if isinstance(value, float) and (_num_fraction_digits(value) > MAX_FRACTION_DIGITS or _as_read(value) is None):
        return f"it has more than {MAX_FRACTION_DIGITS} digits after the point, or more than 15 in all: use fewer"
    return None


def _broken_rule_of_multiple(value: int | float) -> str | None:
    if value <= 0:
        return "it must be above zero"
    digits = int(_exact(value) * 10 ** _num_fraction_digits(value))
    if digits > MAX_MULTIPLE:
        return f"the limit is {MAX_MULTIPLE}, of its digits without the point: use a smaller one, or fewer digits"
    for factor in (2, 5):
        while digits % factor == 0:
            digits //= factor
    if digits > MAX_MULTIPLE_REMAINDERS:
        return f"the limit is {MAX_MULTIPLE_REMAINDERS}, of its digits without factors 2 and 5: use a smaller one"
    if _as_multiple(value) is None:
        return "its digits cannot be kept: use fewer"
    return None


def _is_integer_bound(keyword: str, value: int | float, part: dict[str, Any]) -> bool:
    """Returns whether llguidance holds a bound above `MAX_INTEGER` exactly, because it is one of integers."""
    if not _has_integers_only(part):
        return False
    is_exact = float(value) == value and abs(value) < _MAX_INTEGER_BOUND and keyword in ("minimum", "maximum")
    return is_exact or (keyword == "maximum" and value == _MAX_INT64)


def _held_values(value: Any) -> Any:
    """Returns the values of `const` or `enum` as llguidance reads them rightly."""
    if isinstance(value, dict):
        return {key: _held_values(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_held_values(one) for one in value]
    if isinstance(value, float):
        return int(value) if value == int(value) else _as_read(value)
    return value


def _hold_bounds(part: dict[str, Any]) -> None:
    """Rewrites bounds that exclude a number as bounds that include the next double.

    llguidance takes 0 for `{"exclusiveMinimum": 0, "maximum": 0.5}`. And what it writes between a bound and the next
    double, such as 0.99999999999999999 below 1, most programs read as the bound.
    """
    for (including, excluding), toward, tighter in ((_LOWER, math.inf, max), (_UPPER, -math.inf, min)):
        inclusive, exclusive = part.get(including), part.pop(excluding, None)
        if isinstance(exclusive, bool):  # of draft 4
            exclusive, inclusive = (inclusive, None) if exclusive else (None, inclusive)
        if exclusive is not None and not _is_number(exclusive):
            part[excluding] = exclusive  # llguidance says what is wrong
            exclusive = None
        values = [value for value in (inclusive, _beside(exclusive, toward)) if _is_number(value)]
        if values:
            part[including] = tighter(values)
    if _is_number(multiple := part.get("multipleOf")):
        part["multipleOf"] = _as_multiple(multiple)
        _hold_bounds_of_multiples(part, _exact(multiple))
    for keyword in ("minimum", "maximum"):
        if isinstance(value := part.get(keyword), float):
            part[keyword] = int(value) if value == int(value) else _as_read(value)


def _beside(bound: Any, toward: float) -> Any:
    """Returns the number nearest to `bound`, toward an infinity, that llguidance reads rightly."""
    if not bound:
        return None if bound is None else math.copysign(_NEXT_TO_ZERO, toward)
    beside = math.nextafter(bound, toward)
    while _as_read(beside) is None:
        beside = math.nextafter(beside, toward)
    return beside


def _hold_bounds_of_multiples(part: dict[str, Any], multiple: Fraction) -> None:
    """Rewrites the bounds of multiples as the first and the last multiple within them, or as these where there are few.

    Otherwise llguidance takes neither 2.7 nor 2.70 for `{"multipleOf": 0.1, "maximum": 2.75}`; and it divides doubles
    to see whether there is a multiple at all, and finds no multiple of 0.1 from 0.3 to 0.3.
    """
    step = Fraction(multiple.numerator) if _has_integers_only(part) else multiple
    bounds = {}
    for keyword, rounded in (("minimum", math.ceil), ("maximum", math.floor)):
        if _is_number(value := part.get(keyword)):
            bounds[keyword] = bound = rounded(_exact(value) / step) * step
            if _exact(nearest := float(bound)) == bound and abs(bound) <= MAX_INTEGER and _as_read(nearest) is not None:
                part[keyword] = nearest
    if len(bounds) < 2:
        return
    count = (bounds["maximum"] - bounds["minimum"]) / step + 1
    if count < 1:
        part |= {"minimum": 1, "maximum": 0}
    elif count <= MOST_LISTED and part.get("type") in ("integer", "number") and isinstance(part.get("allOf", []), list):
        values = [float(bounds["minimum"] + index * step) for index in range(int(count))]
        part["allOf"] = [*part.get("allOf", []), {"enum": _held_values(values)}]
        for keyword in ("multipleOf", "minimum", "maximum"):
            del part[keyword]


def _has_integers_only(part: dict[str, Any]) -> bool:
    """Returns whether all numbers that the type of a schema allows are integers."""
    types = part.get("type")
    return types == "integer" or (isinstance(types, list) and "number" not in types)


def _exact(value: int | float) -> Fraction:
    """Returns the number as it is written."""
    return Fraction(Decimal(repr(value)))


def _num_fraction_digits(value: int | float) -> int:
    """Returns how many digits a number has after its point when it is written without an exponent."""
    exponent = Decimal(repr(value)).normalize().as_tuple().exponent
    assert isinstance(exponent, int)
    return max(0, -exponent)


def _as_read(value: float) -> float | None:
    """Returns the double that llguidance reads as `value`, or None.

    It divides the digits, rounded to a double, by a power of ten: of random doubles it reads every tenth as a neighbor.
    """
    if value == int(value):  # it is written as an integer
        return value
    return next((near for near in _neighbors(value) if _read(near) == value), None)


def _as_multiple(value: int | float) -> int | float | None:
    """Returns the double of which llguidance makes the decimal `value`, or None. It makes another number of 0.07."""
    if isinstance(value, int):
        return value
    return next((near for near in _neighbors(value) if _decimal(_read(near)) == _exact(value)), None)


def _neighbors(value: float) -> Iterator[float]:
    """Yields a number and those next to it, the nearest first."""
    yield value
    below = above = value
    for _ in range(8):
        below, above = math.nextafter(below, -math.inf), math.nextafter(above, math.inf)
        yield from (below, above)


def _read(value: float) -> float:
    """Returns what llguidance reads where `value` is written."""
    sign, digits, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int)
    power = float(f"1e{abs(exponent)}")
    significand = float(int("".join(map(str, digits))))
    return math.copysign(significand * power if exponent >= 0 else significand / power, -1 if sign else 1)


def _decimal(value: float) -> Fraction:
    """Returns the decimal that llguidance makes of a double."""
    exponent = 0
    while value != math.floor(value):
        value *= 10
        exponent += 1
    return Fraction(int(value), 10**exponent)
