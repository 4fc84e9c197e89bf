"""`Range`: the numbers that an option may have, declared in its type and checked wherever the option comes from.

    request_rate: Annotated[float, Range(1e-6, math.inf)] = math.inf

`check_ranges` reads the declaration when a dataclass is made, and `jaxvllm.cli.flags` when a command line is read. So
there is no number, such as NaN, 1e-300 or one of 400 digits, that only the code which computes with it would notice.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from jaxvllm.core.value_checks import MAX_INT32, integer, number


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`. NaN is in no range."""

    low: float
    high: float

    def check(self, name: str, value: object, kind: type) -> Any:
        """Returns `value` as the `kind`, int or float. Raises ParameterError, which calls it `name`, beyond the range.

        `low` and `high` must be ints where the kind is.
        """
        if kind is int:
            return integer(name, value, int(self.low), int(self.high))
        return number(name, value, self.low, self.high)


# Things of which a computer holds some: requests, runs, pages. Ten million requests are simulated in some minutes.
MOST = 10**7
# Replicas whose deployment is simulated. Each has its own scheduler and pages in this process.
MOST_REPLICAS = 1024
Count = Annotated[int, Range(1, MOST)]
CountOrZero = Annotated[int, Range(0, MOST)]
Tokens = Annotated[int, Range(1, MAX_INT32)]
TokensOrZero = Annotated[int, Range(0, MAX_INT32)]
Share = Annotated[float, Range(0.001, 1)]
Seed = Annotated[int, Range(0, 2**63 - 1)]  # what jax and NumPy take


def without_range(annotation: Any) -> Any:
    """Returns the type `annotation` without ranges, such as `int | None`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return get_args(annotation)[0]
    if origin in (Union, UnionType):  # Annotated makes a typing.Union of `|`
        return reduce(or_, map(without_range, get_args(annotation)))
    if origin is tuple:
        return tuple[tuple(map(without_range, get_args(annotation)))]  # type: ignore[misc]
    return annotation


def range_of(annotation: Any) -> tuple[type, Range] | None:
    """Returns the kind and the range of the numbers in a type, in a part of a union, or in the items of a tuple."""
    return next(_ranges(annotation), None)


def _ranges(annotation: Any) -> Iterator[tuple[type, Range]]:
    if get_origin(annotation) is Annotated:
        kind, *others = get_args(annotation)
        yield from ((kind, one) for one in others if isinstance(one, Range))
    else:
        for part in get_args(annotation):
            yield from _ranges(part)


def check_ranges(options: Any, written_as_flags: bool = True) -> None:
    """Raises ParameterError for a field of the dataclass `options` whose number is not in the range of its type.

    None is in every range: another check says where it is allowed. The error names the field, or its flag.
    """
    for field in fields(options):
        if (found := range_of(field.type)) is None:
            continue
        kind, allowed = found
        value = getattr(options, field.name)
        name = f"--{field.name.replace('_', '-')}" if written_as_flags else field.name
        for one in value if isinstance(value, tuple | list) else () if value is None else (value,):
            allowed.check(name, one, kind)
