"""jax's own cache of compiled programs on disk, which must trace a program to find it.

It keeps what `stored_programs` cannot: programs with functions of a user's, and those of several hosts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import jax
from jax._src import compilation_cache
from jax._src.compilation_cache_interface import CacheInterface

from jaxvllm.runtime.entry_files import EntryFiles

# The demo model's programs are 3 MB.
MAX_BYTES = 2**30

_is_set_aside: ContextVar[bool] = ContextVar("_is_set_aside", default=False)


@contextmanager
def set_aside() -> Iterator[None]:
    """Keeps this thread from reading and writing programs in the cache within the block. They are kept elsewhere.

    XLA on CPU cannot store a program that it has loaded (jax 0.11.2): it loads without an error, and when it runs, a
    function is not found. So what is to be stored must come from the compiler.
    """
    token = _is_set_aside.set(True)
    try:
        yield
    finally:
        _is_set_aside.reset(token)


def use_persistent_cache(directory: Path) -> bool:
    """Makes jax keep compiled programs in `directory`, small ones too, unless the user has already chosen a place.

    jax writes an entry under its final name and never replaces one. When the disk was full, this left truncated
    entries forever, and every later start failed to read them. So `WholeEntries` reads and writes the files, in
    whichever directory. If the user limits the cache's size (`jax_compilation_cache_max_size`), or it is not on a disk,
    jax's own cache stays. Returns whether it can be `set_aside`, as only ours can.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    chosen = jax.config.jax_compilation_cache_dir
    if not chosen:
        return True
    if "://" in chosen or jax.config.jax_compilation_cache_max_size != -1:
        return False
    # jax (0.11.2) has no public way to replace how entries are stored. It uses this attribute when it is set.
    if not isinstance(compilation_cache._cache, WholeEntries) or compilation_cache._cache.directory != Path(chosen):
        entries = WholeEntries(Path(chosen))
        # In a directory that the user chose for jax, other programs than ours may have entries.
        entries.files.clean_up(MAX_BYTES if chosen == str(directory) else None)
        compilation_cache._cache, compilation_cache._cache_initialized = entries, True
    return True


class WholeEntries(CacheInterface):
    """Reads and writes jax's entries in a directory, under jax's own names. It deletes damaged ones that it reads."""

    def __init__(self, directory: Path):
        self.files = EntryFiles(directory, "-cache")
        self.directory = self._path = directory

    def get(self, key: str) -> bytes | None:
        """Returns the entry, or None when there is none or it is damaged."""
        content = None if _is_set_aside.get() else self.files.read(key)
        if content is None:
            return None
        try:
            compilation_cache.decompress_executable(content)  # fails for any truncated entry
        except Exception as error:  # each of the libraries that jax may compress with raises its own class
            self.files.discard(key, error)
            return None
        return content

    def put(self, key: str, value: bytes) -> None:
        """Writes the entry atomically. It replaces an entry that jax could not use."""
        if not _is_set_aside.get():
            self.files.write(key, value)
