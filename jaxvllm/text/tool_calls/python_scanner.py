"""`PythonScanner`: converts one literal of Python, which arrives in parts, to JSON. Nothing is evaluated."""

import math
import re

from jaxvllm.text.tool_calls.json_scanner import WHITESPACE
from jaxvllm.text.tool_calls.json_writer import JsonWriter, escaped

_PLAIN = {quote: re.compile(rf"[^{quote}\\\x00-\x1f]*") for quote in "'\""}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ATOM = re.compile(r"[\w.+-]*")  # a number or a word
_INTEGER = re.compile(r"[+-]?(0|[1-9]\d*)", re.ASCII)
_FLOAT = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?", re.ASCII)
_MAX_ATOM = 1000  # characters
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\\": "\\", "'": "'", '"': '"'}
_NUM_HEX = {"x": 2, "u": 4, "U": 8}


class PythonScanner(JsonWriter):
    """The state of one literal: a string, a number, True, False, None, or a list or dict (with strings as keys).

    After an error, or when the literal is `done`, nothing more is read. The first wrong character is found wherever
    the text is cut into parts.
    """

    def __init__(self) -> None:
        super().__init__("value")  # its own other states: string, escape, hex, atom
        self._quote = ""
        self._held = ""  # of an escape or an atom
        self._num_hex = 0

    def scan(self, text: str, start: int) -> int:
        """Reads `text` from `start` on and returns where it stopped.

        That is the end of the text, or what follows the literal if it is `done` now, or else the first wrong
        character. A wrong number or word is wrong at its end.
        """
        at, end = start, len(text)
        while at < end and not self.done:
            if self._state == "string":
                stop = _PLAIN[self._quote].match(text, at).end()  # type: ignore[union-attr]  # it matches ""
                self._json.append(escaped(text[at:stop]))
                at = stop
                if at == end:
                    break
            elif self._state == "atom":
                stop = _ATOM.match(text, at, min(end, at + _MAX_ATOM - len(self._held) + 1)).end()  # type: ignore[union-attr]
                self._held += text[at:stop]
                at = stop
                if len(self._held) > _MAX_ATOM:
                    return at - (len(self._held) - _MAX_ATOM)
                if at == end:
                    break
                if not self._end_atom():
                    break
                continue
            elif self._state not in ("escape", "hex") and text[at] in WHITESPACE:
                at += 1
                continue
            if not self._take(text[at]):
                break
            if self._state != "atom":  # the first character of an atom is read with the others
                at += 1
        return at

    def _take(self, char: str) -> bool:
        match self._state:
            case "value":
                return self._begin(char)
            case "item":
                return self._close(char) if char == "]" else self._begin(char)
            case "key":
                if char == "}":
                    return self._close(char)
                if char not in "'\"":
                    return False
                self._is_key = True
                return self._begin(char)
            case "colon":
                return self._end_key(char)
            case "after":
                return self._go_on() if char == "," else self._close(char)
            case "string":
                if char == "\\":
                    self._state = "escape"
                    return True
                if char != self._quote:
                    return False
                self._json.append('"')
                self._end_value()
                return True
            case "escape":
                return self._take_escape(char)
            case _:  # hex
                return self._take_hex(char)

    def _take_escape(self, char: str) -> bool:
        self._state = "string"
        if char in _SIMPLE:
            self._json.append(escaped(_SIMPLE[char]))
        elif char in _NUM_HEX:
            self._state, self._held, self._num_hex = "hex", "", _NUM_HEX[char]
        elif char in "01234567N" or char < " ":  # octal numbers, names of characters, continued lines
            return False
        else:
            self._json.append(escaped("\\" + char))
        return True

    def _take_hex(self, char: str) -> bool:
        if char not in "0123456789abcdefABCDEF":
            return False
        self._held += char
        if len(self._held) == self._num_hex:
            code = int(self._held, 16)
            if code > 0x10FFFF:
                return False
            # A surrogate stays an escape, because it is no character of its own.
            self._json.append(f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else escaped(chr(code)))
            self._state = "string"
        return True

    def _begin(self, char: str) -> bool:
        self._separate()
        if char in "{[":
            return self._open(char)
        if char in "'\"":
            self._quote, self._state = char, "string"
            self._json.append('"')
        elif _ATOM.fullmatch(char):
            self._state, self._held = "atom", ""
        else:
            return False
        return True

    def _end_atom(self) -> bool:
        made = _atom(self._held)
        if made is None:
            return False
        self._json.append(made)
        self._end_value()
        return True


def python_as_json(text: str) -> str | None:
    """Returns the one literal in `text` as JSON, or None if it is not one."""
    scanner = PythonScanner()
    text += " "  # ends a number
    end = scanner.scan(text, 0)
    return scanner.take() if scanner.done and not text[end:].strip(WHITESPACE) else None


def _atom(text: str) -> str | None:
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return text.removeprefix("+")
    if _FLOAT.fullmatch(text) and math.isfinite(value := float(text)):
        return repr(value)
    return None
