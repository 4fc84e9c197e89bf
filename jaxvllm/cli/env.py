"""`jaxvllm env`: prints what a bug report needs about this machine and its software."""

import argparse
import json
from collections.abc import Sequence

from jaxvllm.cli.parser import Parser
from jaxvllm.environment.report import collect
from jaxvllm.environment.text import text


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report and returns 0, also where no device is found: that is what a report may be about."""
    args = _parser().parse_args(argv)
    try:
        report = collect()
    except KeyboardInterrupt:
        return 130
    print(json.dumps(report, indent=1) if args.json else text(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jaxvllm env",
        description="Print versions, the machine, the devices of jax, the attention backend that `auto` chooses "
        "on them, environment variables and the size of the cache of compiled programs: what a bug report needs. Keys, "
        "tokens and passwords are left out.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; memory in bytes")
    return parser
