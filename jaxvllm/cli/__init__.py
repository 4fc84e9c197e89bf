"""The command line: `jaxvllm COMMAND`, and `python -m jaxvllm.COMMAND` for each command."""

import sys
from importlib import import_module

COMMANDS = {
    "serve": "serve a model over HTTP, with the APIs of OpenAI and Anthropic",
    "chat": "talk to a running server",
    "complete": "have a running server continue a text",
    "bench": "measure a running server: one load, or a sweep",
    "run-batch": "answer an OpenAI batch file with a running server",
    "generate": "complete prompts offline and print the texts",
    "plan": "say what a model needs of devices that are not here",
    "convert": "write a checkpoint as a tree that every mesh loads by parts",
}


def main(argv: list[str] | None = None) -> int:
    """Runs the command that the first argument names; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments and arguments[0] in COMMANDS:
        command = import_module(f"jaxvllm.cli.{arguments[0].replace('-', '_')}")
        return int(command.main(arguments[1:]))
    asked = arguments[:1] in (["-h"], ["--help"])
    print("usage: jaxvllm COMMAND [OPTION ...]\n", file=sys.stdout if asked else sys.stderr)
    for name, summary in COMMANDS.items():
        print(f"  {name:12} {summary}", file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2
