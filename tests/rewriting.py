"""In a run of several processes the assertions of each file of tests are rewritten by one of them.

Every process collects all tests. Pytest rewrites their assertions and keeps what comes of it beside the files, but
processes that begin together all find nothing there: in a fresh clone each of them rewrote 330 files.
"""

import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def rewrite_share(config: pytest.Config) -> None:
    """Rewrites a share of all files, and keeps it, before this process collects. The others do so with theirs."""
    told = getattr(config, "workerinput", None)
    if told is None or sys.dont_write_bytecode:
        return
    state, number = config.stash[rewrite.assertstate_key], int(told["workerid"].removeprefix("gw"))
    for path in sorted(Path(__file__).parent.rglob("test_*.py"))[number :: told["workercount"]]:
        directory = rewrite.get_cache_dir(path)
        kept = directory / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite.try_makedirs(directory) and rewrite._read_pyc(path, kept, state.trace) is None:
            digest, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, digest, kept)
