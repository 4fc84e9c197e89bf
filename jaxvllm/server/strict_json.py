"""What is JSON, strictly, and neither too deep nor in too many parts: checked before any other parser sees a body."""

import re
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

# Deeper than any request of any client; a parser in Python recurses to about 1,000.
MAX_DEPTH = 64
# Parsing and checking cost time by their parts and not by their bytes, and meanwhile no stream moves: of 8 MB, a text
# takes 10 ms and 645,270 unknown fields 5 s. At these limits msgspec takes 0.1 s, and json and pydantic 0.15 s.
MAX_ITEMS = 2**20  # of all arrays and objects together: a million token ids
MAX_CONTAINERS = 2**17  # arrays and objects: 10,000 messages of 12 each
MAX_NAMES = 2**17  # in all objects together: 10,000 messages of 12 each
MAX_NAMES_OF_ONE = 2**12  # in one object: pydantic makes an error of each that is wrong, in 6 us

_OPENING, _CLOSING, _COMMA, _COLON = b"[{", b"]}", b",", b":"
# What each byte adds to the depth.
_STEPS = np.zeros(256, np.int8)
_STEPS[list(_OPENING)] = 1
_STEPS[list(_CLOSING)] = -1
_IS_MARK = np.zeros(256, np.bool_)
_IS_MARK[list(_OPENING + _CLOSING + _COMMA + _COLON)] = True


class JsonError(ValueError):
    """A body that is refused, and the field at fault where there is one."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


def check_json(body: bytes) -> None:
    """JsonError unless the body is one JSON text in UTF-8, of RFC 8259 to the letter, within the limits above.

    So no NaN, no number beyond a double, no half of a surrogate pair and no byte order mark. The last of several
    equal names in an object holds.
    """
    if not _is_simple(body):
        JsonMarks.of(body).check()
    try:
        msgspec.json.decode(body)
    except UnicodeDecodeError:
        raise JsonError("the body is not valid UTF-8") from None
    except msgspec.DecodeError as error:
        # It says what and where, never what the body holds.
        raise JsonError(f"the body is not valid JSON: {str(error).removeprefix('JSON is malformed: ')}") from None


def _is_simple(body: bytes) -> bool:
    """Whether it is within all limits even if every mark in a text counts. The usual body takes some microseconds."""
    return (
        body.count(b"[") + body.count(b"{") <= MAX_DEPTH
        and body.count(_COMMA) < MAX_ITEMS
        and body.count(_COLON) <= MAX_NAMES_OF_ONE
    )


@dataclass(frozen=True)
class JsonMarks:
    """The brackets, commas and colons of a body outside its strings, found without recursion. It may be no JSON.

    8 MB, the worst of them, take 0.3 s, in pieces of 20 ms: numpy lets other threads run while it counts.
    """

    plain: npt.NDArray[np.uint8]  # the body without escapes
    at: npt.NDArray[np.intp]  # where in it each mark is
    marks: npt.NDArray[np.uint8]
    depths: npt.NDArray[np.int32]  # arrays and objects that are open behind each mark

    @classmethod
    def of(cls, body: bytes) -> "JsonMarks":
        """Those of `body`."""
        # Without escapes every quote opens or closes a string.
        plain = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
        is_outside = np.cumsum(plain == ord('"'), dtype=np.uint8) % 2 == 0
        at = np.flatnonzero(_IS_MARK[plain] & is_outside)
        marks = plain[at]
        return cls(plain, at, marks, np.cumsum(_STEPS[marks], dtype=np.int32))

    @property
    def depth(self) -> int:
        """How many arrays and objects are open at once, at most."""
        return int(self.depths.max(initial=0))

    @property
    def num_names_of_one(self) -> int:
        """Names in the object that has the most. For bodies within `MAX_DEPTH`."""
        is_opening, is_colon = _STEPS[self.marks] > 0, self.marks == ord(_COLON)
        events = np.flatnonzero(is_opening | is_colon)
        # Among those of one depth, in their order, a colon belongs to the last opening bracket before it.
        events = events[np.argsort(self.depths[events].astype(np.int8), kind="stable")]
        owner = np.cumsum(is_opening[events])
        return int(np.bincount(owner[is_colon[events]]).max(initial=0))

    def check(self) -> None:
        """JsonError when one of the limits is exceeded."""
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
        """The field of the body with more than half of the marks that are counted; None if there is none."""
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
