"""`ToolCallFormat`: the way in which a family of models writes tool calls, as states and the marks between them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Literal

type Reads = Literal[
    "content", "reasoning", "space", "header", "key", "value", "arguments", "call", "keywords", "object"
]
OPEN_ENDED = ("content", "reasoning")
# What these states read has an end of its own, which is no mark.
SELF_ENDING = ("arguments", "call", "keywords", "object")


@dataclass(frozen=True)
class Header:
    """The content of the text before a call's arguments. `to` is the next state, if it is not that of the mark."""

    name: str | None = None  # of the function; None: no call begins here
    id: str | None = None  # None: the call gets a new one
    to: str | None = None


@dataclass(frozen=True)
class Mark:
    """A literal text that leads from one state to another."""

    text: str
    to: str
    ends_call: bool = False
    is_shown: bool = False  # the mark is a part of the content
    stays: bool = False  # the mark is the beginning of what the next state reads


@dataclass(frozen=True)
class ReadingState:
    """The treatment of the text until one of the marks comes.

    - content, reasoning: it is shown as such
    - space: only white space may come; anything else breaks the call
    - header: `header` finds the function's name in it, and the call begins
    - key, value: the name of a parameter, and its value as plain text, whose type the tool's schema tells
    - arguments: the arguments as one JSON object, which ends the call and leads to `then`
    - call: one JSON object with name and arguments, likewise
    - keywords: the arguments as keyword arguments of Python, up to the closing parenthesis, likewise
    - object: the arguments as one object in Gemma's notation, likewise
    """

    reads: Reads
    marks: tuple[Mark, ...] = ()
    then: str | None = None
    header: Callable[[str], Header | None] | None = None  # None: the text is not well-formed
    otherwise: str | None = None  # of a space: the state that reads on if no mark comes; None: the call is broken
    is_bare: bool = False  # nothing but its keys shows that this JSON object is a call
    name: str | None = None  # of the function, where the caller has chosen it
    quote: str = ""  # the mark around the strings of an object
    # What does not belong to a value at its beginning and its end.
    trims: Literal["newline", "space", "nothing"] = "newline"
    is_text: bool = False  # the marks say that a value is a text, whatever the schema says
    untyped: Literal["text", "json"] = "text"  # how a value is read of which the schema tells no type

    def __post_init__(self) -> None:
        texts = [mark.text for mark in self.marks]
        assert all(texts), "a mark without text"
        assert len(set(texts)) == len(texts), "a mark stands twice"
        # So that the first complete mark is the right one, wherever the text is cut.
        assert not any(a is not b and b in a for a in texts for b in texts), "a mark contains another"
        assert (self.then is not None) == (self.reads in SELF_ENDING)
        assert (self.header is not None) == (self.reads == "header")
        assert bool(self.quote) == (self.reads == "object")
        assert not (self.reads in OPEN_ENDED and any(mark.stays for mark in self.marks)), "it would read forever"
        assert self.reads in OPEN_ENDED or not any(mark.is_shown for mark in self.marks)

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches any mark. It consists of literal texts only, so a search takes linear time."""
        return re.compile("|".join(re.escape(mark.text) for mark in self.marks) or "(?!)")

    @cached_property
    def mark_of(self) -> Mapping[str, Mark]:
        """The marks by their texts."""
        return {mark.text: mark for mark in self.marks}

    @cached_property
    def prefixes(self) -> frozenset[str]:
        """All texts that may become a mark."""
        return frozenset(mark.text[:size] for mark in self.marks for size in range(1, len(mark.text)))

    @cached_property
    def longest(self) -> int:
        """The number of characters of the longest mark."""
        return max((len(mark.text) for mark in self.marks), default=0)


def state(reads: Reads, marks: Mapping[str, str] | None = None, *others: Mark, **options: object) -> ReadingState:
    """Returns a state with marks by the states that they lead to, and others that do more."""
    simple = tuple(Mark(text, to) for text, to in (marks or {}).items())
    return ReadingState(reads, simple + others, **options)  # type: ignore[arg-type]


def framed(states: Mapping[str, ReadingState], frame: tuple[str, ...]) -> dict[str, ReadingState]:
    """Returns states that leave out the marks of `frame`, which stand around the content."""
    content = states["content"]
    marks = tuple(Mark(text, "content") for text in frame if text not in content.mark_of)
    return {**states, "content": replace(content, marks=content.marks + marks)}


@dataclass(frozen=True)
class ToolCallFormat:
    """One format. Reading begins in state `start`; after a text that is not well-formed, it goes on in `content`."""

    states: Mapping[str, ReadingState]
    start: str = "content"
    ids: Literal["openai", "mistral"] = "openai"  # the form of new ids: call_ and 24 digits, or 9 letters and digits
    # A chat template with all texts of one of these tuples teaches the model this format.
    signs: tuple[tuple[str, ...], ...] = ()
    is_forced: bool = False  # the answer consists of calls, so what is cut is a part of a call and no content

    def __post_init__(self) -> None:
        object.__setattr__(self, "states", MappingProxyType(dict(self.states)))
        targets = {self.start, "content"}
        for state in self.states.values():
            targets |= {mark.to for mark in state.marks}
            targets |= {name for name in (state.then, state.otherwise) if name is not None}
        assert targets <= self.states.keys(), f"no such state: {targets - self.states.keys()}"
        assert self.states["content"].reads == "content"

    @cached_property
    def marks(self) -> frozenset[str]:
        """All texts that must be seen, even if they are special tokens."""
        states = self.states.values()
        return frozenset(mark.text for state in states for mark in state.marks) | {
            state.quote for state in states if state.quote
        }
