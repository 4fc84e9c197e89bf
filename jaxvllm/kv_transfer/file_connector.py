"""Pages in files of a directory, which several engines may share, and which outlive them."""

import logging
import os
import stat
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from jaxvllm.core.request import Request
from jaxvllm.kv_transfer.connector import TransferParams
from jaxvllm.kv_transfer.page_format import Page, PageFormat, WrongPage

logger = logging.getLogger(__name__)

# Threads that read. A page of an 8B model is 2 MiB, and one thread reads that in a millisecond.
_READERS = 4
# When a page could not be written, as on a full disk, no other is for so long.
PAUSE_SECONDS = 30.0
# A partial file older than this was left by a process that was killed.
_ABANDONED_SECONDS = 3600.0
# Files that are known to hold something else than their pages.
_MOST_WRONG = 10_000
# What could not be used or written is told once in so many seconds.
_TOLD_SECONDS = 60.0


class FileConnector:
    """Keeps every full page in a file of its own: `DIRECTORY/FORMAT/AB/ABCDEF...`, named by the page's hash.

    A file appears whole or not at all, and holds its page's hash. One that holds something else, or that is no file, is
    taken for absent until it is another one, and replaced when its page is computed again. Nothing is ever deleted:
    that is for whoever owns the directory. After a `reset` this connector, and no other, takes the files from before
    for absent, and writes such pages again when they are computed.

    Until the weights are named nothing is there and nothing is kept, because the name is in the path.
    """

    def __init__(self, directory: Path, page_format: PageFormat, clock: Callable[[], float] = time.monotonic):
        """Makes the directory. Raises OSError where it cannot be written to."""
        self._format = page_format
        self._root = directory
        self._clock = clock
        self._partial = directory / ".partial"  # pages that are being written, on the same file system
        self._partial.mkdir(parents=True, exist_ok=True)
        self._clean_up()
        self._readers = ThreadPoolExecutor(_READERS, "jaxvllm-read-pages")
        self._last_reset = -1  # nanoseconds by the clock of the file system
        self._paused_until = clock()
        self._quiet_until = clock()
        # What was found in place of a page: by its name, the file's number, size and time.
        self._wrong: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()

    def path(self, digest: bytes) -> Path:
        """Returns the file of the page of that hash."""
        name = digest.hex()
        return self._root / self._format.fingerprint.hex()[:16] / name[:2] / name

    def num_pages(self, request: Request, hashes: Sequence[bytes]) -> int:
        return next((at for at, digest in enumerate(hashes) if not self._is_there(digest)), len(hashes))

    def load(self, request: Request, hashes: Sequence[bytes]) -> Future[Sequence[Page]]:
        return self._readers.submit(self._read, hashes)

    def _read(self, hashes: Sequence[bytes]) -> Sequence[Page]:
        pages = []
        for digest in hashes:
            path, found = self.path(digest), None
            try:
                found = _identity(os.stat(path, follow_symlinks=False))
                pages.append(self._format.decode(digest, _content(path, self._format.most_bytes)))
            except (OSError, WrongPage) as error:
                if found is not None:
                    self._wrong[digest] = found
                    if len(self._wrong) > _MOST_WRONG:
                        self._wrong.popitem(last=False)
                self._tell("the page in %s is not used: %s", path, error)
                break
        return pages

    def wants(self, request: Request, digest: bytes) -> bool:
        return self._format.is_known and self._clock() >= self._paused_until and not self._is_there(digest)

    def save(self, digest: bytes, page: Page) -> bool:
        if not self._format.is_known or self._clock() < self._paused_until:
            return False
        path, name = self.path(digest), None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self._partial)
            with os.fdopen(descriptor, "wb") as file:
                file.write(self._format.encode(digest, page))
            os.replace(name, path)
        except OSError as error:
            self._paused_until = self._clock() + PAUSE_SECONDS
            logger.warning("pages are not written to %s for %.0f s: %s", self._root, PAUSE_SECONDS, error)
            return False
        finally:
            if name is not None:
                with suppress(OSError):  # it has become the page's, or there is nothing more that can be done
                    os.unlink(name)
        return True

    def finished(self, request: Request, hashes: Sequence[bytes]) -> TransferParams | None:
        return None

    def reset(self) -> None:
        # Another host's clock may differ from this one's, so the file system itself says what time it is.
        try:
            with tempfile.TemporaryFile(dir=self._partial) as file:
                self._last_reset = os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            self._last_reset = time.time_ns()

    def _is_there(self, digest: bytes) -> bool:
        if not self._format.is_known:
            return False
        try:
            found = os.stat(self.path(digest), follow_symlinks=False)
        except OSError:
            return False
        is_page = stat.S_ISREG(found.st_mode) and found.st_mtime_ns > self._last_reset
        return is_page and self._wrong.get(digest) != _identity(found)

    def _tell(self, text: str, *arguments: object) -> None:
        """Writes a line to the log, unless there was one a moment ago."""
        if self._clock() >= self._quiet_until:
            self._quiet_until = self._clock() + _TOLD_SECONDS
            logger.warning(text, *arguments)

    def _clean_up(self) -> None:
        """Deletes what killed processes left half written."""
        with suppress(OSError):
            for entry in os.scandir(self._partial):
                if entry.stat(follow_symlinks=False).st_mtime < time.time() - _ABANDONED_SECONDS:
                    os.unlink(entry.path)

    def close(self) -> None:
        self._readers.shutdown(cancel_futures=True)


def _content(path: Path, most_bytes: int) -> bytes:
    """Reads a page's file. Whatever else is in its place, a pipe or a device that never ends, it does not wait for it.

    Raises OSError where it cannot be read, and WrongPage where it is no file, or a longer one.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise WrongPage("it is no file")
        if found.st_size > most_bytes:
            raise WrongPage(f"a page has at most {most_bytes} bytes, and it has {found.st_size}")
        return file.read(most_bytes + 1)


def _identity(found: os.stat_result) -> tuple[int, ...]:
    """Numbers that another file at the same place does not have."""
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
