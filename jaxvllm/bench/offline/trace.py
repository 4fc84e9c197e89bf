"""Records what the host and the device do, for xprof and Perfetto."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax


@contextmanager
def traced(directory: Path) -> Iterator[None]:
    """Writes a trace of the block below `directory`: `*.xplane.pb` for xprof, `*.trace.json.gz` for Perfetto.

    Prints where it is. Raises OSError when the directory cannot be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    options = jax.profiler.ProfileOptions()
    # With calls of Python functions, a trace of 64 tokens has a million events, and viewers drop the later ones.
    options.python_tracer_level = 0
    with jax.profiler.trace(directory, profiler_options=options):
        yield
    latest = max(directory.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    print(f"Profile: {latest} (xprof), and beside it *.trace.json.gz (https://ui.perfetto.dev)")
