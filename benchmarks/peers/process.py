"""A peer in a process of its own, with its own environment: one line of JSON in, one out."""

import json
import subprocess
from pathlib import Path
from typing import Any


class PeerProcess:
    """A worker script that runs until `close`."""

    def __init__(self, python: Path, script: Path) -> None:
        self._script = script
        self._process = subprocess.Popen(
            [str(python), str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer. Raises RuntimeError if the worker ended instead."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, and there is no answer
        if answer := self._process.stdout.readline():
            return dict(json.loads(answer))
        raise RuntimeError(f"{self._script.name} ended with status {self._process.wait()}: see above")

    def close(self) -> None:
        """Lets the worker end, and waits for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
