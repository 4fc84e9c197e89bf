"""`jaxvllm bench peers`: this engine beside other engines on a CPU. It is `python -m benchmarks.cpu` of a checkout.

Neither that script nor the workers of the peers are in the wheel: they need environments that the checkout's `make
peers` installs.
"""

import argparse
from importlib import import_module
from types import ModuleType

_SCRIPT = "benchmarks.cpu"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the script. Without a checkout, this ends the program with an error that says where it runs."""
    try:
        _script().add_flags(parser)
    except ModuleNotFoundError as error:
        if error.name not in (_SCRIPT, "benchmarks"):
            raise
        parser.error(
            "this needs a checkout of jaxvllm, because the wheel has no benchmarks/cpu.py: "
            "clone the repository, and run `python -m jaxvllm bench peers` in its folder"
        )


def run(args: argparse.Namespace) -> int:
    return int(_script().run(args))


def _script() -> ModuleType:
    return import_module(_SCRIPT)
