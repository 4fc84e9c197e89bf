"""`KVConnector`: what an engine asks of whatever keeps or carries its pages."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from jaxvllm.core.page_loads import PageSource
from jaxvllm.core.request import Request
from jaxvllm.kv_transfer.page_format import Page

type TransferParams = Mapping[str, Any]


class KVConnector(PageSource, Protocol):
    """Keeps pages outside of an engine and brings them back. One serves all replicas of an engine.

    A page is named by the hash of all tokens up to its end, so whatever has the page of a hash may give it. An engine
    asks `num_pages` and `load` for requests that wait, and gives `save` each page that became full. Whatever fails is
    computed again: a future that fails, or has fewer pages than asked for, costs time and nothing else.

    `save` comes from a thread of the engine's that may wait, everything else from the engine's loop, which may not.
    """

    def load(self, request: Request, hashes: Sequence[bytes]) -> Future[Sequence[Page]]:
        """Begins to bring the pages of these hashes. The result has the first of them, up to one that is missing.

        The future ends by itself, whatever becomes of those who have the pages.
        """

    def wants(self, request: Request, digest: bytes) -> bool:
        """Returns whether the page of this hash, which `request` has, is to be saved, because it is not there yet."""

    def save(self, digest: bytes, page: Page) -> bool:
        """Keeps a page. Returns whether it could; why it could not is told in the log, and not for each page."""

    def finished(self, request: Request, hashes: Sequence[bytes]) -> TransferParams | None:
        """Tells that a request has ended, whose prompt's full pages have these hashes.

        Returns what its caller is to be told. These pages may still be on their way to `save`.
        """

    def reset(self) -> None:
        """Forgets all pages that were saved so far. No save is under way."""

    def close(self) -> None:
        """Ends threads and connections. No call follows."""


@dataclass(frozen=True)
class OneWay:
    """A connector of an engine that only `saves` pages, or only loads them."""

    both: KVConnector
    saves: bool

    def num_pages(self, request: Request, hashes: Sequence[bytes]) -> int:
        return 0 if self.saves else self.both.num_pages(request, hashes)

    def load(self, request: Request, hashes: Sequence[bytes]) -> Future[Sequence[Page]]:
        return self.both.load(request, hashes)

    def wants(self, request: Request, digest: bytes) -> bool:
        return self.saves and self.both.wants(request, digest)

    def save(self, digest: bytes, page: Page) -> bool:
        return self.both.save(digest, page)

    def finished(self, request: Request, hashes: Sequence[bytes]) -> TransferParams | None:
        return self.both.finished(request, hashes) if self.saves else None

    def reset(self) -> None:
        self.both.reset()

    def close(self) -> None:
        self.both.close()
