"""`VersionedConnector`: a connector whose pages have names that differ where the weights do."""

from collections.abc import Sequence
from concurrent.futures import Future

from jaxvllm.core.request import Request
from jaxvllm.core.weight_version import WeightVersion
from jaxvllm.kv_transfer.connector import KVConnector, TransferParams
from jaxvllm.kv_transfer.page_format import Page


class VersionedConnector:
    """Names the pages of a connector by the version of the weights, too, so that those of others are never found.

    Pages of the weights of the start have the names that they would have without it.
    """

    def __init__(self, inner: KVConnector):
        self.inner = inner
        # It changes between two steps, when no page is on its way to `save`.
        self.version = WeightVersion()

    def _names(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        return [self.version.mark(digest) for digest in hashes]

    def num_pages(self, request: Request, hashes: Sequence[bytes]) -> int:
        return self.inner.num_pages(request, self._names(hashes))

    def load(self, request: Request, hashes: Sequence[bytes]) -> Future[Sequence[Page]]:
        return self.inner.load(request, self._names(hashes))

    def wants(self, request: Request, digest: bytes) -> bool:
        return self.inner.wants(request, self.version.mark(digest))

    def save(self, digest: bytes, page: Page) -> bool:
        return self.inner.save(self.version.mark(digest), page)

    def finished(self, request: Request, hashes: Sequence[bytes]) -> TransferParams | None:
        return self.inner.finished(request, self._names(hashes))

    def reset(self) -> None:
        self.inner.reset()

    def close(self) -> None:
        self.inner.close()
