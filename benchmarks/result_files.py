"""Writes result files: the origin of a figure as `jaxvllm bench` tells it, and the machine and the commit."""

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxvllm.bench.offline.origin import origin

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Returns median and range in the form of the tables."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def machine() -> dict[str, Any]:
    """Describes this machine and its current load. Call it before measuring."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0].split(":", 1)[1].strip() if models else platform.processor(),
        "cores": sorted(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average_at_start": os.getloadavg()[0],
    }


def commit() -> str:
    """Returns the short commit, with `-dirty` when the tree differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:  # a lent machine may have no git
        return "uncommitted"
    return done.stdout.strip() or "uncommitted"


def write_record(name: str, device: dict[str, Any], record: dict[str, Any]) -> Path:
    """Writes `record`, with its date, commit, `device`, command and versions, to results/NAME-DATE-COMMIT.json.

    Versions that the record has itself are added to those of Python and of the packages that every benchmark uses.
    """
    whole = origin(device) | {"commit": commit()}
    path = RESULTS / f"{name}-{whole['date'][:10]}-{whole['commit']}.json"
    whole |= record | {"versions": whole["versions"] | record.get("versions", {})}
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n")
    return path
