"""One list of realistic products of low rank: matrices of models, adapters and the rows that have them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class LowRankCase:
    """A matrix [out, in], and the group of each row, of `num_groups`. Rows of number `num_groups` are in none."""

    name: str
    size_in: int
    size_out: int
    rank: int
    num_parts: int  # of the rank
    num_groups: int
    groups: NDArray[np.int32]

    def __str__(self) -> str:
        return self.name


def _drawn(num_rows: int, num_groups: int) -> NDArray[np.int32]:
    return np.random.default_rng(num_rows).integers(0, num_groups + 1, num_rows, np.int32)


CASES = (
    LowRankCase("one-row", 84, 108, 16, 1, 2, np.array([1], np.int32)),  # 84 and 108 are no multiples of any vector
    LowRankCase("nobody", 84, 108, 16, 1, 2, np.full(5, 2, np.int32)),
    LowRankCase("narrow", 7, 5, 12, 4, 3, np.array([2, 0, 3, 2, 2, 0, 3], np.int32)),  # a part has an odd rank
    LowRankCase("decode", 384, 640, 48, 3, 4, _drawn(16, 4)),
    LowRankCase("prompts", 129, 260, 32, 2, 20, _drawn(150, 20)),  # more rows than an item has
)
