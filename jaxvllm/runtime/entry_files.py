"""Entries of a cache on disk. Whatever happens to the disk, an entry is either whole or absent."""

import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

logger = logging.getLogger(__name__)

_PARTIAL = ".partial-"
# A partial file older than this is abandoned: writing a few megabytes never takes as long.
ABANDONED_SECONDS = 3600.0


class EntryFiles:
    """Reads and writes the files of a cache of compiled programs: `name` and a suffix, in one directory.

    A problem of the disk causes one warning and never fails a request, because the program is compiled in any case.
    """

    def __init__(self, directory: Path, suffix: str):
        self.directory = directory
        self._suffix = suffix
        self._has_warned: set[str] = set()

    def read(self, name: str) -> bytes | None:
        """Returns the entry, or None when there is none or it cannot be read. Notes that it was used."""
        path = self._file(name)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn("read", error)
            return None
        with suppress(OSError):
            os.utime(path)
        return content

    def write(self, name: str, content: bytes) -> None:
        """Writes the entry atomically. It replaces an older one."""
        # `tempfile` would make files that only one user can read, but users may share a cache.
        partial = self.directory / f"{_PARTIAL}{uuid4().hex}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(content)
            os.replace(partial, self._file(name))
        except OSError as error:
            self._warn("written", error)
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def discard(self, name: str, error: Exception) -> None:
        """Deletes a damaged entry, which is going to be compiled and written again."""
        if "damaged" not in self._has_warned:
            self._has_warned.add("damaged")
            logger.warning("%s has damaged programs: they are compiled and stored again", self.directory)
        logger.debug("the entry %s is damaged", name, exc_info=error)
        with suppress(OSError):
            self._file(name).unlink(missing_ok=True)

    def clean_up(self, max_bytes: int | None) -> None:
        """Deletes what killed processes left half written, and the entries used least recently beyond `max_bytes`.

        With None it deletes no entries.
        """
        with suppress(OSError):
            for path in self.directory.glob(f"{_PARTIAL}*"):
                if path.stat().st_mtime < time.time() - ABANDONED_SECONDS:
                    path.unlink(missing_ok=True)
            if max_bytes is None:
                return
            entries = [(path.stat(), path) for path in self.directory.glob(f"*{self._suffix}")]
            excess = sum(stat.st_size for stat, _ in entries) - max_bytes
            for stat, path in sorted(entries, key=lambda entry: entry[0].st_mtime):
                if excess <= 0:
                    return
                path.unlink(missing_ok=True)
                excess -= stat.st_size

    def _file(self, name: str) -> Path:
        return self.directory / f"{name}{self._suffix}"

    def _warn(self, what: str, error: Exception) -> None:
        if what not in self._has_warned:
            self._has_warned.add(what)
            text = "compiled programs cannot be %s in %s (%s), so each start compiles"
            logger.warning(text, what, self.directory, error)
