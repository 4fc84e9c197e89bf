"""Makes the comments of fields their documentation on the web site, as `--help` does for options."""

import re
from pathlib import Path
from typing import Any

from griffe import Attribute, Docstring, Extension

_COMMENT = re.compile(r"^\s*#\s?(.*)$")
# After the code of a line. No field of ours has a # in a string.
_TRAILING = re.compile(r"^[^#]*?\S\s+#\s(.*)$")


class FieldComments(Extension):
    """Documents an attribute by the comment after it, or by the whole lines of comment above it."""

    def on_attribute_instance(self, *, attr: Attribute, **kwargs: Any) -> None:
        path, first = attr.filepath, attr.lineno
        if attr.docstring is None and attr.parent and attr.parent.is_class and isinstance(path, Path) and first:
            comment = comment_of(path.read_text().splitlines(), first, attr.endlineno or first)
            if comment:
                attr.docstring = Docstring(comment, lineno=first, parent=attr)


def comment_of(lines: list[str], first: int, last: int) -> str:
    """Returns the comment of what stands on the lines `first` to `last`, counted from 1, or an empty text."""
    for line in lines[first - 1 : last]:
        if match := _TRAILING.match(line):
            return match[1]
    above = []
    for line in reversed(lines[: first - 1]):
        match = _COMMENT.match(line)
        if match is None:
            break
        above.append(match[1])
    return " ".join(reversed(above))
