"""The engine's process: when it cannot be built, and when its parent is gone."""

import asyncio
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from jaxvllm import AsyncLLM
from jaxvllm.worker import wire
from jaxvllm.worker.engine_client import EngineState
from jaxvllm.worker.engine_process import ChildProcess, EngineProcess
from tests.processes import stop, wait_until_gone
from tests.waiting import IdleClockLoop


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


@pytest.mark.parametrize(
    ("code", "is_heard"),
    [(0, True), (1, True), (-signal.SIGKILL, False)],
    ids=["it ended", "it failed", "it was killed"],
)
def test_the_only_word_of_a_process_may_come_late(code: int, is_heard: bool, tmp_path: Path) -> None:
    """It says why it has no engine and ends. On a busy machine the end may be noticed long before that is read."""
    word = wire.Failed("no such model", True)

    class Ended:
        returncode = code

        async def wait(self) -> int:
            return code

    class Socket:
        async def recv(self) -> bytes:
            await asyncio.sleep(5)
            return wire.encode(word)

    async def run() -> tuple[wire.Report | None, float]:
        process = EngineProcess(ChildProcess(Ended()), Socket(), lambda: None)  # type: ignore[arg-type]
        return await process.receive(), asyncio.get_running_loop().time()

    said, seconds = asyncio.run(run(), loop_factory=IdleClockLoop)
    assert said == (word if is_heard else None)
    assert is_heard or seconds < 1, "a process that was killed has said nothing, and is replaced at once"


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
    await asyncio.sleep(3600)
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
            stop(pid)
        parent.kill()
    wait_until_gone(pid)
