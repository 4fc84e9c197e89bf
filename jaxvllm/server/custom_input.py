"""`CustomInput`: the input of a custom tool, read from the arguments of the function that stands for it."""

import json
import re

from jaxvllm.text.assistant_message import INPUT

_BEGIN = re.compile(r'\s*\{\s*"' + INPUT + r'"\s*:\s*"')
# As much of a JSON string as is complete. Two halves of one character belong together, if both are there.
_HALF = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_OTHER_HALF = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ANY = r"\\u[0-9a-fA-F]{4}"
_COMPLETE = re.compile(
    rf"(?:[^\"\\]|\\[\"\\/bfnrt]|{_HALF}{_OTHER_HALF}|{_HALF}(?=[^\\]|\\[^u]|(?!{_OTHER_HALF}){_ANY})|(?!{_HALF}){_ANY})*"
)
_LONELY = re.compile("[\ud800-\udfff]")


class CustomInput:
    """Reads arguments such as `{"input": "..."}` in parts of any size. Other arguments are the input as they are."""

    def __init__(self) -> None:
        self.text = ""
        self._pending = ""  # that is not understood yet
        self._has_begun = False
        self._has_ended = False

    def push(self, arguments: str) -> str:
        """Reads more of the arguments, and returns what the input has more."""
        if self._has_ended:
            return ""
        self._pending += arguments
        if not self._has_begun:
            found = _BEGIN.match(self._pending)
            if found is None:
                return ""
            self._has_begun = True
            self._pending = self._pending[found.end() :]
        found = _COMPLETE.match(self._pending)
        assert found is not None
        self._has_ended = self._pending[found.end() :].startswith('"')
        self._pending = self._pending[found.end() :]
        return self._more(_decoded(found[0]))

    def finish(self) -> str:
        """Reads the end of the arguments, and returns what the input has more."""
        if self._has_begun:
            return ""
        try:
            whole = json.loads(self._pending)
        except (ValueError, RecursionError):
            return self._more(self._pending)
        given = whole.get(INPUT) if isinstance(whole, dict) else None
        return self._more(_encodable(given) if isinstance(given, str) else self._pending)

    def _more(self, text: str) -> str:
        self.text += text
        return text


def _decoded(inner: str) -> str:
    """Returns the text of a JSON string, given without its quotes."""
    text: str = json.loads(f'"{inner}"', strict=False)
    return _encodable(text)


def _encodable(text: str) -> str:
    """Returns `text` with a sign for each half of a character that has no other half, which UTF-8 cannot encode."""
    return _LONELY.sub("\ufffd", text)
