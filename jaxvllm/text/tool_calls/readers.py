"""The readers of what a call consists of: arguments or a whole call as JSON, keywords, objects, and values.

A reader gets text in parts of any size. It tells a `Calls` what it has found as soon as that is certain.
"""

import json
from collections.abc import Callable
from typing import Protocol

from jaxvllm.text.tool_calls.format import ReadingState
from jaxvllm.text.tool_calls.gemma_scanner import GemmaScanner
from jaxvllm.text.tool_calls.json_scanner import WHITESPACE, JsonScanner
from jaxvllm.text.tool_calls.python_scanner import PythonScanner
from jaxvllm.text.tool_calls.typed_values import as_json

# Other words for the keys of a call.
_KEYS = {"parameters": "arguments", "tool_name": "name"}
MAX_HEADER = 256  # characters of a function's name with what surrounds it, and of a parameter's name


class Calls(Protocol):
    """The calls of a text, to which readers add."""

    def begin(self, name: str, id: str | None = None) -> None:
        """Begins a call."""

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the open call."""

    def parameter(self, key: str) -> None:
        """Begins the arguments with this key, or goes on with it."""

    def end_parameters(self) -> None:
        """Ends arguments that consist of parameters."""


class Reader(Protocol):
    """Reads what has an end of its own. It stops after it, at the end of the text, or at a wrong character."""

    done: bool
    failed: bool

    def scan(self, text: str, at: int) -> int: ...


class ArgumentsReader:
    """Reads the arguments as one JSON object. With `name`, the call begins with it."""

    def __init__(self, calls: Calls, name: str | None) -> None:
        self.done = self.failed = False
        self._calls = calls
        self._name = name
        self._scanner: JsonScanner | None = None

    def scan(self, text: str, at: int) -> int:
        if self._scanner is None:
            while at < len(text) and text[at] in WHITESPACE:
                at += 1
            if at == len(text) or text[at] != "{":
                return at
            if self._name is not None:
                self._calls.begin(self._name)
            self._scanner = JsonScanner()
        stop = self._scanner.scan(text, at)
        self._calls.arguments(text[at:stop])
        self.done = self._scanner.done
        return stop


class CallReader:
    """Reads a JSON object with the name (or tool_name) and the arguments (or parameters) of a call, in any order."""

    def __init__(self, calls: Calls, is_bare: bool) -> None:
        self.done = self.failed = False
        self._calls = calls
        self._is_bare = is_bare
        self._expects = "{"  # "{", key, first key, colon, value, or "," (or the end)
        self._scanner: JsonScanner | None = None  # of the key or the value that is being read
        self._key = ""
        self._parts: list[str] = []  # of a key, a name, or arguments that cannot be shown yet
        self._name: str | None = None
        self._has_arguments = False
        self._held = ""  # arguments that came before the name
        self._is_shown = False

    def scan(self, text: str, at: int) -> int:
        while at < len(text) and not self.done and not self.failed:
            if self._scanner is None:
                if text[at] in WHITESPACE:
                    at += 1
                elif self._take(text[at]):
                    at += self._is_between  # otherwise the scanner reads this character too
                else:
                    self.failed = True
                continue
            stop = self._scanner.scan(text, at)
            self._take_part(text[at:stop])
            at = stop
            if not self._scanner.done:
                break
            self.failed = not self._end_item()
            self._scanner = None
        return at

    @property
    def _is_between(self) -> bool:
        return self._scanner is None

    def _take(self, char: str) -> bool:
        match self._expects:
            case "{":
                self._expects = "first key"
                return char == "{"
            case ":":
                self._expects = "value"
                return char == ":"
            case ",":
                if char == "}":
                    return self._end_object()
                self._expects = "key"
                return char == ","
            case "value":
                return self._begin_value(char)
            case _:
                if char == "}" and self._expects == "first key":
                    return self._end_object()
                self._scanner = JsonScanner()
                self._key = ""
                return char == '"'

    def _begin_value(self, char: str) -> bool:
        if self._key == "name" and (char != '"' or self._name is not None):
            return False
        if self._key == "arguments":
            if char not in '{"n' or self._has_arguments:
                return False
            self._has_arguments = True
            if char == "{" and self._name is not None:
                self._show(self._name)
        self._scanner = JsonScanner()
        return True

    def _take_part(self, text: str) -> None:
        if self._key == "arguments" and self._is_shown:
            self._calls.arguments(text)
        elif self._expects != "value" or self._key in ("name", "arguments"):
            self._parts.append(text)

    def _end_item(self) -> bool:
        """Understands the key or the value that has ended, and returns whether it may stand here."""
        text = "".join(self._parts)
        self._parts.clear()
        if self._expects != "value":
            self._key, self._expects = json.loads(text), ":"
            self._key = _KEYS.get(self._key, self._key)
            return not self._is_bare or self._key in ("name", "arguments", "type", "id")
        self._expects = ","
        if self._key == "name":
            self._name = json.loads(text)
            return bool(self._name) and _is_unicode(self._name)
        if self._key != "arguments" or self._is_shown:
            return True
        return self._end_held(text)

    def _end_held(self, text: str) -> bool:
        """Keeps arguments that were not shown as they came: they precede the name, or are a string with JSON in it."""
        if text == "null":
            text = "{}"
        elif text.startswith('"'):
            text = json.loads(text).strip()
            scanner = JsonScanner()
            if not _is_unicode(text) or scanner.scan(text, 0) != len(text) or not scanner.done or scanner.kind != "{":
                return False
        self._held = text
        return True

    def _end_object(self) -> bool:
        if self._name is None or (self._is_bare and not self._has_arguments):
            return False
        if not self._is_shown:
            self._show(self._name)
            self._calls.arguments(self._held or "{}")
        self.done = True
        return True

    def _show(self, name: str) -> None:
        self._calls.begin(name)
        self._is_shown = True


class KeywordsReader:
    """Reads keyword arguments of Python up to the closing parenthesis."""

    def __init__(self, calls: Calls) -> None:
        self.done = self.failed = False
        self._calls = calls
        self._expects = "first key"  # first key, key (or the end), more (of a key), "=", value, or "," (or the end)
        self._key = ""
        self._scanner = PythonScanner()

    def scan(self, text: str, at: int) -> int:
        while at < len(text) and not self.done and not self.failed:
            if self._expects == "value":
                at = self._scanner.scan(text, at)
                self._calls.arguments(self._scanner.take())
                if not self._scanner.done:
                    break
                self._expects = ","
            elif self._take(text[at]):
                at += 1
            else:
                self.failed = True
        return at

    def _take(self, char: str) -> bool:
        if self._expects == "more" and (self._key + char).isidentifier():
            self._key += char
            return len(self._key) <= MAX_HEADER
        if char in WHITESPACE:
            self._expects = "=" if self._expects == "more" else self._expects
            return True
        match self._expects:
            case "more" | "=":
                self._begin_value()
                return char == "="
            case "," if char == ",":
                self._expects = "key"
                return True
            case "key" | "first key" if char.isidentifier():
                self._key, self._expects = char, "more"
                return True
        self.done = char == ")"
        if self.done:
            self._calls.end_parameters()
        return self.done

    def _begin_value(self) -> None:
        self._calls.parameter(self._key)
        self._scanner = PythonScanner()
        self._expects = "value"


class ObjectReader:
    """Reads the arguments as one object in Gemma's notation."""

    def __init__(self, calls: Calls, quote: str) -> None:
        self.done = self.failed = False
        self._calls = calls
        self._scanner = GemmaScanner(quote)

    def scan(self, text: str, at: int) -> int:
        stop = self._scanner.scan(text, at)
        self._calls.arguments(self._scanner.take())
        self.done = self._scanner.done
        return stop


class ValueReader:
    """Reads the value of an XML parameter up to its mark. A string is shown as it comes, anything else at its end."""

    def __init__(self, calls: Calls, state: ReadingState, types: frozenset[str]) -> None:
        self._calls = calls
        self._types = types
        self._is_text = types == {"string"} or (not types and state.untyped == "text")
        self._trims = state.trims
        self._has_begun = False
        self._parts: list[str] = []  # of a text: its end so far, which does not belong to it if nothing follows
        if self._is_text:
            calls.arguments('"')

    def push(self, text: str) -> None:
        """Reads more of the value; `text` is not empty."""
        if not self._is_text:
            self._parts.append(text)
            return
        if not self._has_begun:
            text = self._trimmed(text, str.removeprefix, str.lstrip)
            self._has_begun = self._trims != "space" or bool(text)
        shown = self._trimmed(text, str.removesuffix, str.rstrip)
        if shown or (self._trims != "space" and text):
            self._calls.arguments(_escaped("".join(self._parts) + shown))
            self._parts.clear()
        if shown != text:
            self._parts.append(text[len(shown) :])

    def finish(self) -> None:
        """Ends the value."""
        if self._is_text:
            self._calls.arguments('"')
            return
        text = self._trimmed("".join(self._parts), str.removeprefix, str.lstrip)
        self._calls.arguments(as_json(self._trimmed(text, str.removesuffix, str.rstrip), self._types))

    def _trimmed(self, text: str, newline: Callable[[str, str], str], space: Callable[[str], str]) -> str:
        """Returns `text` without what does not belong to the value at one of its ends."""
        if self._trims == "nothing":
            return text
        return newline(text, "\n") if self._trims == "newline" else space(text)


def _is_unicode(text: str) -> bool:
    """Returns whether `text`, in which JSON may have escaped half a character, can be sent to anybody."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
