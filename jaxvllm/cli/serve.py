"""`jaxvllm serve`: runs the HTTP server, with an engine in its own process."""

import argparse
import asyncio
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxvllm.cli.flags import add_flags, flag_of, given, with_model
from jaxvllm.cli.parser import ENGINE_EPILOG, Parser
from jaxvllm.cli.vllm_words import CONFIG_FLAG
from jaxvllm.config import EngineConfig
from jaxvllm.gguf_file import is_gguf
from jaxvllm.server.config import ServerConfig
from jaxvllm.server.logs import set_up_logs
from jaxvllm.worker.data_parallel_config import DataParallelConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until a signal, and returns the exit code of `jaxvllm.server.serve.serve`.

    After an error it prints a line on standard error and returns 2 if an option is wrong, 1 for an error of the system.
    """
    args = _parser().parse_args(argv)
    try:
        engine, server, parallel = _configs(args)
        if engine.process_id:
            return _follow(parallel.in_one_engine(engine))
        set_up_logs()
        if parallel.headless:
            from jaxvllm.worker.node import run_node

            asyncio.run(run_node(parallel))
            return 0
        # Imported after parsing, because --help needs no web framework.
        from jaxvllm.server.serve import serve

        return asyncio.run(serve(engine, server, parallel))
    except (ValueError, NotImplementedError) as error:
        return _refuse(error, 2)
    except (OSError, RuntimeError, ImportError) as error:
        return _refuse(error, 1)
    except KeyboardInterrupt:
        return 130


def read_options(argv: Sequence[str]) -> tuple[EngineConfig, ServerConfig, DataParallelConfig]:
    """Returns what the options of `jaxvllm serve` mean. Raises ValueError when one is wrong."""
    try:
        return _configs(_parser().parse_args(argv))
    except SystemExit:
        raise ValueError(f"{' '.join(argv)} are no options of jaxvllm serve: see above") from None


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
    parser.add_argument(
        CONFIG_FLAG, metavar="FILE", help="YAML with options, `port: 8000` in each line; the command line wins"
    )
    add_flags(parser, ServerConfig, "server", takes_lists=True)
    add_flags(parser, EngineConfig, "engine")
    add_flags(parser, DataParallelConfig, "replicas")
    return parser


def _configs(args: argparse.Namespace) -> tuple[EngineConfig, ServerConfig, DataParallelConfig]:
    options = given(args, EngineConfig)
    if args.model_name is None and "model" not in options:
        _check_lists(args)
    options = with_model(options, args.model_name)
    return _all_made(
        lambda: EngineConfig.from_options(**options),
        lambda: ServerConfig(**given(args, ServerConfig)),
        lambda: DataParallelConfig(**given(args, DataParallelConfig)),
    )


def _all_made[E, S, P](*makers: *tuple[Callable[[], E], Callable[[], S], Callable[[], P]]) -> tuple[E, S, P]:
    """Makes every config. Raises one error with what is wrong with each of them."""
    made: list[Any] = []
    errors: list[Exception] = []
    for make in makers:
        try:
            made.append(make())
        except (ValueError, NotImplementedError) as error:
            errors.append(error)
    if len(errors) > 1:
        raise ValueError("\njaxvllm serve: ".join(map(str, errors)))
    if errors:
        raise errors[0]
    return made[0], made[1], made[2]


def _check_lists(args: argparse.Namespace) -> None:
    """Finds the model among several values after a flag if no model is given, or raises ValueError.

    `serve --served-model-name a b org/model` serves org/model, since only names of the model stand there. But
    `serve --api-key KEY MODEL` must not serve the embedded model, with MODEL as a second key.
    """
    for name, groups in vars(args).items():
        if isinstance(groups, list) and any(isinstance(group, list) and len(group) > 1 for group in groups):
            if name == "served_model_name" and _may_be_model(groups[-1][-1]):
                args.model_name = groups[-1].pop()
                return
            raise ValueError(
                f"several values follow {flag_of(name)} and no model is given: write the model before the flags "
                "(demo is the embedded one)"
            )


def _may_be_model(text: str) -> bool:
    """Returns whether a text is a directory, a GGUF file, or a name on the hub such as owner/name."""
    path = Path(text).expanduser()
    return re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", text) is not None or path.is_dir() or is_gguf(path)


def _follow(engine: EngineConfig) -> int:
    """Computes for process 0, which serves."""
    from jaxvllm.engine.multihost import follow_config

    follow_config(engine)
    return 0
