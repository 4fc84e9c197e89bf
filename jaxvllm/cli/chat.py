"""`jaxvllm chat`: chats with a running server, or asks it one question."""

import argparse
import sys
from collections.abc import Sequence

from jaxvllm.cli.exit_code import exit_code
from jaxvllm.cli.flags import add_client_sampling_flags, given
from jaxvllm.cli.parser import Parser
from jaxvllm.client.conversation import Conversation, Dialogue
from jaxvllm.client.server import Server, add_server_flags
from jaxvllm.core.sampling_params import SamplingParams


def main(argv: Sequence[str] | None = None) -> int:
    """Chats and returns the exit code: 0, or with a line on standard error 1 if the server fails, 2 for wrong usage."""
    parser = make_parser(
        "chat", "MESSAGE", "Talk to a model that `jaxvllm serve`, or any OpenAI-compatible server, serves."
    )
    parser.add_argument("--system", "--system-prompt", metavar="TEXT", help="the system message")
    parser.add_argument("--markdown", action="store_true", help="render answers as Markdown, in a terminal")
    args = parser.parse_args(argv)
    return talk(args, "chat", Conversation(args.system), renders_markdown=args.markdown)


def make_parser(name: str, what: str, description: str) -> argparse.ArgumentParser:
    """Returns a parser with the flags that `chat` and `complete` share. `what` is the name of the text to send."""
    parser = Parser(
        prog=f"jaxvllm {name}",
        usage=f"%(prog)s [{what}] [OPTION ...]",
        description=f"{description} With {what}, or with standard input from a pipe, it prints one answer and ends.",
    )
    parser.add_argument("text", nargs="?", metavar=what, help="without it, you type one after the other")
    parser.add_argument("-q", "--quick", dest="quick", metavar=what, help="the same, under vLLM's name")
    parser.add_argument(
        "--stats", action="store_true", help="print time to first token, speed and tokens of each answer"
    )
    add_server_flags(parser)
    add_client_sampling_flags(parser)
    return parser


def talk(args: argparse.Namespace, name: str, dialogue: Dialogue, renders_markdown: bool = False) -> int:
    """Asks once, or until the person ends the dialogue, and returns the exit code."""
    return exit_code(name, lambda: _talk(args, dialogue, renders_markdown))


def _talk(args: argparse.Namespace, dialogue: Dialogue, renders_markdown: bool) -> int:
    server = Server.from_flags(args)
    text = args.text or args.quick
    if text is None and not (sys.stdin.isatty() and sys.stdout.isatty()):
        text = sys.stdin.read().rstrip("\n")
    if text is not None and not text.strip():
        raise ValueError("there is nothing to ask: give a text, or type it at a terminal")
    # Imported only now, because httpx and rich take a third of a second to import.
    from jaxvllm.client.answer import Asker
    from jaxvllm.client.api import Api
    from jaxvllm.client.repl import Repl, line_reader
    from jaxvllm.client.screen import Screen

    screen = Screen(renders_markdown=renders_markdown)
    with Api(server) as api:
        model = args.model or api.first_model()
        asker = Asker(api, screen, {"model": model, **given(args, SamplingParams)}, args.stats)
        if text is not None:
            asker.ask(dialogue, text)
            return 0
        screen.note(f"{model} at {server.base_url}. {dialogue.help}")
        Repl(asker, dialogue, line_reader()).run()
    return 0
