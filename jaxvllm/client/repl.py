"""Reads a person's lines for a model. A line that begins with / is a command, any other line is a message."""

from collections.abc import Callable
from pathlib import Path

from jaxvllm.client.answer import Asker
from jaxvllm.client.conversation import Conversation, Dialogue
from jaxvllm.client.errors import ServerError

# The lines that end a dialogue. People try the first two in other programs.
LEAVE = ("/exit", "/bye", "/quit")


class Repl:
    """Reads lines until `/exit` or Ctrl-D. Ctrl-C stops the answer that is arriving, or the line being typed."""

    def __init__(self, asker: Asker, dialogue: Dialogue, read_line: Callable[[str], str]):
        self._asker = asker
        self._dialogue = dialogue
        self._read_line = read_line

    def run(self) -> None:
        """Reads and answers lines. After an error of the server, which is shown, the person may try again."""
        while True:
            try:
                line = self._read_line("> ").strip()
            except KeyboardInterrupt:
                self._asker.screen.note("\n(Ctrl-D or /exit ends)")
                continue
            except EOFError:
                self._asker.screen.note("")
                return
            if line in LEAVE:
                return
            try:
                if line.startswith("/") and isinstance(self._dialogue, Conversation):
                    self._command(self._dialogue, *_parted(line))
                elif line:
                    self._asker.ask(self._dialogue, line)
            except KeyboardInterrupt:
                self._asker.screen.note("(stopped)")
            except (ServerError, OSError) as error:
                self._asker.screen.error(str(error))

    def _command(self, conversation: Conversation, name: str, rest: str) -> None:
        screen = self._asker.screen
        if name == "/clear":
            conversation.clear()
            screen.note("(the conversation starts anew)")
        elif name == "/system":
            conversation.system = rest or None
            screen.note("(system message set)" if rest else "(no system message)")
        elif name == "/save" and rest:
            conversation.save(Path(rest), self._asker.fields)
            screen.note(f"(saved to {rest})")
        elif name == "/save":
            screen.error("/save needs the name of a file")
        else:
            screen.note(conversation.help)


def _parted(line: str) -> tuple[str, str]:
    name, _, rest = line.partition(" ")
    return name, rest.strip()


def line_reader() -> Callable[[str], str]:
    """Returns `input`, which has arrow keys and a history if Python has readline."""
    try:
        import readline  # noqa: F401  the import gives input() its history
    except ImportError:
        pass
    return input
