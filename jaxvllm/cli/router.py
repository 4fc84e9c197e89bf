"""`jaxvllm router`: runs a proxy before several servers."""

import argparse
import logging
import sys
from collections.abc import Sequence

from jaxvllm.cli.flags import add_flags, given
from jaxvllm.cli.parser import Parser
from jaxvllm.router.config import RouterConfig

# Answers that are being written may take so long after the first signal. Kubernetes waits for as long by default.
LAST_ANSWERS_SECONDS = 30


def main(argv: Sequence[str] | None = None) -> int:
    """Passes requests on until a signal. Prints a line and returns 2 if an option is wrong, 1 if it cannot listen."""
    args = _parser().parse_args(argv)
    try:
        config = RouterConfig(**given(args, RouterConfig))
    except ValueError as error:
        print(f"jaxvllm router: {error}", file=sys.stderr)
        return 2
    # Imported after parsing, because --help needs no web framework.
    import uvicorn

    from jaxvllm.router.proxy import Proxy
    from jaxvllm.server.http.listener import listen

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        listener = listen(config.host, config.port)
    except OSError as error:
        print(f"jaxvllm router: {error}", file=sys.stderr)
        return 1
    with listener:
        host, port = listener.getsockname()[:2]
        logging.getLogger(__name__).info("passing requests on at http://%s:%d", host, port)
        settings = uvicorn.Config(
            Proxy(config).app,
            http="httptools",
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=LAST_ANSWERS_SECONDS,
        )
        uvicorn.Server(settings).run([listener])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jaxvllm router",
        usage="%(prog)s --backend URL ... | --prefill URL ... --decode URL ... [OPTION ...]",
        description="Pass requests on to several servers. With --prefill and --decode, one server computes the prompt "
        "and another goes on from its KV: start both with the kv_connector peer and the same secret.",
    )
    add_flags(parser, RouterConfig, "router", takes_lists=True)
    return parser
