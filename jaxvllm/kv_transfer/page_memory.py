"""`PageMemory`: pages beside the pool, those that were used last, up to a number of bytes."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from jaxvllm.kv_transfer.page_format import Page


class PageMemory:
    """Pages by their hash, the one that was used longest ago first to go. Several threads may use it.

    Pages that are held stay, even beyond the limit, until `let_go`.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._pages: OrderedDict[bytes, Page] = OrderedDict()
        self._holds: dict[bytes, int] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._pages

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def is_full(self) -> bool:
        """Whether the pages that are held take all the memory that there is."""
        return self._num_bytes > self.max_bytes

    def put(self, digest: bytes, page: Page) -> None:
        """Keeps `page`. One that has that hash already stays, and becomes the one that was used last."""
        with self._lock:
            if digest in self._pages:
                self._pages.move_to_end(digest)
                return
            self._pages[digest] = page
            self._num_bytes += page.nbytes
            self._shrink()

    def get(self, digest: bytes) -> Page | None:
        """Returns the page of that hash, which becomes the one that was used last."""
        with self._lock:
            page = self._pages.get(digest)
            if page is not None:
                self._pages.move_to_end(digest)
            return page

    def count(self, digests: Sequence[bytes]) -> int:
        """Returns how many of `digests`, from the first on, are there without a gap."""
        return next((index for index, digest in enumerate(digests) if digest not in self._pages), len(digests))

    def hold(self, digests: Iterable[bytes]) -> None:
        """Keeps the pages of these hashes, also those that are still to come, until `let_go` of as many."""
        with self._lock:
            for digest in digests:
                self._holds[digest] = self._holds.get(digest, 0) + 1

    def let_go(self, digests: Iterable[bytes]) -> None:
        """Undoes a `hold` of these hashes."""
        with self._lock:
            for digest in digests:
                if self._holds[digest] == 1:
                    del self._holds[digest]
                else:
                    self._holds[digest] -= 1
            self._shrink()

    def clear(self) -> None:
        """Forgets all pages, those that are held too."""
        with self._lock:
            self._pages.clear()
            self._num_bytes = 0

    def _shrink(self) -> None:
        too_many = self._num_bytes - self.max_bytes
        leaving: list[bytes] = []
        for digest, page in self._pages.items():
            if too_many <= 0:
                break
            if digest not in self._holds:
                leaving.append(digest)
                too_many -= page.nbytes
        for digest in leaving:
            self._num_bytes -= self._pages.pop(digest).nbytes

    def check_invariants(self) -> None:
        """Asserts that the bytes are counted right. For tests."""
        assert self._num_bytes == sum(page.nbytes for page in self._pages.values())
        assert all(count > 0 for count in self._holds.values())
        over = self._num_bytes > self.max_bytes
        assert not over or all(digest in self._holds for digest in self._pages), "pages stay that nobody holds"
