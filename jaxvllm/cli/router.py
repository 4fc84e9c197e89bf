"""`jaxvllm router`: runs a proxy before several servers."""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from jaxvllm.cli.flags import add_flags, given
from jaxvllm.cli.parser import Parser
from jaxvllm.router.config import RouterConfig
from jaxvllm.server.logs import set_up_logs


def main(argv: Sequence[str] | None = None) -> int:
    """Passes requests on until a signal, and returns the exit code of `jaxvllm.router.serve.serve`.

    After an error it prints a line on standard error and returns 2 if an option is wrong, 1 for an error of the system.
    """
    args = _parser().parse_args(argv)
    try:
        config = RouterConfig(**given(args, RouterConfig))
        set_up_logs("router")
        # Imported after parsing, because --help needs no web framework.
        from jaxvllm.router.serve import serve

        return asyncio.run(serve(config))
    except ValueError as error:
        return _refuse(error, 2)
    except OSError as error:
        return _refuse(error, 1)
    except KeyboardInterrupt:
        return 130


def _refuse(error: Exception, code: int) -> int:
    print(f"jaxvllm router: {error}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jaxvllm router",
        usage="%(prog)s --backend URL ... | --prefill URL ... --decode URL ... [OPTION ...]",
        description="Pass requests on to several servers. With --prefill and --decode, one server computes the prompt "
        "and another goes on from its KV: start both with the kv_connector peer and the same secret.",
    )
    add_flags(parser, RouterConfig, "router", takes_lists=True)
    return parser
