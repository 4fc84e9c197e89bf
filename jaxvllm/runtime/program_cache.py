"""A cache of compiled programs on disk. Whatever happens to the disk, an entry is either whole or absent."""

import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import jax
from jax._src import compilation_cache
from jax._src.compilation_cache_interface import CacheInterface

logger = logging.getLogger(__name__)

_PARTIAL = ".partial-"
# A partial file older than this is abandoned: writing a few megabytes never takes as long.
ABANDONED_SECONDS = 3600.0


def use_persistent_cache(directory: Path) -> None:
    """Makes jax keep compiled programs in `directory`, small ones too, unless the user has already chosen a place.

    jax writes an entry under its final name and never replaces one. When the disk was full, this left truncated
    entries forever, and every later start failed to read them. So `WholeEntries` reads and writes the files, in
    whichever directory. If the user limits the cache's size (`jax_compilation_cache_max_size`), jax's own cache stays.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    chosen = jax.config.jax_compilation_cache_dir
    if not chosen or "://" in chosen or jax.config.jax_compilation_cache_max_size != -1:
        return
    # jax (0.11.2) has no public way to replace how entries are stored. It uses this attribute when it is set.
    if not isinstance(compilation_cache._cache, WholeEntries) or compilation_cache._cache.directory != Path(chosen):
        entries = WholeEntries(Path(chosen))
        entries.clean_up()
        compilation_cache._cache, compilation_cache._cache_initialized = entries, True


class WholeEntries(CacheInterface):
    """Reads and writes jax's entries in a directory, under jax's own names. It deletes damaged ones that it reads.

    A problem of the disk causes one warning and never fails a request, because the program is compiled in any case.
    """

    def __init__(self, directory: Path):
        self.directory = self._path = directory
        self._has_warned: set[str] = set()

    def get(self, key: str) -> bytes | None:
        """Returns the entry, or None when there is none or it is damaged."""
        path = self._file(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn("read", error)
            return None
        try:
            compilation_cache.decompress_executable(content)  # fails for any truncated entry
        except Exception as error:  # each of the libraries that jax may compress with raises its own class
            self._warn("damaged", error)
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        return content

    def put(self, key: str, value: bytes) -> None:
        """Writes the entry atomically. It replaces an entry that jax could not use."""
        # `tempfile` would make files that only one user can read, but users may share a cache.
        partial = self.directory / f"{_PARTIAL}{uuid4().hex}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(value)
            os.replace(partial, self._file(key))
        except OSError as error:
            self._warn("written", error)
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def clean_up(self) -> None:
        """Deletes partial files of processes that were killed while they wrote."""
        with suppress(OSError):
            for path in self.directory.glob(f"{_PARTIAL}*"):
                if path.stat().st_mtime < time.time() - ABANDONED_SECONDS:
                    path.unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        return self.directory / f"{key}-cache"

    def _warn(self, what: str, error: Exception) -> None:
        if what in self._has_warned:
            return
        self._has_warned.add(what)
        if what == "damaged":
            logger.warning("%s has damaged programs: they are compiled and stored again", self.directory)
        else:
            logger.warning(
                "compiled programs cannot be %s in %s (%s), so each start compiles", what, self.directory, error
            )
