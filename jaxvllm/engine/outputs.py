"""The values that a caller gets back. Their names are vLLM's."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, overload

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.explanation import Explanation
from jaxvllm.core.weight_version import WeightVersionSpan

type FinishReasonName = Literal["stop", "length", "abort", "repetition", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's natural log-probability under the raw distribution, before temperature and filters."""

    logprob: float
    rank: int | None = None  # 1 = the most probable
    decoded_token: str | None = None


@dataclass(frozen=True)
class FlatLogprobs(Sequence[dict[int, Logprob]]):
    """The log-probabilities of many tokens as a few lists of numbers, which the garbage collector need not walk.

    It reads like the list of dictionaries that callers get otherwise. The entries of token i are those from
    `start_indices[i]` to `end_indices[i]`. It has none where the list would have None, and reads as an empty
    dictionary there.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    @classmethod
    def of(cls, positions: Iterable[dict[int, Logprob] | None]) -> Self:
        """Returns the same log-probabilities as `positions`."""
        flat = cls()
        for ranked in positions:
            flat.start_indices.append(len(flat.token_ids))
            for token_id, logprob in (ranked or {}).items():
                flat.token_ids.append(token_id)
                flat.logprobs.append(logprob.logprob)
                flat.ranks.append(logprob.rank)
                flat.decoded_tokens.append(logprob.decoded_token)
            flat.end_indices.append(len(flat.token_ids))
        return flat

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...

    @overload
    def __getitem__(self, index: slice) -> "FlatLogprobs": ...

    def __getitem__(self, index: int | slice) -> "dict[int, Logprob] | FlatLogprobs":
        if isinstance(index, slice):
            return FlatLogprobs.of([self[i] for i in range(*index.indices(len(self)))])
        places = range(self.start_indices[index], self.end_indices[index])
        return {self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i]) for i in places}


@dataclass(frozen=True)
class CompletionOutput:
    """One of a request's `n` completions: all of it so far, or only the new part, depending on `output_kind`."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None  # None unless logprobs were asked for
    # One for each token id; each has the chosen token.
    logprobs: list[dict[int, Logprob]] | FlatLogprobs | None = None
    finish_reason: FinishReasonName | None = None
    # The stop token or string that ended it, or "repetition_detected"; None for EOS. Or the error that ended it.
    stop_reason: int | str | None = None
    # The text in parts, each with whether it was accepted drafts. None unless the request wants them, and gets deltas.
    draft_spans: list[tuple[str, bool]] | None = None
    explanation: Explanation | None = None  # what each step did for it. Only at its end, if the request wants it.
    wrong_param: str | None = None  # the parameter to blame where an error of the caller ended it
    # Which weights sampled which of its tokens. Only at its end, and for what no beam search has found.
    weight_versions: list[WeightVersionSpan] | None = None
    # [tokens - 1, layers with experts, k], at its end, with enable_return_routed_experts: the experts that each token
    # of prompt and output but the last has chosen.
    routed_experts: NDArray[np.unsignedinteger[Any]] | None = field(default=None, compare=False)

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

    def later_by(self, seconds: float) -> Self:
        """Returns the same times by a clock that shows so much more."""

        def later(at: float | None) -> float | None:
            return None if at is None else at + seconds

        return replace(
            self,
            arrival_time=self.arrival_time + seconds,
            first_scheduled_time=later(self.first_scheduled_time),
            first_token_time=later(self.first_token_time),
            finished_time=later(self.finished_time),
        )

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
    prompt_logprobs: list[dict[int, Logprob] | None] | FlatLogprobs | None = None
    pooled: NDArray[np.float32] | None = None  # f32[dimensions]: the vector of a request that wants one, at its end
    # What another engine needs to go on from this request's KV. Only in the last output, if the request wants it.
    kv_transfer_params: Mapping[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)  # what was asked for and could not be enforced


@dataclass(frozen=True)
class EmbeddingOutput:
    """The vector of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The dimensions of the vector."""
        return len(self.embedding)


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """The vector of one prompt of `LLM.embed`, with vLLM's fields."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int  # tokens whose KV was found in the prefix cache
    finished: bool = True


@dataclass(frozen=True)
class BeamSearchSequence:
    """One sequence that a beam search has found, with vLLM's fields."""

    tokens: list[int]  # the prompt, then the output, with the EOS that ended it
    logprobs: list[dict[int, Logprob]]  # of each output token: its own first, then all that were proposed in its place
    cum_logprob: float
    text: str | None  # of all `tokens`, special ones too; None: the engine has no tokenizer
    finish_reason: FinishReasonName | None
    stop_reason: int | str | None


@dataclass(frozen=True)
class BeamSearchOutput:
    """The sequences that the search for one prompt has found, best first."""

    sequences: list[BeamSearchSequence]
