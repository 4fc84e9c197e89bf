"""`AssistantMessage`: what the text of a completion says, as reasoning, content and tool calls.

An `AnswerFormat` tells how the text is read. Its `reader` takes the text in parts of any size and yields events;
a message is what all events of a completion amount to, so a stream and a whole answer agree.

    reader = answer_format.reader(prompt_text)
    events = reader.push(new_text) ...; events = reader.finish()
    message = AssistantMessage.of(events)
"""

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxvllm.text.message_events import Arguments, CallBegin, CallBroken, CallCut, CallEnd, Content, Event, Reasoning
from jaxvllm.text.reasoning import ReasoningFormat
from jaxvllm.text.tool_calls.format import Mark, ToolCallFormat, framed, state
from jaxvllm.text.tool_calls.formats import HARMONY, NO_CALLS, in_harmony
from jaxvllm.text.tool_calls.parser import ToolCallParser

# The one parameter of a function that takes a text.
INPUT = "input"


@dataclass(frozen=True)
class AnswerFormat:
    """The way in which the answers to one request are read."""

    reasoning: ReasoningFormat | None = None
    calls: ToolCallFormat | None = None  # None: the text is not searched for tool calls
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of the parameters, by function
    parallel_calls: bool = True  # False: only the first call counts
    input_of: str | None = None  # the tool whose input the whole answer is, as plain text

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        return self.reasoning is None and self.calls is None and self.input_of is None

    @property
    def marks(self) -> frozenset[str]:
        """All texts that must be seen, even if they are special tokens, which texts usually leave out."""
        return self._format(False).marks

    def reader(self, prompt: str = "", continued: str | None = None) -> "MessageReader":
        """Returns a reader of one completion of `prompt`, which continues the text of a message where `continued`."""
        is_open = self.reasoning is not None and self.reasoning.opens(prompt, continued)
        parser = ToolCallParser(self._format(is_open), self.schemas)
        call = None if self.input_of is None else TextCall(self.input_of)
        # Where the reasoning stays in the content, the mark in the prompt is a part of it.
        before = ""
        if is_open and self.reasoning is not None and self.reasoning.is_content and continued is None:
            before = self.reasoning.start
        return MessageReader(parser, self.parallel_calls, call, before)

    def _format(self, is_open: bool) -> ToolCallFormat:
        calls = self.calls or NO_CALLS
        if self.reasoning is None:
            return calls
        if self.reasoning.is_harmony:
            return HARMONY if self.calls in (HARMONY, None) else in_harmony(calls)
        if self.reasoning.is_content:
            thought = state("content", {}, Mark(self.reasoning.end, calls.start, is_shown=True))
            start = "thought" if is_open else calls.start
            return ToolCallFormat({**calls.states, "thought": thought}, start, calls.ids, is_forced=calls.is_forced)
        otherwise, label = "reasoning" if is_open else calls.start, self.reasoning.label
        reasoning = state("reasoning", {self.reasoning.end: calls.start})
        states = framed(calls.states, self.reasoning.frame) | {
            "before reasoning": state(
                "space", {self.reasoning.start: "label" if label else "reasoning"}, otherwise=otherwise
            ),
            "reasoning": reasoning,
        }
        if label:
            # White space that no mark follows belongs to what `otherwise` reads, so that is a state of its own.
            states["label"] = state("space", {label: "reasoning"}, otherwise="unlabelled")
            states["unlabelled"] = reasoning
        return ToolCallFormat(states, "before reasoning", calls.ids, is_forced=calls.is_forced)


class MessageReader:
    """Reads one completion."""

    def __init__(
        self, parser: ToolCallParser, parallel_calls: bool, call: "TextCall | None" = None, before: str = ""
    ) -> None:
        """Takes the parts. `call` is the call that the content is the input of, if there is one.

        The text `before` is read as if the completion began with it.
        """
        self._parser = parser
        self._parallel_calls = parallel_calls
        self._call = call
        self._before = before

    def push(self, text: str) -> list[Event]:
        """Reads more text and returns what it says."""
        text, self._before = self._before + text, ""
        return self._kept(self._parser.push(text))

    def finish(self, is_cut: bool = False) -> list[Event]:
        """Returns what the end of the text says, which is not where the model ended it if `is_cut`.

        Nothing is read afterwards.
        """
        events = self.push("") + self._kept(self._parser.finish())
        return events if self._call is None else events + self._call.finish(is_cut)

    def _kept(self, events: list[Event]) -> list[Event]:
        if self._call is not None:
            return self._call.read(events)
        if self._parallel_calls:
            return events
        return [event for event in events if isinstance(event, Reasoning | Content) or not event.index]


class TextCall:
    """A call of a tool that takes one text, as the model writes this text and nothing else."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def read(self, events: list[Event]) -> list[Event]:
        """Returns the events of the message, in which content is a part of the input."""
        told: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                told += [*self._begin(), Arguments(0, json.dumps(event.text, ensure_ascii=False)[1:-1])]
            else:
                told.append(event)
        return told

    def finish(self, is_cut: bool) -> list[Event]:
        """Returns the end of the call, which stays a part of one if the model did not end it."""
        if is_cut:
            return [CallCut(0)] if self._has_begun else []
        return [*self._begin(), Arguments(0, '"}'), CallEnd(0)]

    def _begin(self) -> list[Event]:
        if self._has_begun:
            return []
        self._has_begun = True
        return [CallBegin(0, f"call_{secrets.token_hex(12)}", self._name), Arguments(0, f'{{"{INPUT}": "')]


@dataclass(frozen=True)
class ToolCall:
    """A call of a function."""

    id: str
    name: str
    arguments: str  # JSON of an object, or its beginning
    is_whole: bool = True


@dataclass(frozen=True)
class AssistantMessage:
    """A whole answer."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()

    def events(self) -> list[Event]:
        """Returns events that amount to this message. A message without anything has an empty content."""
        events: list[Event] = [Reasoning(self.reasoning)] if self.reasoning else []
        if self.content or not (self.reasoning or self.calls):
            events.append(Content(self.content))
        for index, call in enumerate(self.calls):
            end = CallEnd(index) if call.is_whole else CallCut(index)
            events += [CallBegin(index, call.id, call.name), Arguments(index, call.arguments), end]
        return events

    @classmethod
    def of(cls, events: Iterable[Event]) -> "AssistantMessage":
        """Returns the message that the events of a completion amount to."""
        reasoning: list[str] = []
        content: list[str] = []
        begun: dict[int, CallBegin] = {}
        arguments: dict[int, list[str]] = {}
        calls: list[ToolCall] = []
        for event in events:
            match event:
                case Reasoning(text):
                    reasoning.append(text)
                case Content(text) | CallBroken(_, text):
                    content.append(text)
                case CallBegin(index):
                    begun[index], arguments[index] = event, []
                case Arguments(index, text):
                    arguments[index].append(text)
                case CallEnd(index) | CallCut(index):
                    is_whole = isinstance(event, CallEnd)
                    calls.append(ToolCall(begun[index].id, begun[index].name, "".join(arguments[index]), is_whole))
        return cls("".join(reasoning), "".join(content), tuple(calls))
