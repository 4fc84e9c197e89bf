"""`ArgumentCheck`: validates the arguments of forced calls by what the grammar could not hold of their schemas."""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

# A check takes 0.1 s. One that takes longer, with its wait for others, is given up, so that no answer waits for it.
SECONDS = 3.0
MAX_PROCESSES = 2


@dataclass(frozen=True)
class ForcedCall:
    """A call that had to be one, and that is whole."""

    name: str
    arguments: str  # JSON
    schema: Mapping[str, Any]


class ArgumentCheck:
    """Tells which rules calls break. It changes no call: that is the client's to validate.

    A process validates, because schemas come from clients, and some take for ever.
    """

    def __init__(self, seconds: float = SECONDS):
        self._seconds = seconds
        self._places = asyncio.Semaphore(MAX_PROCESSES)

    async def warnings(self, calls: Sequence[ForcedCall]) -> list[str]:
        """Returns a text for each rule that a call breaks, or one that says that they could not be checked."""
        if not calls:
            return []
        with suppress(TimeoutError, OSError, ValueError):
            async with asyncio.timeout(self._seconds), self._places:
                told: list[str] = json.loads(await _run(json.dumps([asdict(call) for call in calls]).encode()))
                return list(dict.fromkeys(told))
        return ["the calls could not be checked against their schemas in time"]


async def _run(data: bytes) -> bytes:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "jaxvllm.server.argument_check_process",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the parent
    )
    try:
        output, _ = await process.communicate(data)
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return output
