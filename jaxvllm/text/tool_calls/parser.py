"""`ToolCallParser`: the one engine that reads all formats. It takes text in parts of any size, and yields events."""

import json
import secrets
import string
from collections.abc import Mapping
from typing import Any, Protocol

from jaxvllm.text.message_events import Arguments, CallBegin, CallBroken, CallCut, CallEnd, Content, Event, Reasoning
from jaxvllm.text.tool_calls.format import OPEN_ENDED, ReadingState, ToolCallFormat
from jaxvllm.text.tool_calls.json_scanner import WHITESPACE, JsonScanner
from jaxvllm.text.tool_calls.python_scanner import PythonScanner
from jaxvllm.text.tool_calls.typed_values import as_json, types_of

MAX_HEADER = 256  # characters of a function's name with what surrounds it, and of a parameter's name
_LETTERS = string.ascii_letters + string.digits


class ToolCallParser:
    """Reads one completion. Each character is read once, or a bounded number of times before it is refused.

    How the text is cut into parts changes how much text an event has, and nothing else.
    """

    def __init__(self, format: ToolCallFormat, schemas: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Takes the schemas of the parameters, by the names of the functions."""
        self._format = format
        self._schemas = schemas or {}
        self._pending = ""  # the end of the text that is not understood yet; at most a header and a mark
        self._reader: _Reader | None = None  # of a state that ends itself
        self._value: _ValueReader | None = None
        self._events: list[Event] = []
        self._record: list[str] = []  # what was read since the content, or since the last call ended
        self._spaces: list[str] = []  # white space after the content, which does not belong to it if a call follows
        self._num_calls = 0
        self._is_open = False  # whether a call has begun and not ended
        self._call_ended = False  # whether a call has ended since the content
        self._has_content = False
        self._name = ""  # of the open call
        self._key = ""
        self._num_parameters = 0
        self._enter(format.start)

    def push(self, text: str) -> list[Event]:
        """Reads more text."""
        self._read(self._pending + text, is_last=False)
        return self._take()

    def finish(self) -> list[Event]:
        """Reads the end of the text. The parser takes no more text afterwards."""
        state, rest = self._state, self._pending
        if not (self._call_ended and not self._is_open and state.reads == "space" and (rest in state.prefixes)):
            self._read(
                rest, is_last=True
            )  # otherwise the end of the call's last mark is missing, which does not matter
        if self._state.reads not in OPEN_ENDED and (self._is_open or not self._call_ended):
            self._cut() if self._format.is_forced else self._break()
        if not self._num_calls and self._spaces:
            self._events.append(Content("".join(self._spaces)))
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # ---- what readers find ----

    def begin(self, name: str, id: str | None = None) -> None:
        """Begins a call."""
        self._spaces.clear()
        self._events.append(CallBegin(self._num_calls, id or _new_id(self._format), name))
        self._num_calls += 1
        self._is_open, self._name, self._num_parameters = True, name, 0

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the open call."""
        if text:
            self._events.append(Arguments(self._num_calls - 1, text))

    def _end(self) -> None:
        self._events.append(CallEnd(self._num_calls - 1))
        self._record.clear()
        self._is_open, self._call_ended = False, True

    def _show(self, text: str) -> None:
        """Shows content, without white space that may precede a call or that follows one at the beginning."""
        shown = text.rstrip()
        if shown:
            spaces = "" if self._num_calls and not self._has_content else "".join(self._spaces)
            if not spaces and self._num_calls and not self._has_content:
                shown = shown.lstrip()
            self._has_content = True
            self._events.append(Content(spaces + shown))
            self._spaces.clear()
        if rest := text[len(text.rstrip()) :]:
            self._spaces.append(rest)

    def _cut(self) -> None:
        """Ends an answer that consists of calls within one of them. What precedes the call's name is not shown."""
        if self._is_open:
            self._is_open = False
            self._events.append(CallCut(self._num_calls - 1))

    def _break(self) -> None:
        """Gives back what was read as content, because it is not well-formed."""
        text = "".join(self._record)
        self._record.clear()
        if self._is_open:
            self._is_open = False
            self._events.append(CallBroken(self._num_calls - 1, text))
        else:
            self._show(text)
        self._enter("content")

    # ---- reading ----

    def _enter(self, name: str) -> None:
        self._state = state = self._format.states[name]
        if state.reads == "content":
            self._record.clear()
            self._call_ended = False
        self._reader = None
        if state.reads == "arguments":
            self._reader = _ArgumentsReader(self, state.name)
        elif state.reads == "call":
            self._reader = _CallReader(self, state.is_bare)
        elif state.reads == "keywords":
            self._reader = _KeywordsReader(self)
        elif state.reads == "value":
            self._value = self._begin_value()

    def _read(self, text: str, is_last: bool) -> None:
        at = 0
        while True:
            match self._state.reads:
                case "content" | "reasoning" | "value":
                    to, at = self._read_to_mark(text, at, is_last)
                case "space":
                    to, at = self._read_space(text, at, is_last)
                case "header" | "key":
                    to, at = self._read_bounded(text, at, is_last)
                case _:
                    to, at = self._read_itself(text, at)
            if to is None:
                break
            if to == "":
                self._break()
            else:
                before = "".join(self._record) if to == self._state.otherwise else ""
                self._enter(to)
                if self._state.reads in OPEN_ENDED:  # the white space that was not before a mark belongs to it
                    self._take_text(before[len(before.rstrip()) :])
        self._pending = text[at:]

    # Each of the following reads `text` from `at` on with the present state. It returns the next state ("" after what
    # is not well-formed, None when more text is needed), and where it stopped.

    def _read_to_mark(self, text: str, at: int, is_last: bool) -> tuple[str | None, int]:
        state = self._state
        found = state.pattern.search(text, at)
        stop = len(text) if found is None else found.start()
        if found is None and not is_last:
            starts = range(max(at, len(text) - state.longest + 1), len(text))
            stop = next((start for start in starts if text[start:] in state.prefixes), stop)
        self._take_text(text[at:stop])
        if found is None:
            return None, stop
        mark = state.mark_of[found[0]]
        if state.reads in OPEN_ENDED:
            self._record = [mark.text]
        else:
            self._record.append(mark.text)
            assert self._value is not None
            self._value.finish()
        return mark.to, found.end()

    def _take_text(self, text: str) -> None:
        if not text:
            return
        if self._state.reads == "content":
            self._show(text)
        elif self._state.reads == "reasoning":
            self._events.append(Reasoning(text))
        else:
            assert self._value is not None
            self._record.append(text)
            self._value.push(text)

    def _begin_value(self) -> "_ValueReader":
        before = ", " if self._num_parameters else "{"
        self.arguments(f"{before}{json.dumps(self._key, ensure_ascii=False)}: ")
        self._num_parameters += 1
        return _ValueReader(self, self._state, types_of(self._schemas.get(self._name), self._key))

    def _read_space(self, text: str, at: int, is_last: bool) -> tuple[str | None, int]:
        state, start = self._state, at
        while at < len(text) and text[at] in WHITESPACE:
            at += 1
        self._record.append(text[start:at])
        found = state.pattern.match(text, at)
        if found is None:
            is_open = at == len(text) or (not is_last and text[at:] in state.prefixes)
            return (None if is_open else state.otherwise or ""), at
        mark = state.mark_of[found[0]]
        if mark.ends_call:
            self._end_parameters()
        if mark.stays:
            return mark.to, at
        if not mark.ends_call:
            self._record.append(mark.text)
        return mark.to, found.end()

    def _end_parameters(self) -> None:
        self.arguments("}" if self._num_parameters else "{}")
        self._end()

    def _read_bounded(self, text: str, at: int, is_last: bool) -> tuple[str | None, int]:
        state = self._state
        limit = at + MAX_HEADER + state.longest
        found = state.pattern.search(text, at, limit)
        if found is None:
            return ("" if is_last or len(text) >= limit else None), at
        mark, head = state.mark_of[found[0]], text[at : found.start()]
        to = mark.to
        if state.header is None:
            self._key = head.strip()
            if not self._key:
                return "", at
        else:
            header = state.header(head)
            if header is None:
                return "", at
            to = header.to or to
            if header.name is not None:
                self.begin(header.name, header.id)
        stop = found.start() if mark.stays else found.end()
        self._record.append(text[at:stop])
        return to, stop

    def _read_itself(self, text: str, at: int) -> tuple[str | None, int]:
        assert self._reader is not None
        stop = self._reader.scan(text, at)
        self._record.append(text[at:stop])
        if self._reader.done:
            self._end()
            return self._state.then, stop
        return ("" if self._reader.failed or stop < len(text) else None), stop


class _Reader(Protocol):
    """Reads what has an end of its own. It stops after it, at the end of the text, or at a wrong character."""

    done: bool
    failed: bool

    def scan(self, text: str, at: int) -> int: ...


class _ArgumentsReader:
    """Reads the arguments as one JSON object. With `name`, the call begins with it."""

    def __init__(self, parser: ToolCallParser, name: str | None) -> None:
        self.done = self.failed = False
        self._parser = parser
        self._name = name
        self._scanner: JsonScanner | None = None

    def scan(self, text: str, at: int) -> int:
        if self._scanner is None:
            while at < len(text) and text[at] in WHITESPACE:
                at += 1
            if at == len(text) or text[at] != "{":
                return at
            if self._name is not None:
                self._parser.begin(self._name)
            self._scanner = JsonScanner()
        stop = self._scanner.scan(text, at)
        self._parser.arguments(text[at:stop])
        self.done = self._scanner.done
        return stop


class _CallReader:
    """Reads a JSON object with the name and the arguments (or parameters) of a call, in any order."""

    def __init__(self, parser: ToolCallParser, is_bare: bool) -> None:
        self.done = self.failed = False
        self._parser = parser
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
            self._parser.arguments(text)
        elif self._expects != "value" or self._key in ("name", "arguments"):
            self._parts.append(text)

    def _end_item(self) -> bool:
        """Understands the key or the value that has ended, and returns whether it may stand here."""
        text = "".join(self._parts)
        self._parts.clear()
        if self._expects != "value":
            self._key, self._expects = json.loads(text), ":"
            self._key = "arguments" if self._key == "parameters" else self._key
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
            self._parser.arguments(self._held or "{}")
        self.done = True
        return True

    def _show(self, name: str) -> None:
        self._parser.begin(name)
        self._is_shown = True


class _KeywordsReader:
    """Reads keyword arguments of Python up to the closing parenthesis."""

    def __init__(self, parser: ToolCallParser) -> None:
        self.done = self.failed = False
        self._parser = parser
        self._expects = "first key"  # first key, key (or the end), more (of a key), "=", value, or "," (or the end)
        self._key = ""
        self._num_arguments = 0
        self._scanner = PythonScanner()

    def scan(self, text: str, at: int) -> int:
        while at < len(text) and not self.done and not self.failed:
            if self._expects == "value":
                at = self._scanner.scan(text, at)
                self._parser.arguments(self._scanner.take())
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
            self._parser.arguments("}" if self._num_arguments else "{}")
        return self.done

    def _begin_value(self) -> None:
        before = ", " if self._num_arguments else "{"
        self._parser.arguments(f"{before}{json.dumps(self._key, ensure_ascii=False)}: ")
        self._num_arguments += 1
        self._scanner = PythonScanner()
        self._expects = "value"


class _ValueReader:
    """Reads the value of an XML parameter up to its mark. A string is shown as it comes, anything else at its end."""

    def __init__(self, parser: ToolCallParser, state: ReadingState, types: frozenset[str]) -> None:
        self._parser = parser
        self._types = types
        self._is_text = types == {"string"} or (not types and state.untyped == "text")
        self._ends = "\n" if state.trims == "newline" else None  # of a value, with the meaning of str.strip
        self._has_begun = False
        self._parts: list[str] = []  # of a text: its end so far, which does not belong to it if nothing follows
        if self._is_text:
            parser.arguments('"')

    def push(self, text: str) -> None:
        """Reads more of the value; `text` is not empty."""
        if not self._is_text:
            self._parts.append(text)
            return
        if not self._has_begun:
            text = text.removeprefix("\n") if self._ends else text.lstrip()
            self._has_begun = bool(self._ends or text)
        shown = (text[:-1] if text.endswith("\n") else text) if self._ends else text.rstrip()
        if shown or (self._ends and text):
            self._parser.arguments(_escaped("".join(self._parts) + shown))
            self._parts.clear()
        if shown != text:
            self._parts.append(text[len(shown) :])

    def finish(self) -> None:
        """Ends the value."""
        if self._is_text:
            self._parser.arguments('"')
            return
        text = "".join(self._parts)
        text = text.removeprefix("\n").removesuffix("\n") if self._ends else text.strip()
        self._parser.arguments(as_json(text, self._types))


def _is_unicode(text: str) -> bool:
    """Returns whether `text`, in which JSON may have escaped half a character, can be sent to anybody."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _new_id(format: ToolCallFormat) -> str:
    if format.ids == "mistral":  # its chat template takes no others
        return "".join(secrets.choice(_LETTERS) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"
