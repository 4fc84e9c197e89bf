"""The events of an assistant's message, in the order in which the model writes it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the text that the model wrote for itself, before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins. `index` counts the calls of the message from 0."""

    index: int
    id: str  # at least 9 characters, unique
    name: str  # the function, whole; it may be one that the caller did not offer


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments of call `index`, as JSON. All of them together are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """Call `index` is complete and well-formed."""

    index: int


@dataclass(frozen=True, slots=True)
class CallBroken:
    """Call `index`, which had begun, is not well-formed, or the text ended within it. `text` is what the model wrote.

    A whole answer shows the text as content instead of the call. A stream has shown a part of the call already.
    """

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallCut:
    """The text ended within call `index`, which had to be a call. It stays one, with a part of its arguments."""

    index: int


type Event = Reasoning | Content | CallBegin | Arguments | CallEnd | CallBroken | CallCut
