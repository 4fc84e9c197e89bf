"""`ToolCallParser`: the one engine that reads all formats. It takes text in parts of any size, and yields events."""

import json
import secrets
import string
from collections.abc import Mapping
from typing import Any

from jaxvllm.text.message_events import Arguments, CallBegin, CallBroken, CallCut, CallEnd, Content, Event, Reasoning
from jaxvllm.text.tool_calls.format import OPEN_ENDED, ToolCallFormat
from jaxvllm.text.tool_calls.json_scanner import WHITESPACE
from jaxvllm.text.tool_calls.readers import (
    MAX_HEADER,
    ArgumentsReader,
    CallReader,
    KeywordsReader,
    ObjectReader,
    Reader,
    ValueReader,
)
from jaxvllm.text.tool_calls.typed_values import types_of

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
        self._reader: Reader | None = None  # of a state that ends itself
        self._value: ValueReader | None = None
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

    def parameter(self, key: str) -> None:
        """Begins the arguments with this key, or goes on with it."""
        before = ", " if self._num_parameters else "{"
        self.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        self._num_parameters += 1

    def end_parameters(self) -> None:
        """Ends arguments that consist of parameters."""
        self.arguments("}" if self._num_parameters else "{}")

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
            self._reader = ArgumentsReader(self, state.name)
        elif state.reads == "call":
            self._reader = CallReader(self, state.is_bare)
        elif state.reads == "keywords":
            self._reader = KeywordsReader(self)
        elif state.reads == "object":
            self._reader = ObjectReader(self, state.quote)
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
        if mark.is_shown:
            self._take_text(mark.text)
        if state.reads in OPEN_ENDED:
            self._record = [] if mark.is_shown else [mark.text]
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

    def _begin_value(self) -> ValueReader:
        self.parameter(self._key)
        types = types_of(self._schemas.get(self._name), self._key)
        return ValueReader(self, self._state, frozenset({"string"}) if self._state.is_text else types)

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
            self.end_parameters()
            self._end()
        if mark.stays:
            return mark.to, at
        if not mark.ends_call:
            self._record.append(mark.text)
        return mark.to, found.end()

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


def _new_id(format: ToolCallFormat) -> str:
    if format.ids == "mistral":  # its chat template takes no others
        return "".join(secrets.choice(_LETTERS) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"
