"""`jaxvllm run-batch`: answers an OpenAI batch file with a running server."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from jaxvllm.cli.exit_code import exit_code
from jaxvllm.cli.parser import Parser
from jaxvllm.client.server import Server, add_server_flags

CONCURRENCY = 64
STANDARD = Path("-")  # standard input or output


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the batch and returns the exit code: 0, 1 if the server or any line failed, 2 if an option is wrong."""
    args = _parser().parse_args(argv)
    return exit_code("run-batch", lambda: _run(args))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jaxvllm run-batch",
        usage="%(prog)s -i FILE -o FILE [OPTION ...]",
        description="Send each line of a batch file to a running server. Each line of the output answers the line at "
        "its place in the input, with the server's answer or with an error. A line may be a request of "
        "/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages or /v1/embeddings. A summary, and in a "
        "terminal the progress, is on standard error.",
    )
    parser.add_argument(
        "-i",
        "--input-file",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON lines in OpenAI's format; - is standard input",
    )
    parser.add_argument(
        "-o", "--output-file", type=Path, required=True, metavar="FILE", help="is overwritten; - is standard output"
    )
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
    text = sys.stdin.read() if args.input_file == STANDARD else args.input_file.read_text(encoding="utf-8")
    lines = [line for line in text.split("\n") if line.strip()]
    is_standard = args.output_file == STANDARD
    is_file = STANDARD not in (args.input_file, args.output_file) and args.output_file.exists()
    if is_file and args.output_file.samefile(args.input_file):
        raise ValueError(f"--output-file {args.output_file} is the input: give another")
    # Imported only now, because httpx takes a quarter of a second to import.
    from tqdm import tqdm

    from jaxvllm.client.api import Api
    from jaxvllm.client.batch_file import BatchReader, BatchRunner

    with Api(server) as api:
        model = args.model or api.first_model()
    with (
        nullcontext(sys.stdout) if is_standard else args.output_file.open("w", encoding="utf-8") as output,
        tqdm(total=len(lines), unit="req", disable=None) as bar,
    ):
        runner = BatchRunner(server, BatchReader(model), args.max_concurrency, bar.update)
        totals = asyncio.run(runner.run(lines, output))
    if totals.num_failed:
        where = "the output" if is_standard else args.output_file
        print(f"jaxvllm run-batch: {totals.num_failed} of {len(lines)} requests failed: see {where}", file=sys.stderr)
    print(totals, file=sys.stderr)
    return 1 if totals.num_failed else 0
