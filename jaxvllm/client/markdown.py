"""`GrowingMarkdown`: renders an answer in Markdown in a terminal while it grows."""

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

FENCES = ("```", "~~~")
RATE = 10  # times per second that the unfinished block is drawn again


class GrowingMarkdown:
    """Prints each block (paragraph, list, code) once it is complete. Only the last block is redrawn as it grows.

    So an answer longer than the terminal scrolls like any text: the part that is redrawn stays on the screen.
    """

    def __init__(self, console: Console):
        self._console = console
        # Nothing else prints meanwhile, so sys.stdout and sys.stderr need not be redirected.
        self._live = Live(
            console=console, transient=True, refresh_per_second=RATE, redirect_stdout=False, redirect_stderr=False
        )
        self._rest = ""

    def add(self, piece: str) -> None:
        """Adds a piece of the answer."""
        self._live.start()  # does nothing when it runs already
        whole, self._rest = split_blocks(self._rest + piece)
        self._live.update(Markdown(self._rest))  # it is drawn with the next line, or at the next tick
        if whole:
            self._console.print(Markdown(whole), end="\n\n")

    def end(self) -> None:
        """Prints the rest of the answer, which is complete or was stopped."""
        self._live.stop()
        if self._rest:
            self._console.print(Markdown(self._rest))
        self._rest = ""


def split_blocks(text: str) -> tuple[str, str]:
    """Splits `text` into its complete blocks and the one that may grow. A blank line outside code ends a block."""
    lines = text.split("\n")
    cut, fence = 0, ""
    for number, line in enumerate(lines[:-1]):  # the last line has not ended yet
        start = line.lstrip()[:3]
        if fence:
            fence = "" if start == fence else fence
        elif start in FENCES:
            fence = start
        elif not line.strip():
            cut = number + 1
    return "\n".join(lines[:cut]), "\n".join(lines[cut:])
