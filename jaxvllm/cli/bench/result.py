"""Prints the result of a benchmark of this process, and writes it as JSON."""

import json
from pathlib import Path
from typing import Any, Protocol


class Result(Protocol):
    """The figures of a benchmark."""

    def lines(self) -> list[str]: ...

    def record(self) -> dict[str, Any]: ...


def check_output(path: Path | None) -> None:
    """Raises ValueError when a result could not be written to `path`. Call it before the measurement."""
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"--output-json {path} must be in a directory that exists: make it first")


def tell(result: Result, model: str, path: Path | None) -> None:
    """Prints the result. With a `path`, writes it there together with its origin."""
    from jaxvllm.bench.offline.origin import origin

    print("\n".join(result.lines()))
    if path is not None:
        path.write_text(json.dumps(origin() | {"model": model} | result.record(), indent=1) + "\n", encoding="utf-8")
