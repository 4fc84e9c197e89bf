"""`RungRun`: what one rung did with the requests, once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from jaxvllm.core.page_groups import FullGroup
from jaxvllm.core.scheduler import Scheduler


@dataclass(frozen=True)
class TimedAnswer:
    """The tokens of one request, and when each of them could be read. Times are seconds from the start of the run."""

    arrival: float
    token_ids: tuple[int, ...]
    times: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.token_ids or len(self.token_ids) != len(self.times):
            raise ValueError(f"each token has a time, got {len(self.token_ids)} tokens and {len(self.times)} times")

    @property
    def time_to_first_token(self) -> float:
        return self.times[0] - self.arrival

    @property
    def gaps(self) -> list[float]:
        """The seconds between each token and the one before it: 0 for tokens that came together."""
        return [later - before for before, later in pairwise(self.times)]


@dataclass(frozen=True)
class RungRun:
    """The record of one rung that has answered all requests once."""

    answers: tuple[TimedAnswer, ...]  # in the order of the workload
    num_calls: int  # of programs: steps that the host planned, in which the device may have taken several
    num_steps: int  # that the device took
    wasted: float | None  # share of the KV memory: see `KVUse`. None: nothing was kept from step to step
    most_running: int  # requests at once

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        return [answer.token_ids for answer in self.answers]

    @property
    def seconds(self) -> float:
        """The seconds from the first arrival to the last token."""
        return max(answer.times[-1] for answer in self.answers) - self.answers[0].arrival

    @property
    def tokens_per_second(self) -> float:
        return sum(len(answer.token_ids) for answer in self.answers) / self.seconds

    @property
    def times_to_first_token(self) -> list[float]:
        return [answer.time_to_first_token for answer in self.answers]

    @property
    def gaps(self) -> list[float]:
        """The seconds between two tokens of an answer, for all answers."""
        return [gap for answer in self.answers for gap in answer.gaps]


class KVUse:
    """Watches how much of the KV memory that requests have taken holds no token.

    A page has places for `page_size` tokens. Each look takes the pages that running requests own, pages that several
    share once, and the share of their places that no token fills, computed or to be computed by the steps under way.
    `wasted` is the mean over all looks, one after each step.
    """

    def __init__(self) -> None:
        self._shares: list[float] = []
        self.most_running = 0

    def look(self, scheduler: Scheduler) -> None:
        """Takes in what the running requests of `scheduler` own now."""
        self.most_running = max(self.most_running, scheduler.num_running)
        if scheduler.num_running:
            self._shares.append(unused_share(scheduler.cache.groups[0], scheduler.slots.num_computed))

    @property
    def shares(self) -> Sequence[float]:
        return self._shares

    @property
    def wasted(self) -> float:
        return mean_share(self._shares)


def mean_share(shares: Sequence[float]) -> float:
    """Returns the mean share, or 0 where nothing was ever owned."""
    return float(np.mean(shares)) if len(shares) else 0.0


def unused_share(group: FullGroup, num_computed: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> float:
    """Returns the share of the places in owned pages of `group` that no token fills, for `num_computed` i32[slots]."""
    size, columns = group.pool.page_size, np.arange(group.table.shape[1], dtype=np.int32)
    is_owned = (columns >= group.first[:, None]) & (columns < group.end[:, None])
    filled = np.clip(num_computed[:, None] - columns * size, 0, size)
    of_pages = np.zeros(group.pool.num_pages, np.int32)
    pages = group.table[is_owned]
    np.maximum.at(of_pages, pages, filled[is_owned])
    num_places = len(np.unique(pages)) * size
    return 1.0 - float(of_pages.sum()) / num_places if num_places else 0.0
