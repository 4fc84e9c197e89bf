"""Another cache of compiled programs than this process has, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import pytest
from jax._src import cache_key, compilation_cache

from jaxvllm.runtime.program_cache import use_persistent_cache
from tests.run_cache import run_cache

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


@contextmanager
def same_programs_once() -> Iterator[None]:
    """A cache of this run, in which two programs are one if XLA is given the same for both, on whichever devices.

    jax's own cache does so on GPUs. The one of our programs knows them by what they are traced from, so that models
    with the same head, and replicas, have a sampler each: so engines that start within have `compilation_cache=None`.
    """
    hashed, directory = cache_key._hash_serialized_compile_options, Path(run_cache()) / "same"
    with pytest.MonkeyPatch.context() as patch, jax_cache(directory):
        patch.setattr(cache_key, "_hash_serialized_compile_options", lambda *args, **_: hashed(*args, True))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        # Another worker may read what is being written, and an engine that began earlier may set it aside.
        assert use_persistent_cache(directory)
        yield
