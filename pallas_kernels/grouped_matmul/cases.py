"""The realistic products of groups: experts of models, and rows that steps give them."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GroupedCase:
    """Rows [sum(counts), in] times matrices [groups, out, in], of which group g takes `counts[g]` rows."""

    name: str
    size_in: int
    size_out: int
    counts: tuple[int, ...]

    def __str__(self) -> str:
        return self.name

    @property
    def starts(self) -> np.ndarray:
        """The first row of each group, and the end of the last one, i32[groups + 1]."""
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int32)


def _chosen(num_tokens: int, num_groups: int, each: int, seed: int) -> tuple[int, ...]:
    """Returns how many of `num_tokens` tokens choose each group, if each token takes `each` of them at random."""
    rng = np.random.default_rng(seed)
    chosen = [rng.permutation(num_groups)[:each] for _ in range(num_tokens)]
    return tuple(np.bincount(np.concatenate(chosen), minlength=num_groups).tolist())


CASES = (
    GroupedCase("one-token", 64, 24, _chosen(1, 8, 2, 0)),
    GroupedCase("sixteen-tokens", 64, 24, _chosen(16, 32, 4, 1)),
    GroupedCase("a-chunk", 84, 36, _chosen(128, 8, 2, 2)),
    GroupedCase("one-group-has-all", 33, 12, (0, 0, 21, 0)),
    GroupedCase("none-in-the-middle", 7, 5, (3, 0, 0, 9, 1, 0)),
    GroupedCase("nothing", 16, 8, (0, 0, 0)),
    GroupedCase("wide", 24, 160, (0, 7, 0, 20, 9, 0)),
    # The sizes that a GPU's matrix units and copy engine take. Groups begin anywhere.
    GroupedCase("whole-tiles-few", 64, 256, (2, 0, 5, 1)),
    GroupedCase("whole-tiles-many", 128, 128, (3, 0, 150, 1, 70)),
    # Sums and columns, those of each half of a gated matrix too, end in the middle of a tile.
    GroupedCase("parts-of-tiles", 80, 176, (2, 0, 5, 1)),
    GroupedCase("halves-of-tiles", 96, 96, (0, 9, 3)),
)

# What models make of steps, for compilers: experts of `size_out` inner features in a model of size `size_in`.
SERVING = (
    GroupedCase("qwen3-30b-decode-1", 2048, 768, (1,) * 8 + (0,) * 120),
    GroupedCase("qwen3-30b-decode-64", 2048, 768, (4,) * 128),
    GroupedCase("qwen3-30b-prefill-4096", 2048, 768, (256,) * 128),
    GroupedCase("qwen3-30b-quarter-decode-64", 2048, 192, (4,) * 128),
    GroupedCase("qwen3-30b-eighth-decode-64", 2048, 96, (4,) * 128),
    GroupedCase("mixtral-decode-16", 4096, 14336, (4,) * 8),
    GroupedCase("gpt-oss-20b-half-decode-64", 2880, 1440, (8,) * 32),
    GroupedCase("gpt-oss-20b-quarter-prefill-1024", 2880, 720, (128,) * 32),
    # Of its eighths, experts of 88, the sums of the second product end in the middle of what a matrix unit adds up.
    GroupedCase("gemma-4-26b-quarter-decode-64", 2816, 176, (4,) * 128),
    GroupedCase("deepseek-v3-eighth-prefill-1024", 7168, 2048, (32,) * 32),
)
