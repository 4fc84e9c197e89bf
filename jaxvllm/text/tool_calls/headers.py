"""The functions that read the text before a call's arguments, in which the name stands."""

import re

from jaxvllm.text.tool_calls.format import Header

_NAME = re.compile(r"\s*([^\s<>()\[\]{}'\"`,=|]+)\s*")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


def plain(text: str) -> Header | None:
    """Reads a header that is the function's name."""
    match = _NAME.fullmatch(text)
    return Header(match[1]) if match else None


def quoted(text: str) -> Header | None:
    """Reads a header that is the function's name, perhaps in quotes."""
    return plain(text.strip().strip('"'))


def numbered(text: str) -> Header | None:
    """Reads a header such as functions.get_weather:0, which is the call's id as well."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    name = match[1].removeprefix("functions.").partition(":")[0]
    return Header(name, id=match[1] if len(match[1]) >= 9 else None) if name else None


def channel(text: str) -> Header | None:
    """Reads the header of a message of harmony, which names its channel and who it is for."""
    if match := _RECIPIENT.search(text):
        return Header(match[1], to="arguments")
    return Header(to="reasoning" if "analysis" in text else "content")
