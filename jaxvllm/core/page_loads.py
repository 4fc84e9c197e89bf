"""Page loads: requests whose next pages come from elsewhere, such as host memory or another engine.

Such a request has no slot yet. Its pages are kept for it while their content is on its way. What has come is in the
prefix cache then, and the request is admitted after it as after any cached prefix. What has not come is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxvllm.core.kv_cache import CachedPrefix, KVCache, ReservedPages
from jaxvllm.core.request import Request
from jaxvllm.core.step_plan import Ints


class PageSource(Protocol):
    """A place from which pages may be loaded."""

    def num_pages(self, request: Request, hashes: Sequence[bytes]) -> int:
        """Returns how many pages, of the `hashes` from the first on, can probably be loaded. It must not block.

        There are no hashes where a request needs nothing. Then what others hold for it can be free.
        """


@dataclass(frozen=True, eq=False)
class PageLoad:
    """Pages that are to be filled for `request`: column i of them with what the page holds that `hashes[i]` names."""

    request: Request
    hashes: tuple[bytes, ...]
    reserved: ReservedPages

    @property
    def pages(self) -> tuple[Ints, ...]:
        """The reserved pages of each group: the trash page where no token of the request will see it."""
        return self.reserved.pages


@dataclass(frozen=True, eq=False)
class PageSave:
    """Full pages of a request, which may be kept elsewhere: `pages[g][i]` of group g is the one of `hashes[i]`.

    It is the trash page where it had left the group's window.
    """

    request: Request
    hashes: tuple[bytes, ...]
    pages: tuple[Ints, ...]


class PageLoads:
    """The loads under way."""

    def __init__(self, cache: KVCache, source: PageSource | None):
        self._cache = cache
        self._source = source
        self._open: dict[str, PageLoad] = {}
        self._new: list[PageLoad] = []
        self.num_asked = 0  # pages that the source was asked for
        self.num_loaded = 0

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    @property
    def has_source(self) -> bool:
        return self._source is not None

    def begin(self, request: Request, prefix: CachedPrefix, hashes: Sequence[bytes]) -> PageLoad | None:
        """Begins to load what follows the cached `prefix` of a request with these page hashes, where that is possible.

        The source is asked once for each time that the request waits: what it did not have is computed.
        """
        if self._source is None or request.asked_for_pages == request.num_preemptions:
            return None
        is_first, request.asked_for_pages = request.asked_for_pages is None, request.num_preemptions
        missing = tuple(hashes[prefix.num_pages :])
        if not missing and not is_first:
            return None
        self.num_asked += len(missing)
        count = min(self._source.num_pages(request, missing), len(missing))
        if not count:
            return None
        reserved = self._cache.reserve(prefix, count)
        if reserved is None:
            return None
        load = PageLoad(request, missing[:count], reserved)
        self._open[request.request_id] = load
        self._new.append(load)
        return load

    def take_new(self) -> list[PageLoad]:
        """Returns the loads that began since the last call."""
        new, self._new = self._new, []
        return new

    def is_open(self, load: PageLoad) -> bool:
        """Returns whether somebody still waits for `load`."""
        return self._open.get(load.request.request_id) is load

    def end(self, load: PageLoad, num_loaded: int) -> None:
        """Lets the prefix cache know the first `num_loaded` pages of an open load, and keeps none of its pages on."""
        self.num_loaded += num_loaded
        self._cache.register_filled(load.request, load.reserved, num_loaded)
        self.drop(load.request.request_id)

    def forget(self, request: Request) -> None:
        """Tells the source that a request has ended which waited, so that what others hold for it can be free."""
        if self._source is not None:
            self._source.num_pages(request, ())

    def drop(self, request_id: str) -> PageLoad:
        """Ends the load of a request and returns it. The pages that it was to fill are free."""
        load = self._open.pop(request_id)
        self._new = [other for other in self._new if other is not load]
        self._cache.give_back(load.reserved)
        return load
