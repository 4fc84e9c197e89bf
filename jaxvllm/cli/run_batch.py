"""`jaxvllm run-batch`: an OpenAI batch file, answered by a running server."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxvllm.cli.exit_code import exit_code
from jaxvllm.client.server import Server, add_server_flags

CONCURRENCY = 64


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the batch; exit code 0, 1 when the server or any line failed, 2 when something given is wrong."""
    args = _parser().parse_args(argv)
    return exit_code("run-batch", lambda: _run(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxvllm run-batch",
        description="Send each line of a batch file to a running server. Each line of the output answers the line at "
        "its place in the input: with what the server said, or with an error.",
    )
    parser.add_argument(
        "-i", "--input-file", type=Path, required=True, metavar="FILE", help="JSON lines, as OpenAI has them"
    )
    parser.add_argument("-o", "--output-file", type=Path, required=True, metavar="FILE", help="written anew")
    parser.add_argument(
        "--max-concurrency",
        type=int,
        default=CONCURRENCY,
        metavar="N",
        help="requests at a time (default: %(default)s)",
    )
    add_server_flags(parser)
    return parser


def _run(args: argparse.Namespace) -> int:
    server = Server.from_flags(args)
    if args.max_concurrency < 1:
        raise ValueError(f"--max-concurrency must be at least 1, not {args.max_concurrency}")
    lines = [line for line in args.input_file.read_text(encoding="utf-8").split("\n") if line.strip()]
    if args.output_file.exists() and args.output_file.samefile(args.input_file):
        raise ValueError(f"--output-file {args.output_file} is the input: give another")
    # Only now: httpx takes a quarter of a second to import.
    from tqdm import tqdm

    from jaxvllm.client.api import Api
    from jaxvllm.client.batch import BatchReader, BatchRunner

    with Api(server) as api:
        model = args.model or api.first_model()
    with (
        args.output_file.open("w", encoding="utf-8") as output,
        tqdm(total=len(lines), unit="req", disable=None) as bar,
    ):
        runner = BatchRunner(server, BatchReader(model), args.max_concurrency, bar.update)
        num_failed = asyncio.run(runner.run(lines, output))
    if num_failed:
        print(
            f"jaxvllm run-batch: {num_failed} of {len(lines)} requests failed: see {args.output_file}", file=sys.stderr
        )
    return 1 if num_failed else 0
