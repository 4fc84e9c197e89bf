"""`jaxvllm serve`: runs the HTTP server, with an engine in its own process."""

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence

from jaxvllm.cli.flags import add_flags, flag_of, given, with_model
from jaxvllm.cli.parser import ENGINE_EPILOG, Parser
from jaxvllm.config import EngineConfig
from jaxvllm.server.config import ServerConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until a signal, and returns the exit code of `jaxvllm.server.serve.serve`.

    After an error it prints a line on standard error and returns 2 if an option is wrong, 1 for an error of the system.
    """
    args = _parser().parse_args(argv)
    try:
        engine, server = _configs(args)
        if engine.process_id:
            return _follow(engine)
        _set_up_logs()
        # Imported after parsing, because --help needs no web framework.
        from jaxvllm.server.serve import serve

        return asyncio.run(serve(engine, server))
    except (ValueError, NotImplementedError) as error:
        return _refuse(error, 2)
    except (OSError, RuntimeError, ImportError) as error:
        return _refuse(error, 1)
    except KeyboardInterrupt:
        return 130


def _refuse(error: Exception, code: int) -> int:
    print(f"jaxvllm serve: {error}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jaxvllm serve",
        usage="%(prog)s [MODEL] [OPTION ...]",
        description="Serve a model over HTTP, with the APIs of OpenAI and Anthropic. Without MODEL, the embedded model "
        "is served. SIGTERM and Ctrl-C let running requests finish; a second signal ends the server at once.",
        epilog=ENGINE_EPILOG,
    )
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="the same as --model")
    add_flags(parser, ServerConfig, "server", takes_lists=True)
    add_flags(parser, EngineConfig, "engine")
    return parser


def _configs(args: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    options = given(args, EngineConfig)
    if args.model_name is None and "model" not in options:
        _check_lists(args)
    options = with_model(options, args.model_name)
    return EngineConfig.from_options(**options), ServerConfig(**given(args, ServerConfig))


def _check_lists(args: argparse.Namespace) -> None:
    """Raises ValueError when several values follow a flag and no model is given: the last may be meant as the model.

    Otherwise `serve --api-key KEY MODEL` would serve the embedded model, with MODEL as a second key.
    """
    for name, groups in vars(args).items():
        if isinstance(groups, list) and any(isinstance(group, list) and len(group) > 1 for group in groups):
            raise ValueError(
                f"several values follow {flag_of(name)} and no model is given: write the model before the flags "
                "(demo is the embedded one)"
            )


def _follow(engine: EngineConfig) -> int:
    """Computes for process 0, which serves."""
    from jaxvllm.engine.multihost import follow_config

    follow_config(engine)
    return 0


def _set_up_logs() -> None:
    """Sets up logs as short lines on standard error, in the same form as those of the engine's process."""
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(asctime)s server: %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("jaxvllm").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # its warnings are about clients' mistakes
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each write to a client that has disconnected
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
