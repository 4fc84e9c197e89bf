"""The values that a caller gets back. Their names are vLLM's."""

from dataclasses import dataclass
from typing import Literal

type FinishReasonName = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's natural log-probability under the raw distribution, before temperature and filters."""

    logprob: float
    rank: int | None = None  # 1 = the most probable
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One of a request's `n` completions: all of it so far, or only the new part, depending on `output_kind`."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None  # None unless logprobs were asked for
    logprobs: list[dict[int, Logprob]] | None = None  # one for each token id; each has the chosen token
    finish_reason: FinishReasonName | None = None
    stop_reason: int | str | None = None  # the stop token or string that ended it, None for EOS; or the error

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestMetrics:
    """The times of a request's events, in `time.monotonic()` seconds. None: it has not happened yet."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    @property
    def queued_seconds(self) -> float | None:
        """The time from arrival to the first step that worked on the request."""
        return _elapsed(self.arrival_time, self.first_scheduled_time)

    @property
    def first_token_seconds(self) -> float | None:
        """The time from arrival to the first token, which is how long the reader of a stream sees nothing."""
        return _elapsed(self.arrival_time, self.first_token_time)

    @property
    def total_seconds(self) -> float | None:
        """The time from arrival to the end."""
        return _elapsed(self.arrival_time, self.finished_time)


def _elapsed(start: float, end: float | None) -> float | None:
    return None if end is None else end - start


@dataclass(frozen=True)
class RequestOutput:
    """The state of one request. It is `finished` when every completion is; no output follows that one."""

    request_id: str
    prompt: str | None  # None when the caller gave token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]  # by index
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0  # prompt tokens whose KV was found in the prefix cache
    # One for each prompt token, None for the first token. Present if the request wants them; of deltas, the first only.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
