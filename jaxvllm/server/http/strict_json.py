"""Checks that a body is strict JSON, neither too deep nor in too many parts, before any other parser sees it."""

import re
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

# No client's request is as deep as this. A parser in Python recurses to about 1,000.
MAX_DEPTH = 64
# The cost of parsing and checking depends on the number of parts, not of bytes, and no stream moves meanwhile: of 8 MB,
# a text takes 10 ms, and 645,270 unknown fields take 5 s. At these limits msgspec takes 0.1 s, and json and pydantic
# take 0.15 s.
MAX_ITEMS = 2**20  # in all arrays and objects together: enough for a million token ids
MAX_CONTAINERS = 2**17  # arrays and objects: enough for 10,000 messages of 12 each
MAX_NAMES = 2**17  # in all objects together: enough for 10,000 messages of 12 each
MAX_NAMES_OF_ONE = 2**12  # in one object: pydantic takes 6 us to make an error of each wrong one

_OPENING, _CLOSING, _COMMA, _COLON = b"[{", b"]}", b",", b":"
# The change of the depth at each byte.
_STEPS = np.zeros(256, np.int8)
_STEPS[list(_OPENING)] = 1
_STEPS[list(_CLOSING)] = -1
_IS_MARK = np.zeros(256, np.bool_)
_IS_MARK[list(_OPENING + _CLOSING + _COMMA + _COLON)] = True


class JsonError(ValueError):
    """Raised for a body that is refused. `param` is the field at fault, if there is one."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


def check_json(body: bytes) -> None:
    """Raises JsonError unless the body is one JSON text in UTF-8 as RFC 8259 defines it, within the limits above.

    So it refuses NaN, numbers too large for a double, half a surrogate pair and a byte order mark. When an object has
    the same name several times, the last one counts.
    """
    if not _is_simple(body):
        JsonMarks.of(body).check()
    try:
        msgspec.json.decode(body)
    except UnicodeDecodeError:
        raise JsonError("the body is not valid UTF-8") from None
    except msgspec.DecodeError as error:
        # The message says what is wrong and where, but never quotes the body.
        raise JsonError(f"the body is not valid JSON: {str(error).removeprefix('JSON is malformed: ')}") from None


def _is_simple(body: bytes) -> bool:
    """Returns whether the body is within all limits even if marks inside texts count. It usually takes microseconds."""
    return (
        body.count(b"[") + body.count(b"{") <= MAX_DEPTH
        and body.count(_COMMA) < MAX_ITEMS
        and body.count(_COLON) <= MAX_NAMES_OF_ONE
    )


@dataclass(frozen=True)
class JsonMarks:
    """The brackets, commas and colons of a body outside its strings, found without recursion. The body may be no JSON.

    The worst body of 8 MB takes 0.3 s, in pieces of 20 ms, because numpy lets other threads run while it counts.
    """

    plain: npt.NDArray[np.uint8]  # the body without escapes
    at: npt.NDArray[np.intp]  # position of each mark in `plain`
    marks: npt.NDArray[np.uint8]
    depths: npt.NDArray[np.int32]  # number of arrays and objects that are open after each mark

    @classmethod
    def of(cls, body: bytes) -> "JsonMarks":
        """Finds the marks of `body`."""
        # Without escapes, every quote opens or closes a string.
        plain = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
        is_outside = np.cumsum(plain == ord('"'), dtype=np.uint8) % 2 == 0
        at = np.flatnonzero(_IS_MARK[plain] & is_outside)
        marks = plain[at]
        return cls(plain, at, marks, np.cumsum(_STEPS[marks], dtype=np.int32))

    @property
    def depth(self) -> int:
        """The largest number of arrays and objects that are open at once."""
        return int(self.depths.max(initial=0))

    @property
    def num_names_of_one(self) -> int:
        """The number of names in the object that has the most. The body must be within `MAX_DEPTH`."""
        is_opening, is_colon = _STEPS[self.marks] > 0, self.marks == ord(_COLON)
        events = np.flatnonzero(is_opening | is_colon)
        # Among the marks of one depth, in their order, a colon belongs to the last opening bracket before it.
        events = events[np.argsort(self.depths[events].astype(np.int8), kind="stable")]
        owner = np.cumsum(is_opening[events])
        return int(np.bincount(owner[is_colon[events]]).max(initial=0))

    def check(self) -> None:
        """Raises JsonError when the body exceeds one of the limits."""
        if self.depth > MAX_DEPTH:
            raise JsonError(f"the body is nested deeper than {MAX_DEPTH} arrays and objects")
        is_opening, is_colon = _STEPS[self.marks] > 0, self.marks == ord(_COLON)
        for is_counted, most, what in (
            (is_opening, MAX_CONTAINERS, "arrays and objects"),
            (is_colon, MAX_NAMES, "names in objects"),
            (self.marks == ord(_COMMA), MAX_ITEMS, "items of arrays and objects"),
        ):
            count = int(np.count_nonzero(is_counted))
            if count > most:
                field = self._field_with_most(is_counted)
                raise JsonError(
                    f"{field or 'the body'} is too large: the request has {count} {what}, and {most} are the most: "
                    "send several requests",
                    field,
                )
        if (count := self.num_names_of_one) > MAX_NAMES_OF_ONE:
            field = self._field_with_most(is_colon)
            raise JsonError(
                f"{field or 'the body'} is too large: an object has {count} names, and {MAX_NAMES_OF_ONE} are the most",
                field,
            )

    def _field_with_most(self, is_counted: npt.NDArray[np.bool_]) -> str | None:
        """Returns the field of the body that has more than half of the counted marks, or None if no field has."""
        fields = np.flatnonzero((self.marks == ord(_COLON)) & (self.depths == 1))
        if not len(fields):
            return None
        counts = np.add.reduceat(is_counted, fields, dtype=np.intp)
        largest = int(counts.argmax())
        if 2 * counts[largest] <= np.count_nonzero(is_counted):
            return None
        end = int(self.at[fields[largest]])
        name = re.search(rb'"(\w{1,64})"\s*$', self.plain[max(0, end - 100) : end].tobytes())
        return None if name is None else name[1].decode()
