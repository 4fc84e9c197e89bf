"""The command line `jaxvllm COMMAND`. `python -m jaxvllm COMMAND` is the same."""

import difflib
import os
import sys
from importlib import import_module

from jaxvllm import __version__

COMMANDS = {
    "serve": "Serve a model over HTTP, with the APIs of OpenAI and Anthropic.",
    "router": "Pass requests on to several servers, or prompts to some and answers to others.",
    "chat": "Chat with a running server, or ask it one question.",
    "complete": "Have a running server continue a text.",
    "bench": "Measure a running server, or an engine: its latency, throughput, start and kernels.",
    "run-batch": "Answer an OpenAI batch file with a running server.",
    "generate": "Complete prompts without a server and print the texts.",
    "explain": "Complete prompts, and tell step by step what the engine did.",
    "plan": "Say what a model needs on TPUs or GPUs, which need not be here.",
    "simulate": "Say in virtual time how a deployment would answer a load.",
    "env": "Print what a bug report needs: versions, devices, variables.",
    "convert": "Write a checkpoint in a form that several devices load in parts.",
}
VERSION = ("-V", "--version", "version")
# The exit code of programs that the signal SIGPIPE ends.
READER_LEFT = 128 + 13
HELP = ("-h", "--help", "help")


def main(argv: list[str] | None = None) -> int:
    """Runs the command that the first argument names, and returns the exit code.

    If the reader of standard output leaves before the end, as `head` does, that is no error.
    """
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Python writes what is left when it ends, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_LEFT


def _run(arguments: list[str]) -> int:
    name = arguments[0] if arguments else None
    if name in COMMANDS:
        from jaxvllm.engine.startup import uncollected

        with uncollected():  # 0.02 s of what `generate` imports
            command = import_module(f"jaxvllm.cli.{name.replace('-', '_')}")
        return int(command.main(arguments[1:]))
    if name in VERSION:
        print(f"jaxvllm {__version__}")
        return 0
    if name in HELP:
        print(_usage())
        return 0
    print(_refusal(name), _usage(), sep="\n\n", file=sys.stderr)
    return 2


def _usage() -> str:
    commands = [f"  {name:12} {summary}" for name, summary in COMMANDS.items()]
    lines = ["usage: jaxvllm COMMAND [OPTION ...]", "       jaxvllm --version", "", "commands:", *commands, ""]
    return "\n".join([*lines, "`jaxvllm COMMAND --help` lists the options of a command."])


def _refusal(name: str | None) -> str:
    if name is None:
        return "jaxvllm: give a command"
    near = difflib.get_close_matches(name, COMMANDS, 1)
    kind = "option" if name.startswith("-") else "command"
    return f"jaxvllm: unknown {kind} {name}" + (f": did you mean {near[0]}?" if near else "")
