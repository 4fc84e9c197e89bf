"""Another cache of compiled programs than this process has, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax._src import compilation_cache

_OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@contextmanager
def jax_cache(directory: Path | None) -> Iterator[None]:
    """jax's own cache in `directory`, or none. Afterwards everything is as before.

    The cache that an engine has put in place comes back itself: jax would make one of its own from the options alone,
    and that cannot be set aside, so that programs would be stored that XLA had loaded, which fail when they run.
    """
    before = {name: getattr(jax.config, name) for name in _OPTIONS}
    cache = compilation_cache._cache, compilation_cache._cache_initialized
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", None if directory is None else str(directory))
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        compilation_cache._cache, compilation_cache._cache_initialized = cache
