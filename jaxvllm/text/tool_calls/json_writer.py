"""`JsonWriter`: the JSON of a value that is written in another notation, and arrives in parts."""

import json

from jaxvllm.text.tool_calls.json_scanner import MAX_DEPTH


class JsonWriter:
    """The containers of the value that are open, and its JSON so far. A scanner of a notation says what comes next."""

    def __init__(self, state: str) -> None:
        """Takes the first state of the scanner."""
        self.done = False
        self._stack: list[str] = []
        # The scanner's own ones, and those in which a container stands: key (a key or the end), item (a value or the
        # end), colon, after (a comma or the end).
        self._state = state
        self._is_key = False
        self._comma_due = False  # whether the innermost container has an item already
        self._json: list[str] = []

    def take(self) -> str:
        """Returns the JSON of what was read since the last call."""
        text = "".join(self._json)
        self._json.clear()
        return text

    def _separate(self) -> None:
        """Writes a comma, where a key or an item is not the first of its container."""
        if self._state != "value" and self._comma_due:
            self._json.append(", ")

    def _open(self, char: str) -> bool:
        if len(self._stack) == MAX_DEPTH:
            return False
        self._stack.append(char)
        self._json.append(char)
        self._state, self._comma_due = ("key" if char == "{" else "item"), False
        return True

    def _close(self, char: str) -> bool:
        if {"{": "}", "[": "]"}[self._stack[-1]] != char:
            return False
        self._stack.pop()
        self._json.append(char)
        self._end_value()
        return True

    def _end_key(self, char: str) -> bool:
        self._state = "value"
        self._json.append(": ")
        return char == ":"

    def _go_on(self) -> bool:
        """Begins the next key or item after a comma."""
        self._state = "key" if self._stack[-1] == "{" else "item"
        return True

    def _end_value(self) -> None:
        if self._is_key:
            self._is_key, self._state = False, "colon"
            return
        self.done = not self._stack
        self._state, self._comma_due = "after", True


def escaped(text: str) -> str:
    """Returns the text as it stands within the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
