"""What the page pool looks like at one moment: for notebooks, demonstrations and debugging."""

import enum
import string
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from jaxvllm.core.page_pool import TRASH_PAGE
from jaxvllm.core.scheduler import Scheduler


class PageState(enum.StrEnum):
    """Which of its places a page is in; `core/page_pool.py` says what they mean."""

    TRASH = "trash"
    OWNED = "owned"
    CACHED = "cached"
    FREE = "free"


# The picture: pages in a line, and a character for each state. A page with one owner shows its request's letter.
WIDTH = 64
_LEGEND = {
    PageState.OWNED: ("*", "shared by several requests"),
    PageState.CACHED: ("+", "cached: nobody's now, and a prompt that begins the same takes it back"),
    PageState.FREE: (".", "free"),
    PageState.TRASH: ("#", "trash: padding is written there"),
}
_LETTERS = string.ascii_letters


@dataclass(frozen=True)
class PageView:
    """One page of a running request. `token_ids` are those whose keys and values it holds so far."""

    page: int  # its number in the pool
    first_position: int
    token_ids: tuple[int, ...]  # at most page_size
    num_owners: int  # running requests that read it
    findable: bool  # the prefix cache knows it: a later prompt that begins the same starts behind it


@dataclass(frozen=True)
class PoolView:
    """All pages, and those of each running request in order.

    `str()` draws them, one character a page, up to the line of the last that is not free.
    """

    page_size: int  # tokens
    states: tuple[PageState, ...]  # one a page
    requests: Mapping[str, tuple[PageView, ...]]  # by request id, first in the queue first

    @classmethod
    def take(cls, scheduler: Scheduler) -> "PoolView":
        """A copy of how things are: nothing changes it later. Costs O(pages)."""
        slots, pool = scheduler.slots, scheduler.pool
        size = pool.page_size
        requests: dict[str, tuple[PageView, ...]] = {}
        for slot, request in scheduler.running():
            # The device may be a step ahead: a position counts once it is computed and its token is known here.
            count = int(min(slots.num_computed[slot], slots.num_known[slot]))
            token_ids = slots.token_ids[slot, :count].tolist()
            requests[request.request_id] = tuple(
                PageView(
                    page=page,
                    first_position=first,
                    token_ids=tuple(token_ids[first : first + size]),
                    num_owners=int(pool.ref_counts[page]),
                    findable=pool.is_findable(page),
                )
                for first, page in zip(range(0, slots.max_pages * size, size), slots.pages(slot).tolist(), strict=False)
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
        while set(lines[-1]) == {_LEGEND[PageState.FREE][0]}:  # ends at page 0, which is never free
            lines.pop()
        return "\n".join([*lines, *legend])
