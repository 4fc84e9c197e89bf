"""`Arrival`: a request of a simulated load, with tokens that cost nothing until they are needed."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.request import TokenIds

# The tokens that no vocabulary draws: in most models the first few are special.
_FIRST_TOKEN = 3


@dataclass(frozen=True)
class Segment:
    """A piece of a prompt. Two segments begin with the same tokens if they have the same name, and else with others."""

    name: int
    num_tokens: int


@dataclass(frozen=True)
class Arrival:
    """A request and the second at which it arrives. `answer` names the tokens that it generates."""

    at: float
    prompt: tuple[Segment, ...]
    answer: Segment

    @property
    def num_prompt_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.prompt)

    @property
    def num_tokens(self) -> int:
        """The most tokens that it has, prompt and answer."""
        return self.num_prompt_tokens + self.answer.num_tokens

    def symbols(self) -> TokenIds:
        """Returns i32[num_prompt_tokens], each token being the name of its segment.

        Prompts share the pages of a prefix cache exactly where their segments are the same, and to make a prompt takes
        some microseconds, which a million requests need.
        """
        names = np.array([segment.name for segment in self.prompt], np.int32)
        return np.repeat(names, [segment.num_tokens for segment in self.prompt])

    def tokens(self, vocab_size: int) -> TokenIds:
        """Returns i32[num_prompt_tokens], tokens for a real engine, which share what `symbols` share."""
        return np.concatenate([_drawn(segment, vocab_size) for segment in self.prompt])


def _drawn(segment: Segment, vocab_size: int) -> NDArray[np.int32]:
    rng = np.random.default_rng(segment.name)
    return rng.integers(_FIRST_TOKEN, vocab_size, segment.num_tokens, np.int32)
