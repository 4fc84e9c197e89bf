"""`Screen`: prints answers. A pipe gets the plain text; a terminal gets no escape sequences of the model."""

import sys
from typing import TextIO

from rich.console import Console
from rich.text import Text

from jaxvllm.client.markdown import GrowingMarkdown

# A model's escape sequences could move the cursor or change the terminal, so they are shown as signs (U+2400...).
_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421, 0x9B: 0x241B}


class Screen:
    """Prints answers to standard output and notes to standard error. It renders Markdown only in terminals."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None, renders_markdown: bool = False):
        self._out = out or sys.stdout
        self._is_terminal = self._out.isatty()
        self._console = Console(file=err or sys.stderr, highlight=False)
        self._markdown = GrowingMarkdown(Console(file=self._out)) if renders_markdown and self._is_terminal else None
        self._ends_line = True

    def text(self, piece: str) -> None:
        """Prints a piece of an answer at once."""
        if self._is_terminal:
            piece = piece.translate(_VISIBLE)
        if self._markdown is not None:
            self._markdown.add(piece)
            return
        self._out.write(piece)
        self._out.flush()
        self._ends_line = piece.endswith("\n")

    def end(self) -> None:
        """Ends the last line of an answer, which is complete or was stopped."""
        if self._markdown is not None:
            self._markdown.end()
        elif not self._ends_line:
            self.text("\n")

    def note(self, line: str) -> None:
        """Prints a note about an answer, such as its speed."""
        self._console.print(Text(line, style="dim"), soft_wrap=True)

    def error(self, line: str) -> None:
        self._console.print(Text(line, style="red"), soft_wrap=True)
