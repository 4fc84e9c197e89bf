"""`JsonScanner`: checks one JSON value that arrives in parts, in one pass."""

import re

# Arguments nested more deeply than this are malformed: the JSON parsers of clients recurse.
MAX_DEPTH = 64

WHITESPACE = " \t\n\r"
_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # of a string, up to what needs a closer look
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPES = frozenset('"\\/bfnrt')
_DIGITS = frozenset("0123456789")
# From each state of a number and a character ("d": any digit) to the next state.
_NUMBER = {
    "-": {"0": "zero", "d": "integer"},
    "zero": {".": ".", "e": "e", "E": "e"},
    "integer": {"d": "integer", ".": ".", "e": "e", "E": "e"},
    ".": {"d": "fraction"},
    "fraction": {"d": "fraction", "e": "e", "E": "e"},
    "e": {"+": "sign", "-": "sign", "d": "exponent"},
    "sign": {"d": "exponent"},
    "exponent": {"d": "exponent"},
}
_COMPLETE_NUMBER = frozenset(("zero", "integer", "fraction", "exponent"))
_WORDS = {"t": "true", "f": "false", "n": "null"}


class JsonScanner:
    """The state of one JSON value. After an error, or when the value is `done`, nothing more is read.

    The first wrong character is found wherever the text is cut into parts.
    """

    def __init__(self) -> None:
        self.kind = ""  # of the outermost value, once it has begun: "{", "[", '"', "0" (number), "t", "f" or "n"
        self.done = False
        self._stack: list[str] = []  # the containers that are open
        # value, item (a value or "]"), key, first key (a key or "}"), colon, after (a comma or the end), string,
        # escape, hex, number, word
        self._state = "value"
        self._is_key = False
        self._rest = ""  # of a word
        self._num_hex = 0
        self._number = ""

    @property
    def complete(self) -> bool:
        """Whether the value is whole if nothing follows. Only the end of a number is not seen before what follows."""
        return self.done or (self._state == "number" and not self._stack and self._number in _COMPLETE_NUMBER)

    def scan(self, text: str, start: int) -> int:
        """Reads `text` from `start` on and returns where it stopped.

        That is the end of the text, or what follows the value if it is `done` now, or else the first wrong character.
        """
        at, end = start, len(text)
        while at < end and not self.done:
            if self._state == "string":
                at = _PLAIN.match(text, at).end()  # type: ignore[union-attr]  # it matches the empty text
                if at == end:
                    break
            elif self._state not in ("escape", "hex", "number", "word") and text[at] in WHITESPACE:
                at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
                continue
            if self._state == "number" and not self._continues(text[at]):
                if self._number not in _COMPLETE_NUMBER:
                    break
                self._end_value()
                continue
            if self._state != "number" and not self._take(text[at]):
                break
            at += 1
        return at

    def _continues(self, char: str) -> bool:
        table = _NUMBER[self._number]
        following = table.get(char) or (table.get("d") if char in _DIGITS else None)
        if following is None:
            return False
        self._number = following
        return True

    def _take(self, char: str) -> bool:
        """Reads one character, and returns whether it may stand here."""
        match self._state:
            case "value":
                return self._begin(char)
            case "item":
                return self._close(char) if char == "]" else self._begin(char)
            case "key" | "first key":
                if char == "}" and self._state == "first key":
                    return self._close(char)
                self._is_key, self._state = True, "string"
                return char == '"'
            case "colon":
                self._state = "value"
                return char == ":"
            case "after":
                if char == ",":
                    self._state = "key" if self._stack[-1] == "{" else "value"
                    return True
                return self._close(char)
            case "string":
                if char == "\\":
                    self._state = "escape"
                    return True
                if char != '"':  # a control character
                    return False
                if self._is_key:
                    self._is_key, self._state = False, "colon"
                else:
                    self._end_value()
                return True
            case "escape":
                self._state, self._num_hex = ("hex", 0) if char == "u" else ("string", 0)
                return char == "u" or char in _ESCAPES
            case "hex":
                self._num_hex += 1
                if self._num_hex == 4:
                    self._state = "string"
                return char in _HEX
            case _:  # a word
                if not self._rest.startswith(char):
                    return False
                self._rest = self._rest[1:]
                if not self._rest:
                    self._end_value()
                return True

    def _begin(self, char: str) -> bool:
        if not self.kind:
            self.kind = "0" if char in _DIGITS or char == "-" else char
        if char in "{[":
            if len(self._stack) == MAX_DEPTH:
                return False
            self._stack.append(char)
            self._state = "first key" if char == "{" else "item"
        elif char == '"':
            self._state = "string"
        elif char in _WORDS:
            self._state, self._rest = "word", _WORDS[char][1:]
        elif char == "-" or char in _DIGITS:
            self._state = "number"
            self._number = {"-": "-", "0": "zero"}.get(char, "integer")
        else:
            return False
        return True

    def _close(self, char: str) -> bool:
        if {"{": "}", "[": "]"}[self._stack[-1]] != char:
            return False
        self._stack.pop()
        self._end_value()
        return True

    def _end_value(self) -> None:
        self.done = not self._stack
        self._state = "after"


def json_kind(text: str) -> str:
    """Returns the kind (see `JsonScanner.kind`) of the one JSON value in `text`, or "" if it is not one."""
    scanner = JsonScanner()
    end = scanner.scan(text, 0)
    is_whole = scanner.complete and not text[end:].strip(WHITESPACE)
    return scanner.kind if is_whole else ""
