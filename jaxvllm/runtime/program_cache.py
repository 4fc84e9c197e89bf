"""Compiled programs on disk. An entry is whole or not there, whatever happens to the disk."""

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
# No write of some megabytes takes as long.
ABANDONED_SECONDS = 3600.0


def use_persistent_cache(directory: Path) -> None:
    """Makes jax keep compiled programs in `directory`, small ones too, unless the user has chosen a place already.

    jax writes an entry under its final name and never replaces one. After a full disk that left truncated entries for
    ever, which every later start failed to read. So `WholeEntries` reads and writes the files, wherever they are.
    A limit of the cache's size (`jax_compilation_cache_max_size`) leaves jax's own cache in charge.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    chosen = jax.config.jax_compilation_cache_dir
    if not chosen or "://" in chosen or jax.config.jax_compilation_cache_max_size != -1:
        return
    # jax has no public way to say how entries are stored (0.11.2). It asks for one of these wherever there is one.
    if not isinstance(compilation_cache._cache, WholeEntries) or compilation_cache._cache.directory != Path(chosen):
        entries = WholeEntries(Path(chosen))
        entries.clean_up()
        compilation_cache._cache, compilation_cache._cache_initialized = entries, True


class WholeEntries(CacheInterface):
    """jax's entries in a directory, under jax's own names. Damaged ones are deleted when they are read.

    Problems of the disk cost a warning, once, and never a request: the program is compiled in any case.
    """

    def __init__(self, directory: Path):
        self.directory = self._path = directory
        self._has_warned: set[str] = set()

    def get(self, key: str) -> bytes | None:
        """Returns the entry, or None when there is none that is whole."""
        path = self._file(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn("read", error)
            return None
        try:
            compilation_cache.decompress_executable(content)  # fails for any entry that was cut
        except Exception as error:  # whichever of its libraries jax compresses with has its own
            self._warn("damaged", error)
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        return content

    def put(self, key: str, value: bytes) -> None:
        """Writes the entry in one step, in place of one that jax could not use."""
        # Not by `tempfile`, whose files are for one user alone: a cache may be shared.
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
        """Deletes what a process that was killed while it wrote has left behind."""
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
                "compiled programs cannot be %s in %s (%s): each start compiles", what, self.directory, error
            )
