"""The engine's process: when it cannot be built, and when its parent is gone."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from jaxvllm import AsyncLLM
from jaxvllm.engine.async_llm import EngineState
from tests.processes import wait_until_gone


@pytest.mark.parametrize(
    ("options", "message"),
    [({"model": "/nowhere"}, "'/nowhere' is not a directory"), ({"mesh": "1x9"}, "mesh 1x9 needs 9 devices")],
)
def test_an_engine_that_cannot_be_built(options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> AsyncLLM:
        llm = AsyncLLM(**options)
        with pytest.raises(ValueError, match=message):
            await llm.start()
        assert llm.state is EngineState.FAILED and llm.pid is None
        await llm.close()
        return llm

    with tempfile.TemporaryDirectory() as directory:  # other engines of this machine use /tmp; tmp_path is too long
        monkeypatch.setattr(tempfile, "tempdir", directory)
        asyncio.run(run())
        assert not list(Path(directory).iterdir())


ORPHAN = """
import asyncio, os, sys
from jaxvllm import AsyncLLM
async def main():
    llm = AsyncLLM()
    llm.launch()
    while llm.pid is None:
        await asyncio.sleep(0.01)
    if "ready" in sys.argv:
        await llm.ready()
    print(llm.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_a_parent_that_is_killed_takes_the_engine_along(stopped: bool) -> None:
    # A stopped engine ends if it has asked the kernel for that, early in its life; before, it sees its input end.
    arguments = ["ready"] if stopped else []
    with subprocess.Popen([sys.executable, "-c", ORPHAN, *arguments], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
    wait_until_gone(pid)
