"""`jaxvllm bench`: measures a running server, or an engine in this process, with vLLM's options and output lines.

Each command is a module of this package, with `add_flags(parser)` and `run(args)`, which returns the exit code.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module

from jaxvllm.cli.exit_code import exit_code
from jaxvllm.cli.parser import Parser

COMMANDS = {
    "serve": "a running server under one load: vLLM's table, flags and JSON keys",
    "sweep": "a running server under several loads: a JSON line each, and a picture of latency over throughput",
    "latency": "one batch of requests in this process, run again and again",
    "throughput": "many requests in this process, all there from the start",
    "ladder": "the same requests without a KV cache, with one, and with each idea since: a table and a picture",
    "startup": "from the start of a process to its first token, without and with a cache of compiled programs",
    "steps": "the steps of an engine in this process, for jaxvllm simulate --table",
    "auto-tune": "search max_num_seqs, the token budget and P:D for the most requests within limits, by simulation",
    "peers": "this engine beside OpenVINO, llama.cpp, vLLM and transformers on a CPU: a table and a picture",
    "kernels": "attention on this device: first its error, then its time beside the device's best",
}
USAGE = "%(prog)s [OPTION ...]"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a benchmark and returns the exit code: 0, 1 if the server or a request failed, 2 for a wrong option."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(prog="jaxvllm bench", description="Measure an engine in this process, or any OpenAI server.")
    commands = parser.add_subparsers(dest="command", required=True)
    parsers = {name: commands.add_parser(name, usage=USAGE, help=summary) for name, summary in COMMANDS.items()}
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help"):
        _refuse(parser, words)
    if not (words and words[0] in COMMANDS):
        parser.parse_args(words)  # prints the help, or says what is wrong
    command = import_module(f"jaxvllm.cli.bench.{words[0].replace('-', '_')}")
    command.add_flags(parsers[words[0]])
    args = parser.parse_args(words)
    return exit_code("bench", lambda: int(command.run(args)))


def _refuse(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    command = next((word for word in words if word in COMMANDS), "serve")
    options = shlex.join(word for word in words if word not in COMMANDS)
    *names, last = COMMANDS
    parser.error(f"give {', '.join(names)} or {last} first: {parser.prog} {command} {options}")
