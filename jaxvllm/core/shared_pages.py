"""Pages that requests share: prefixes that are cached or computed now, and pages that come from elsewhere."""

from jaxvllm.core.kv_cache import CachedPrefix, KVCache
from jaxvllm.core.page_loads import PageLoad, PageLoads, PageSave, PageSource
from jaxvllm.core.request import Request
from jaxvllm.core.slots import SlotTable


class SharedPages:
    """The scheduler's part for pages that several requests, or other engines, may have in common."""

    def __init__(self, slots: SlotTable, cache: KVCache, source: PageSource | None):
        self._slots = slots
        self._cache = cache
        self.loads = PageLoads(cache, source)
        # Hashes of prompt pages that running requests are about to compute, or that are being loaded.
        self._computing: set[bytes] = set()
        self._saves: list[PageSave] = []

    def prefix(self, request: Request) -> CachedPrefix:
        """Returns the pages that begin `request` and are cached."""
        return self._cache.match(self._hashes(request))

    def _hashes(self, request: Request) -> list[bytes]:
        """Returns the hashes of pages that `request` may have from others.

        The last token is always computed, because its logits are needed.
        """
        if not self._cache.enable_prefix_caching or not request.reads_prefix_cache:
            return []
        page_size = self._cache.page_size
        return request.hashes(page_size)[: (request.num_tokens - 1) // page_size]

    def are_coming(self, request: Request, num_hits: int) -> bool:
        """Returns whether a running request is computing this one's next page now, so that waiting saves the work.

        It makes `n` samples of one prompt, and a burst of requests under one new system prompt, cost one prefill. Where
        layers keep a state, only a request with all of this one's pages leaves a snapshot from which it can go on.
        """
        if not self._cache.enable_prefix_caching or not request.reads_prefix_cache:
            return False
        num_usable = (request.num_tokens - 1) // self._cache.page_size
        if num_hits >= num_usable:
            return False
        return request.page_hashes[num_usable - 1 if self._cache.has_states else num_hits] in self._computing

    def begin_load(self, request: Request, prefix: CachedPrefix) -> bool:
        """Begins to load what follows the cached `prefix` of a request that could be admitted now, if that is possible.

        Others that need the same pages wait for them.
        """
        load = self.loads.begin(request, prefix, self._hashes(request))
        if load is None:
            return False
        self._computing.update(load.hashes)
        return True

    def end_load(self, load: PageLoad, num_loaded: int) -> bool:
        """Ends `load`, whose first `num_loaded` pages are filled. Returns whether its request still waits for it."""
        if not self.loads.is_open(load):
            return False
        self.loads.end(load, num_loaded)
        self._computing.difference_update(load.hashes)
        return True

    def drop_load(self, request_id: str) -> None:
        """Ends the load of a request that has ended."""
        self._computing.difference_update(self.loads.drop(request_id).hashes)

    def admitted(self, slot: int, num_pages: int) -> None:
        """Takes note of a new tenant of `slot`, whose first `num_pages` pages were cached."""
        self._offer(slot, 0, self._tenant(slot).page_hashes[:num_pages])
        self._computing.update(self._uncomputed(slot))

    def register_computed(self, slot: int) -> None:
        """Lets the prefix cache know the full pages of `slot` whose KV is computed and whose tokens are known."""
        slots = self._slots
        known = slots.num_prompt if slots.is_beam[slot] else slots.num_known  # not what beams try out
        count = int(min(slots.num_computed[slot], known[slot]))
        first = int(self._cache.num_registered[slot])
        hashes = self._cache.register(slot, count, self._tenant(slot))
        self._computing.difference_update(hashes)
        self._offer(slot, first, hashes)

    def keep_old(self, slot: int) -> None:
        """Lets nobody else have the pages of `slot`, because the weights are replaced that computed them."""
        self.leaving(slot)
        self._tenant(slot).has_old_pages = True

    def leaving(self, slot: int) -> None:
        """Takes note that the tenant of `slot` computes nothing any more."""
        self._computing.difference_update(self._uncomputed(slot))

    def _offer(self, slot: int, first: int, hashes: list[bytes]) -> None:
        """Lets pages of `slot` with these hashes be saved, from column `first` on."""
        if hashes and self.loads.has_source:
            pages = self._cache.pages(slot, first, len(hashes))
            self._saves.append(PageSave(self._tenant(slot), tuple(hashes), pages))

    def _uncomputed(self, slot: int) -> list[bytes]:
        tenant = self._tenant(slot)
        return [] if tenant.has_old_pages else tenant.page_hashes[int(self._cache.num_registered[slot]) :]

    @property
    def num_saves(self) -> int:
        """The number of pages that `take_saves` would return."""
        return len(self._saves)

    def forget_saves(self, count: int) -> None:
        """Forgets all saves after the first `count`."""
        del self._saves[count:]

    def take_saves(self) -> list[PageSave]:
        """Returns the pages that became full since the last call."""
        saves, self._saves = self._saves, []
        return saves

    def _tenant(self, slot: int) -> Request:
        return self._slots.tenant(slot)

    def check_idle(self) -> None:
        """Asserts that nothing is left of requests. For tests."""
        assert not self._computing, "an idle scheduler computes pages"
