"""A request as the scheduler sees it: prompt, sampling parameters, place in the queue."""

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.page_pool import extend_page_hashes
from jaxvllm.core.sampling_params import SamplingParams

type TokenIds = NDArray[np.int32]


class FinishReason(enum.StrEnum):
    """Why a completion ended; the values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, order=True)
class QueueKey:
    """Place in the queue: the smaller key runs first and is preempted last. Unique per request."""

    priority: int
    arrival: int


@dataclass(eq=False, slots=True)
class Request:
    """One sequence to complete. Immutable but for what preemption must remember.

    `seed` is the effective one: the caller's, or one drawn at admission, so that a preempted request draws
    the same tokens again. `limit` is the largest number of tokens, prompt included, that it may reach.
    """

    request_id: str
    prompt_token_ids: TokenIds
    sampling_params: SamplingParams
    seed: int
    stop_token_ids: tuple[int, ...]  # EOS included, unless ignored
    limit: int
    key: QueueKey
    salt: str | None = None
    output_token_ids: TokenIds = field(default_factory=lambda: np.empty(0, np.int32))
    page_hashes: list[bytes] = field(default_factory=list)
    num_cached_tokens: int | None = None  # None until first admitted
    num_preemptions: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def wants_scores(self) -> bool:
        """Whether the log-probabilities of the prompt's tokens are asked for: then all of them are computed."""
        return self.sampling_params.prompt_logprobs is not None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_ids(self) -> TokenIds:
        """Prompt and the outputs known so far, i32[num_tokens]."""
        if not len(self.output_token_ids):
            return self.prompt_token_ids
        return np.concatenate([self.prompt_token_ids, self.output_token_ids])

    def hashes(self, page_size: int) -> list[bytes]:
        """The hash chain of all full pages of `token_ids()`; each page is hashed once in a request's life."""
        return extend_page_hashes(self.page_hashes, self.token_ids(), page_size, self.salt)
