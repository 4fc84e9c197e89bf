"""`GemmaScanner`: converts one object in Gemma's notation, which arrives in parts, to JSON."""

import json
import re

from jaxvllm.text.tool_calls.json_scanner import WHITESPACE
from jaxvllm.text.tool_calls.json_writer import JsonWriter, escaped

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_WORDS = {"true": "true", "false": "false", "null": "null", "None": "null"}
_MAX_WORD = 256  # characters of a key, a number or a word


class GemmaScanner(JsonWriter):
    """The state of one object, such as {city:<|"|>Oslo<|"|>,days:[1,2]}.

    A mark of the format stands around strings, which therefore need no escapes. Keys usually have none. What has none
    and is no number, true, false, null or None is a string too. After an error, or when the object is `done`, nothing
    more is read. The first wrong character is found wherever the text is cut into parts.
    """

    def __init__(self, quote: str) -> None:
        """Takes the mark around strings, in which the first character stands only once."""
        # Its own states: object (its beginning), value, word (a key or a value without a mark), string, and quote (the
        # mark before a string).
        super().__init__("object")
        self._quote = quote
        self._held = ""  # of a word, or of a mark that has begun

    def scan(self, text: str, start: int) -> int:
        """Reads `text` from `start` on and returns where it stopped.

        That is the end of the text, or what follows the object if it is `done` now, or else the first wrong character.
        """
        at, end = start, len(text)
        while at < end and not self.done:
            if self._state == "string" and not self._held:
                found = text.find(self._quote[0], at)
                stop = end if found < 0 else found
                self._json.append(escaped(text[at:stop]))
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
                return self._end_key(char)
            case "after" if char == ",":
                return self._go_on()
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
            self._json.append(escaped(held.removesuffix(self._held)))
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
        self._separate()
        self._is_key = self._state == "key"
        if char in "{[":
            return not self._is_key and self._open(char)
        self._state, self._held = ("quote" if char == self._quote[0] else "word"), char
        return char not in ",:"
