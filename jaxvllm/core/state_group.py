"""The pages of layer states: each holds a whole state, as it is after the last token of the page's column."""

from collections.abc import Sequence

import numpy as np

from jaxvllm.core.kv_events import SpecKind
from jaxvllm.core.page_groups import WindowedGroup
from jaxvllm.core.page_pool import TRASH_PAGE, PagePool, Pages, pages_for
from jaxvllm.core.step_plan import Ints, PageCopy, PageEntries

# Pages of a request: the last snapshot, what its next token reads, and what a chunk leaves in the column before its
# last token and after its last token.
MOST_STATES = 4


class StateGroup(WindowedGroup):
    """A windowed group whose pages are needed only in some columns.

    A token reads the page in the column of the token before it, and writes that of its own. Once its column is full, a
    page is a snapshot, which the prefix cache finds by the same hash as the keys and values of that column. A chunk of
    a prompt has pages in its last two columns: for the state after its last token, and for the snapshot before it, from
    which the same prompt can go on, because its last token is always computed. The trash page takes the others.

    A request holds the snapshot of its last full column, too, until the next one is full: the prefix cache learns of
    it when the request ends. A window of one page and one token says just that.
    """

    kind: SpecKind = "mamba"

    def __init__(self, pool: PagePool, num_slots: int, max_pages: int):
        super().__init__(pool, num_slots, max_pages, pool.page_size + 1, max_chunk=1)
        self.bound = MOST_STATES
        # Columns of each slot without a page, between its first one and its last.
        self._num_left_out = np.zeros(num_slots, np.int32)

    @property
    def words(self) -> str:
        return " of layers that keep a state"

    def pages(self, slot: int) -> Pages:
        pages = super().pages(slot)
        owned: Pages = pages[pages != TRASH_PAGE]
        return owned

    def owned_columns(self, slot: int, first: int, last: int) -> Ints:
        columns = super().owned_columns(slot, first, last)
        owned: Ints = columns[self.table[slot, columns] != TRASH_PAGE]
        return owned

    def cover(self, slot: int, num_tokens: int) -> PageEntries:
        owned, end = int(self.end[slot]), pages_for(num_tokens, self.pool.page_size)
        columns = np.arange(max(owned, end - 2), end, dtype=np.int32)
        if not len(columns):
            return PageEntries.none()
        pages = self.pool.allocate(len(columns))
        self.table[slot, columns] = pages
        self._num_left_out[slot] += columns[0] - owned
        self.end[slot] = end
        return PageEntries(np.full(len(columns), slot, np.int32), columns, pages)

    def can_fork(self, sources: Sequence[int], num_tokens: int) -> bool:
        return int(self._charges().sum()) + self._num_reserved + len(sources) <= self.usable

    def fork(self, source: int, slot: int, num_tokens: int) -> PageCopy | None:
        full = num_tokens // self.pool.page_size
        if not num_tokens % self.pool.page_size:
            self._share(slot, [int(self.table[source, full - 1])], full)
            return None
        [page] = self.pool.allocate(1).tolist()
        self.table[slot, full] = page
        self.first[slot], self.end[slot] = full, full + 1
        return PageCopy(full, int(self.table[source, full]), page)

    def _drop(self, slot: int, first: int) -> None:
        self._num_left_out[slot] -= np.count_nonzero(self.table[slot, self.first[slot] : first] == TRASH_PAGE)
        super()._drop(slot, first)

    def release(self, slot: int) -> None:
        super().release(slot)
        self._num_left_out[slot] = 0

    def check_invariants(self, slots: Sequence[int]) -> None:
        super().check_invariants(slots)
        counted = self._owned(self.end).tolist()
        assert counted == np.count_nonzero(self.table, axis=1).tolist(), "pages are counted wrongly"

    def _owned(self, end: Ints) -> Ints:
        return super()._owned(end) - self._num_left_out
