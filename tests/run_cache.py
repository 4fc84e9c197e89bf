"""The directory in which all processes of one run of the tests keep the programs that engines have compiled.

Both workers of xdist have it, so that a program is compiled once in a run. Nothing of it is left for the next run: a
test that changes what is traced cannot spoil that.
"""

import os
import shutil
import tempfile

import pytest

# Inherited by the workers, which pytest's first process starts.
_VARIABLE = "JAXVLLM_TESTS_RUN_CACHE"


def begin(config: pytest.Config) -> None:
    """Makes the directory, unless the process that started this one has made it, which then also removes it."""
    if _VARIABLE not in os.environ:
        directory = os.environ[_VARIABLE] = tempfile.mkdtemp(prefix="jaxvllm-tests-")
        config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))


def run_cache() -> str:
    """Returns the directory, for `EngineConfig.compilation_cache`.

    A test that counts compilations, or that changes code that is traced, gives its engine no cache instead.
    """
    return os.environ[_VARIABLE]
