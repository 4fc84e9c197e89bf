"""What is JSON, strictly, and not too deep: checked before any other parser sees a body."""

from typing import Any

import msgspec
import numpy as np

# Deeper than any request of any client; a parser in Python recurses to about 1,000.
MAX_DEPTH = 64
# What each byte adds to the depth.
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1


def check_json(body: bytes) -> None:
    """ValueError unless the body is one JSON text in UTF-8, of RFC 8259 to the letter.

    So no NaN, no number beyond a double, no half of a surrogate pair, no byte order mark, and no more than
    `MAX_DEPTH` arrays and objects in each other. The last of several equal names in an object holds.
    """
    if depth(body) > MAX_DEPTH:
        raise ValueError(f"the body is nested deeper than {MAX_DEPTH} arrays and objects")
    try:
        msgspec.json.decode(body, type=Any)
    except UnicodeDecodeError:
        raise ValueError("the body is not valid UTF-8") from None
    except msgspec.DecodeError as error:
        # It says what and where, never what the body holds.
        raise ValueError(f"the body is not valid JSON: {str(error).removeprefix('JSON is malformed: ')}") from None


def depth(body: bytes) -> int:
    """How many arrays and objects are open at once, at most, without recursion; brackets in strings do not count.

    The usual body, which has few brackets of any kind, takes a microsecond. For it the result is only an upper bound.
    """
    most = body.count(b"[") + body.count(b"{")
    if most <= MAX_DEPTH:
        return most
    # Without escapes every quote opens or closes a string. 8 MB, the worst of them, take 0.1 s.
    plain = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    is_outside = np.cumsum(plain == ord('"'), dtype=np.uint8) % 2 == 0
    return int(np.cumsum(_STEPS[plain] * is_outside, dtype=np.int32).max(initial=0))
