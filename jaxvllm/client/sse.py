"""Server-sent events out of bytes that arrive in pieces of any size (WHATWG HTML, section 9.2)."""

from typing import NamedTuple


class Event(NamedTuple):
    """One event: `data` lines joined by newlines; `name` is "message" where the stream gives none."""

    name: str
    data: bytes


class EventReader:
    """Yields each event once its blank line is there. Comments (keep-alives), ids and retry times are skipped."""

    def __init__(self) -> None:
        self._rest = b""
        self._name = "message"
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[Event]:
        """The events that `data` completes. Lines end in LF or CRLF; the lone CR that the standard allows ends none."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line.startswith(b"event:"):
                self._name = line[6:].strip().decode("utf-8", "replace")
            elif not line:
                if self._data:
                    events.append(Event(self._name, b"\n".join(self._data)))
                self._name, self._data = "message", []
        return events
