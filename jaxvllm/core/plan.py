"""What crosses between host and device, as host values: one plan down, one output up."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.request import FinishReason, Request

type Ints = NDArray[np.int32]

NOT_SCORED = -1


@dataclass(frozen=True)
class Admission:
    """A request that got a slot in this step: the device must learn its pages and sampling parameters first."""

    slot: int
    request: Request
    pages: Ints


@dataclass(frozen=True)
class StepPlan:
    """One step. Rows are decode rows first (one token each, read from device state), then prefill chunks.

    Row r computes `lengths[r]` tokens of slot `slots[r]` from position `starts[r]` on, and yields a new token
    when `samples[r]`. `new_pages[r]` is the page that position `starts[r]` opens (decode rows only), else 0.
    `token_ids` are the prefill rows' inputs, row after row. `next_tokens[r]` is the token behind a chunk of a prompt
    that is scored (any one behind the last chunk), else NOT_SCORED. `epochs` tell a slot's tenants apart when the
    output comes back.
    """

    slots: Ints  # i32[R]
    epochs: Ints  # i32[R]
    starts: Ints  # i32[R]
    lengths: Ints  # i32[R]
    new_pages: Ints  # i32[R]
    samples: NDArray[np.bool_]  # bool[R]
    num_decode: int
    token_ids: Ints  # i32[T - num_decode]
    next_tokens: Ints  # i32[R]
    wants_logprobs: bool  # whether any row does
    admissions: tuple[Admission, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return self.num_decode + len(self.token_ids)

    @cached_property
    def scores_prompts(self) -> bool:
        """Whether log-probabilities of prompt tokens are to be computed."""
        return bool((self.next_tokens != NOT_SCORED).any())


@dataclass(frozen=True)
class TopLogprobs:
    """Log-probabilities of N raw distributions: each one's token, sampled or given, and the best ones."""

    token: NDArray[np.float32]  # f32[N]
    ranks: Ints  # i32[N], 1 = the most probable
    top_ids: Ints  # i32[N, MAX_LOGPROBS], most probable first
    top: NDArray[np.float32]  # f32[N, MAX_LOGPROBS]


@dataclass(frozen=True)
class StepOutput:
    """What the device computed for a plan's rows, on the host; log-probabilities only when a row asked for them.

    `scores[t]` are those of the token behind token t of the plan, t being one of a chunk that is scored.
    """

    token_ids: Ints  # i32[R]
    logprobs: TopLogprobs | None = None  # of R rows
    scores: TopLogprobs | None = None  # of T tokens


@dataclass(frozen=True)
class Emitted:
    """A new token of a watched request; `row` finds its log-probabilities in the StepOutput."""

    request: Request
    row: int
    token_id: int


@dataclass(frozen=True)
class Finished:
    """A request that ended, its outputs in `request.output_token_ids`. `stop_reason`: the stop token, unless EOS."""

    request: Request
    reason: FinishReason
    stop_reason: int | None = None


@dataclass(frozen=True)
class Scored:
    """Tokens of a request's prompt, by position; `scores` of the StepOutput has theirs from `first` on."""

    request: Request
    tokens: range
    first: int


@dataclass(frozen=True)
class StepUpdate:
    """What an output meant. Requests that nobody watches appear when they start and when they end, not per token."""

    num_new_tokens: int
    started: tuple[Request, ...]  # got their first token
    emitted: tuple[Emitted, ...]
    finished: tuple[Finished, ...]
    scored: tuple[Scored, ...] = ()
