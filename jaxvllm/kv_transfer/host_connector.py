"""Pages of an engine that find no room in its pool any more wait in host memory."""

from collections.abc import Sequence
from concurrent.futures import Future

from jaxvllm.core.request import Request
from jaxvllm.kv_transfer.connector import TransferParams
from jaxvllm.kv_transfer.page_format import Page
from jaxvllm.kv_transfer.page_memory import PageMemory


class HostConnector:
    """Keeps every full page in host memory, until others were used later."""

    def __init__(self, memory: PageMemory):
        self._memory = memory

    def num_pages(self, request: Request, hashes: Sequence[bytes]) -> int:
        return self._memory.count(hashes)

    def load(self, request: Request, hashes: Sequence[bytes]) -> Future[Sequence[Page]]:
        future: Future[Sequence[Page]] = Future()
        pages = (self._memory.get(digest) for digest in hashes)
        found = []
        for page in pages:
            if page is None:  # it has just gone
                break
            found.append(page)
        future.set_result(found)
        return future

    def wants(self, request: Request, digest: bytes) -> bool:
        return digest not in self._memory

    def save(self, digest: bytes, page: Page) -> bool:
        self._memory.put(digest, page)
        return True

    def finished(self, request: Request, hashes: Sequence[bytes]) -> TransferParams | None:
        return None

    def reset(self) -> None:
        self._memory.clear()

    def close(self) -> None:
        """Does nothing: the memory goes with its last owner."""
