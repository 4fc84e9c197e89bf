"""Entries of a cache on disk. Whatever happens to the disk, an entry is either whole or absent."""

import logging
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

logger = logging.getLogger(__name__)

_PARTIAL = ".partial-"
# A partial file older than this is abandoned: writing a few megabytes never takes as long.
ABANDONED_SECONDS = 3600.0


class EntryFiles:
    """Reads and writes the files of a cache, such as of compiled programs: `name` and a suffix, in one directory.

    An entry is code, or is trusted like code, so one that another user has written, or could have written, is not read.
    With `is_private` the same is true of the directory. A problem of the disk causes one warning and never fails a
    request, because what is not in the cache is made again.
    """

    def __init__(self, directory: Path, suffix: str, is_private: bool = False):
        self.directory = directory
        self._suffix = suffix
        self._is_private = is_private
        self._has_warned: set[str] = set()

    def read(self, name: str) -> bytes | None:
        """Returns the entry, or None when there is none or it is not to be read. Notes that it was used."""
        try:
            folder = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return self._read_in(folder, self._file(name).name)
            finally:
                os.close(folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn("read", error)
            return None

    def _read_in(self, folder: int, name: str) -> bytes | None:
        """Reads a file of an open directory. It asks about what it has opened, which nobody can swap meanwhile."""
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(f"{name} is no file")
            if not is_ours(found) or (self._is_private and not is_ours(os.fstat(folder))):
                if "ours" not in self._has_warned:
                    self._has_warned.add("ours")
                    text = (
                        "%s has entries that another user has written or may write, such as %s: they are not used, and "
                        "are made again"
                    )
                    logger.warning(text, self.directory, name)
                return None
            content = file.read()
            with suppress(OSError):
                os.utime(descriptor)
        return content

    def write(self, name: str, content: bytes) -> None:
        """Writes the entry atomically. It replaces an older one."""
        # `tempfile` would make files that only one user can read, but users may read each other's caches where they are
        # root's. Nobody else may write to a file, whatever the umask is, or it would not be read again.
        partial = self.directory / f"{_PARTIAL}{uuid4().hex}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
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
            excess = sum(found.st_size for found, _ in entries) - max_bytes
            for found, path in sorted(entries, key=lambda entry: entry[0].st_mtime):
                if excess <= 0:
                    return
                path.unlink(missing_ok=True)
                excess -= found.st_size

    def _file(self, name: str) -> Path:
        return self.directory / f"{name}{self._suffix}"

    def _warn(self, what: str, error: Exception) -> None:
        if what not in self._has_warned:
            self._has_warned.add(what)
            text = "compiled programs cannot be %s in %s (%s), so each start compiles"
            logger.warning(text, what, self.directory, error)


def is_ours(found: os.stat_result) -> bool:
    """Returns whether a file or directory belongs to this user, or to root, and nobody else may write to it."""
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def make_private(directory: Path) -> bool:
    """Makes `directory` if it is not there. Returns whether it belongs to this user and nobody else may write to it."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        logger.warning("programs cannot be stored in %s (%s), so each start traces them", directory, error)
        return False
    if found.st_uid == os.geteuid() and is_ours(found):
        return True
    logger.warning(
        "%s belongs to another user or others may write to it, so nothing in it is used and each start traces its "
        "programs: chmod 700 it, or choose another compilation_cache",
        directory,
    )
    return False
