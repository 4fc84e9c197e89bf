"""Tells where the time of a GPU goes: the kernels that run during a call, as the profiler of XLA sees them."""

import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


def kernel_times(call: Callable[[], Any], most: int = 16) -> list[dict[str, Any]]:
    """Runs `call`, and returns the kernels that took longest together, with how often each ran and its seconds in all.

    The first entry is the sum of all kernels. The list is empty where the profiler sees no GPU.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            call()
        [path] = Path(directory).rglob("*.xplane.pb")
        planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for plane in planes:
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    for event in line.events:
                        seconds[event.name] += event.duration_ns / 1e9
                        counts[event.name] += 1
    longest = sorted(seconds, key=lambda name: -seconds[name])[:most]
    whole = {"kernel": "all", "count": sum(counts.values()), "seconds": sum(seconds.values())}
    each = [{"kernel": name[:160], "count": counts[name], "seconds": seconds[name]} for name in longest]
    return [whole, *each] if seconds else []
