"""`GemmaScanner`: converts one object in Gemma's notation, which arrives in parts, to JSON."""

import json
import re

from jaxvllm.text.tool_calls.json_scanner import MAX_DEPTH, WHITESPACE

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_WORDS = {"true": "true", "false": "false", "null": "null", "None": "null"}
_MAX_WORD = 256  # characters of a key, a number or a word


class GemmaScanner:
    """The state of one object, such as {city:<|"|>Oslo<|"|>,days:[1,2]}.

    A mark of the format stands around strings, which therefore need no escapes. Keys usually have none. What has none
    and is no number, true, false, null or None is a string too. After an error, or when the object is `done`, nothing
    more is read. The first wrong character is found wherever the text is cut into parts.
    """

    def __init__(self, quote: str) -> None:
        """Takes the mark around strings, in which the first character stands only once."""
        self.done = False
        self._quote = quote
        self._stack: list[str] = []
        # object (its beginning), key (a key or the end), item (a value or the end), value, word (a key or a value
        # without a mark), quote (the mark before a string), string, colon, after (a comma or the end)
        self._state = "object"
        self._is_key = False
        self._held = ""  # of a word, or of a mark that has begun
        self._comma_due = False  # whether the innermost container has an item already
        self._json: list[str] = []

    def take(self) -> str:
        """Returns the JSON of what was read since the last call."""
        text = "".join(self._json)
        self._json.clear()
        return text

    def scan(self, text: str, start: int) -> int:
        """Reads `text` from `start` on and returns where it stopped.

        That is the end of the text, or what follows the object if it is `done` now, or else the first wrong character.
        """
        at, end = start, len(text)
        while at < end and not self.done:
            if self._state == "string" and not self._held:
                found = text.find(self._quote[0], at)
                stop = end if found < 0 else found
                self._json.append(_escaped(text[at:stop]))
                at = stop
                if at == end:
                    break
            if not self._take(text[at]):
                break
            at += 1
        return at

    def _take(self, char: str) -> bool:
        match self._state:
            case "string":
                return self._take_in_string(char)
            case "quote":
                return self._take_in_quote(char)
            case "word":
                return self._take_in_word(char)
        if char in WHITESPACE:
            return True
        match self._state:
            case "object":
                return char == "{" and self._open(char)
            case "colon":
                self._state = "value"
                return char == ":"
            case "after" if char == ",":
                self._state = "key" if self._stack[-1] == "{" else "item"
                return True
        if char in "}]":
            return self._state != "value" and self._close(char)
        return self._state != "after" and self._begin(char)

    def _take_in_string(self, char: str) -> bool:
        held, self._held = self._held + char, ""
        if self._quote == held:
            self._json.append('"')
            self._end_value()
        elif self._quote.startswith(held):
            self._held = held
        else:  # what was held is text, and with `char` another mark may begin
            self._held = char if char == self._quote[0] else ""
            self._json.append(_escaped(held.removesuffix(self._held)))
        return True

    def _take_in_quote(self, char: str) -> bool:
        self._held += char
        if self._held == self._quote:
            self._held, self._state = "", "string"
            self._json.append('"')
            return True
        return self._quote.startswith(self._held)

    def _take_in_word(self, char: str) -> bool:
        if char not in (":" if self._is_key else ",}]"):
            self._held += char
            return len(self._held) <= _MAX_WORD and not (self._is_key and char in "{}[],")
        word, self._held = self._held.strip(WHITESPACE), ""
        if self._is_key or not (word in _WORDS or _NUMBER.fullmatch(word)):
            self._json.append(json.dumps(word, ensure_ascii=False))
        else:
            self._json.append(_WORDS.get(word, word))
        self._end_value()
        return self._take(char)

    def _begin(self, char: str) -> bool:
        """Begins a key or a value."""
        if self._state != "value" and self._comma_due:
            self._json.append(", ")
        self._is_key = self._state == "key"
        if char in "{[":
            return not self._is_key and self._open(char)
        self._state, self._held = ("quote" if char == self._quote[0] else "word"), char
        return char not in ",:"

    def _open(self, char: str) -> bool:
        self._stack.append(char)
        self._json.append(char)
        self._state, self._comma_due = ("key" if char == "{" else "item"), False
        return len(self._stack) <= MAX_DEPTH

    def _close(self, char: str) -> bool:
        if {"{": "}", "[": "]"}[self._stack[-1]] != char:
            return False
        self._stack.pop()
        self._json.append(char)
        self._end_value()
        return True

    def _end_value(self) -> None:
        if self._is_key:
            self._is_key, self._state = False, "colon"
            self._json.append(": ")
            return
        self.done = not self._stack
        self._state, self._comma_due = "after", True


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
