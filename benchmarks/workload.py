"""Requests that arrive at once, with random token ids, for benchmarks of engines."""

from dataclasses import dataclass
from typing import Self

import numpy as np

VOCAB_SIZE = 4096


@dataclass(frozen=True)
class Workload:
    """Requests that arrive at once, each with a number of tokens in and out."""

    name: str
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]

    @classmethod
    def uniform(cls, requests: int, prompt_tokens: int, output_tokens: int) -> Self:
        plural = "s" if requests > 1 else ""
        name = f"{requests} request{plural}, {prompt_tokens} in, {output_tokens} out"
        return cls(name, (prompt_tokens,) * requests, (output_tokens,) * requests)

    @classmethod
    def prompt(cls, prompt_tokens: int) -> Self:
        """Returns one request that ends with its first token."""
        return cls(f"a prompt of {prompt_tokens}", (prompt_tokens,), (1,))

    @classmethod
    def mixed(cls, requests: int, prompt_tokens: tuple[int, int], output_tokens: tuple[int, int]) -> Self:
        """Returns requests whose lengths are uniform from the first of a pair to the second, the same in every run."""
        rng = np.random.default_rng(requests)
        lengths = [
            tuple(rng.integers(low, high + 1, requests).tolist()) for low, high in (prompt_tokens, output_tokens)
        ]
        first, last = ("-".join(map(str, pair)) for pair in (prompt_tokens, output_tokens))
        return cls(f"{requests} requests, {first} in, {last} out", *lengths)

    @property
    def requests(self) -> int:
        return len(self.prompt_tokens)

    @property
    def longest(self) -> int:
        """The tokens of the longest request, with its output."""
        return max(map(sum, zip(self.prompt_tokens, self.output_tokens, strict=True)))

    @property
    def is_uniform(self) -> bool:
        return len(set(self.prompt_tokens)) == len(set(self.output_tokens)) == 1

    @property
    def is_prompt(self) -> bool:
        """Whether the time to a first token is all that there is to measure."""
        return set(self.output_tokens) == {1}

    def prompts(self, round_: int) -> list[list[int]]:
        """Returns the token ids of a round. The workload is part of the seed, so that no two share a prompt."""
        rng = np.random.default_rng([self.requests, sum(self.prompt_tokens), round_])
        return [rng.integers(3, VOCAB_SIZE, count).tolist() for count in self.prompt_tokens]
