"""What several files here need of jax's cache of compiled programs."""

from collections.abc import Iterator

import jax
import pytest
from jax._src import compilation_cache


@pytest.fixture
def no_cache() -> Iterator[None]:
    """As in a process where nobody has chosen a cache yet."""
    names = ["jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"]
    names.append("jax_persistent_cache_min_entry_size_bytes")
    before = {name: getattr(jax.config, name) for name in names}
    cache = compilation_cache._cache, compilation_cache._cache_initialized
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    compilation_cache._cache, compilation_cache._cache_initialized = cache  # it may be ours, which can be set aside
