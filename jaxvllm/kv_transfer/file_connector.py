"""Pages in files of a directory, which several engines may share, and which outlive them."""

import logging
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from jaxvllm.core.request import Request
from jaxvllm.kv_transfer.connector import TransferParams
from jaxvllm.kv_transfer.page_format import Page, PageFormat, WrongPage

logger = logging.getLogger(__name__)

# Threads that read. A page of an 8B model is 2 MiB, and one thread reads that in a millisecond.
_READERS = 4


class FileConnector:
    """Keeps every full page in a file of its own: `DIRECTORY/FORMAT/AB/ABCDEF...`, named by the page's hash.

    A file appears whole or not at all. One that is damaged, or of another format, is left alone and its page computed.
    Nothing is ever deleted: that is for whoever owns the directory. After a `reset` this connector, and no other, takes
    the files from before for absent, and writes such pages again when they are computed.
    """

    def __init__(self, directory: Path, page_format: PageFormat):
        """Makes the directory. Raises OSError where it cannot be written to."""
        self._format = page_format
        self._directory = directory / page_format.fingerprint.hex()[:16]
        self._directory.mkdir(parents=True, exist_ok=True)
        self._readers = ThreadPoolExecutor(_READERS, "jaxvllm-read-pages")
        self._last_reset = -1  # nanoseconds by the clock of the file system

    def path(self, digest: bytes) -> Path:
        """The file of the page of that hash."""
        name = digest.hex()
        return self._directory / name[:2] / name

    def num_pages(self, request: Request, hashes: Sequence[bytes]) -> int:
        return next((at for at, digest in enumerate(hashes) if not self._is_there(digest)), len(hashes))

    def load(self, request: Request, hashes: Sequence[bytes]) -> Future[Sequence[Page]]:
        return self._readers.submit(self._read, hashes)

    def _read(self, hashes: Sequence[bytes]) -> Sequence[Page]:
        pages = []
        for digest in hashes:
            path = self.path(digest)
            try:
                pages.append(self._format.decode(path.read_bytes()))
            except (OSError, WrongPage) as error:
                logger.warning("the page in %s is not used: %s", path, error)
                break
        return pages

    def wants(self, request: Request, digest: bytes) -> bool:
        return not self._is_there(digest)

    def save(self, digest: bytes, page: Page) -> None:
        path = self.path(digest)
        path.parent.mkdir(exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(self._format.encode(page))
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise

    def finished(self, request: Request, hashes: Sequence[bytes]) -> TransferParams | None:
        return None

    def reset(self) -> None:
        # Another host's clock may differ from this one's, so the file system itself says what time it is.
        with tempfile.TemporaryFile(dir=self._directory) as file:
            file.write(b"now")
            file.flush()
            self._last_reset = os.fstat(file.fileno()).st_mtime_ns

    def _is_there(self, digest: bytes) -> bool:
        try:
            return self.path(digest).stat().st_mtime_ns > self._last_reset
        except OSError:
            return False

    def close(self) -> None:
        self._readers.shutdown(cancel_futures=True)
