"""An answer in Markdown, rendered in a terminal while it grows."""

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

FENCES = ("```", "~~~")
RATE = 10  # times per second that the unfinished block is drawn again


class GrowingMarkdown:
    """Prints each block (paragraph, list, code) once it is whole; only the last one is drawn again as it grows.

    So an answer longer than the terminal scrolls as any text does: what is drawn again never leaves the screen.
    """

    def __init__(self, console: Console):
        self._console = console
        # Nobody else prints meanwhile: sys.stdout and sys.stderr may stay what they are.
        self._live = Live(
            console=console, transient=True, refresh_per_second=RATE, redirect_stdout=False, redirect_stderr=False
        )
        self._rest = ""

    def add(self, piece: str) -> None:
        """More of the answer."""
        self._live.start()  # does nothing when it runs already
        whole, self._rest = split_blocks(self._rest + piece)
        self._live.update(Markdown(self._rest))  # drawn with the next line, or else at the next tick
        if whole:
            self._console.print(Markdown(whole), end="\n\n")

    def end(self) -> None:
        """The answer is whole, or was stopped."""
        self._live.stop()
        if self._rest:
            self._console.print(Markdown(self._rest))
        self._rest = ""


def split_blocks(text: str) -> tuple[str, str]:
    """The blocks that are whole, and the one that may still grow: a blank line ends a block, unless in a code fence."""
    lines = text.split("\n")
    cut, fence = 0, ""
    for number, line in enumerate(lines[:-1]):  # the last line is not ended yet
        start = line.lstrip()[:3]
        if fence:
            fence = "" if start == fence else fence
        elif start in FENCES:
            fence = start
        elif not line.strip():
            cut = number + 1
    return "\n".join(lines[:cut]), "\n".join(lines[cut:])
