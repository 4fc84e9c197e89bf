"""Snapshots of the page pool, for notebooks, demonstrations and debugging.

Where the layers are in several groups, the snapshot shows the pool of the group that sees most.
"""

import enum
import string
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from jaxvllm.core.page_pool import TRASH_PAGE
from jaxvllm.core.scheduler import Scheduler


class PageState(enum.StrEnum):
    """The state of a page. `core/page_pool.py` explains the states."""

    TRASH = "trash"
    OWNED = "owned"
    CACHED = "cached"
    FREE = "free"


# The picture has `WIDTH` pages in a line, a character each for its state. A page with one owner shows that request's
# letter.
WIDTH = 64
_LEGEND = {
    PageState.OWNED: ("*", "shared by several requests"),
    PageState.CACHED: ("+", "cached: no request owns it now, and a prompt that begins the same reuses it"),
    PageState.FREE: (".", "free"),
    PageState.TRASH: ("#", "trash: padding is written there"),
}
_LETTERS = string.ascii_letters


@dataclass(frozen=True)
class PageView:
    """One page of a running request. It holds the keys and values of `token_ids` so far."""

    page: int  # its number in the pool
    first_position: int
    token_ids: tuple[int, ...]  # at most page_size
    num_owners: int  # running requests that read it
    findable: bool  # the prefix cache knows it: a later prompt that begins the same need not compute it


@dataclass(frozen=True)
class PoolView:
    """All pages of a pool, and the pages of each running request in order.

    `str()` draws them with one character a page, and leaves out lines at the end that have only free pages.
    """

    page_size: int  # tokens
    states: tuple[PageState, ...]  # one for each page
    requests: Mapping[str, tuple[PageView, ...]]  # by request id, in the order of the queue

    @classmethod
    def take(cls, scheduler: Scheduler) -> "PoolView":
        """Copies the present state of the pool, so that nothing changes it later. Costs O(pages)."""
        slots, cache = scheduler.slots, scheduler.cache
        group, size = cache.groups[0], cache.page_size
        pool = group.pool
        requests: dict[str, tuple[PageView, ...]] = {}
        for slot, request in scheduler.running():
            # The device may be a step ahead: a position counts once it is computed and its token is known here.
            count = int(min(slots.num_computed[slot], slots.num_known[slot]))
            token_ids = slots.token_ids[slot, :count].tolist()
            requests[request.request_id] = tuple(
                PageView(
                    page=page,
                    first_position=column * size,
                    token_ids=tuple(token_ids[column * size : (column + 1) * size]),
                    num_owners=int(pool.ref_counts[page]),
                    findable=pool.is_findable(page),
                )
                for column, page in enumerate(group.pages(slot).tolist(), int(group.first[slot]))
            )
        states = []
        for page, owners in enumerate(pool.ref_counts.tolist()):
            if page == TRASH_PAGE:
                states.append(PageState.TRASH)
            elif owners:
                states.append(PageState.OWNED)
            else:
                states.append(PageState.CACHED if pool.is_findable(page) else PageState.FREE)
        return cls(size, tuple(states), requests)

    def __str__(self) -> str:
        marks = [_LEGEND[state][0] for state in self.states]
        legend = []
        for index, (request_id, views) in enumerate(self.requests.items()):
            letter = _LETTERS[index % len(_LETTERS)]
            num_tokens = sum(len(view.token_ids) for view in views)
            legend.append(f"{letter} request {request_id}: {num_tokens} tokens in {len(views)} pages")
            for view in views:
                if view.num_owners == 1:
                    marks[view.page] = letter
        counts = Counter(marks)
        legend += [f"{mark} {words} ({counts[mark]})" for mark, words in _LEGEND.values() if counts[mark]]
        lines = ["".join(marks[start : start + WIDTH]) for start in range(0, len(marks), WIDTH)]
        while set(lines[-1]) == {_LEGEND[PageState.FREE][0]}:  # the loop ends at page 0, which is never free
            lines.pop()
        return "\n".join([*lines, *legend])
