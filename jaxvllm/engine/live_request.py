"""The state of a caller's request while its tokens come: its completions, and what was told of them so far."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.explanation import Trail
from jaxvllm.core.request import FinishReason, GenerationRequest
from jaxvllm.core.sampling_params import RequestOutputKind, SamplingParams
from jaxvllm.core.weight_version import WeightStarts, WeightVersionSpan, version_spans
from jaxvllm.engine.exported_request import CompletionProgress
from jaxvllm.engine.outputs import Logprob, RequestMetrics
from jaxvllm.text.completion_text import CompletionText, StopMatch
from jaxvllm.text.draft_spans import DraftSpans


def is_watched(request: GenerationRequest) -> bool:
    """Returns whether each token of the request must be processed as it comes. What beams yield counts at the end."""
    params = request.params
    if request.beam_search is not None:
        return False
    return (
        bool(params.stop)
        or params.wants_logprobs
        or params.best_of is not None
        or params.output_kind != RequestOutputKind.FINAL_ONLY
        or request.wants_explanation
    )


@dataclass(slots=True)
class LiveCompletion:
    """One of a request's `n` sequences."""

    index: int
    stream: CompletionText | None  # None: the engine has no tokenizer
    spans: DraftSpans | None  # of the text; None: nobody wants them
    token_ids: list[int] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)  # the last of `token_ids`, which are not in `stream` yet
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    num_taken: int = 0
    num_shown: int = 0  # tokens that some output has contained
    has_news: bool = False  # whether there is something that no delta has contained yet
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    wrong_param: str | None = None  # to blame for an error that ended it
    trail: Trail | None = None  # once it has ended, if it is to be explained
    weight_starts: WeightStarts = field(default_factory=list)  # the request's own, once it has had a token
    routed: list[tuple[int, NDArray[Any]]] = field(default_factory=list)  # experts of tokens from a position on

    @property
    def num_new(self) -> int:
        """The number of tokens that no output has contained yet."""
        return len(self.token_ids) - self.num_shown

    def routed_experts(self, num_prompt_tokens: int) -> NDArray[Any] | None:
        """Returns the experts of all tokens but the last, [N, layers, k], as they were computed last.

        There are none before the end.
        """
        if self.finish_reason is None or not self.routed:
            return None
        known = max(start + len(part) for start, part in self.routed)
        experts = np.zeros((known, *self.routed[0][1].shape[1:]), self.routed[0][1].dtype)
        for start, part in self.routed:
            experts[start : start + len(part)] = part
        return experts[: num_prompt_tokens + len(self.token_ids) - 1]

    def read(self) -> StopMatch | None:
        """Brings the text up to date with the tokens, and returns the stop string that ended it, if one did."""
        if self.stream is None or not self.unread:
            return None
        unread, self.unread = self.unread, []
        return self.stream.push(unread) if self.spans is None else self.spans.push(self.stream, unread)

    @property
    def weight_versions(self) -> list[WeightVersionSpan] | None:
        """The versions of the weights that sampled its tokens, once it has ended."""
        if self.finish_reason is None:
            return None
        if not self.weight_starts:
            return None if self.token_ids else []
        return version_spans(self.weight_starts, len(self.token_ids))

    def progress(self) -> CompletionProgress:
        """Returns what another processor needs to go on from here."""
        return CompletionProgress(
            self.token_ids,
            self.logprobs,
            self.cumulative_logprob,
            self.num_shown,
            self.has_news,
            None if self.finish_reason is None else self.finish_reason.value,
            self.stop_reason,
            self.weight_starts,
        )

    def restore(self, progress: CompletionProgress, params: SamplingParams) -> None:
        """Goes on from there: what was shown is not told again."""
        self.token_ids, self.logprobs = list(progress.token_ids), list(progress.logprobs)
        self.cumulative_logprob, self.has_news = progress.cumulative_logprob, progress.has_news
        self.num_taken = self.num_shown = progress.num_shown
        self.finish_reason = None if progress.finish_reason is None else FinishReason(progress.finish_reason)
        self.stop_reason, self.weight_starts = progress.stop_reason, progress.weight_starts
        if self.stream is None:
            return
        spelled = self.token_ids
        # A stop string ends the text itself, and any other stop is a token that may belong to no text.
        ends_by_token = self.finish_reason is FinishReason.STOP and not isinstance(self.stop_reason, str)
        if ends_by_token and not params.include_stop_str_in_output:
            spelled = spelled[:-1]
        self.stream.push(spelled[: self.num_shown])
        self.stream.take()
        self.stream.push(spelled[self.num_shown :])
        if self.finish_reason is not None:
            self.stream.finish()
            if not self.has_news:
                self.stream.take()


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A caller's request: one prompt, `n` completions."""

    request: GenerationRequest
    metrics: RequestMetrics
    completions: dict[str, LiveCompletion]  # by the id of the scheduler's request
    warnings: list[str]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # None for the first token
    pooled: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))  # f32[E], of its chunks so far
    num_cached_tokens: int = 0
    emitted_at: float | None = None
    chosen: list[LiveCompletion] | None = None  # of those that were generated, the ones to return; None: all
    failure: BaseException | None = None  # what broke its processing off

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def finished(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.completions.values())

    @property
    def shows_end_only(self) -> bool:
        """Whether the only output is the last one, because the best completions are not known before."""
        return self.params.output_kind is RequestOutputKind.FINAL_ONLY or self.is_ranked

    @property
    def is_ranked(self) -> bool:
        """Whether completions are compared by their probabilities."""
        return self.params.best_of is not None or self.request.beam_search is not None

    def choose_best(self) -> None:
        """Leaves the `n` best completions, best first. The earlier of two equal ones is better."""
        ranked = sorted(self.completions.values(), key=lambda completion: -completion.cumulative_logprob)
        self.chosen = ranked[: self.params.n]
        for index, completion in enumerate(self.chosen):
            completion.index = index

    @property
    def vector(self) -> NDArray[np.float32] | None:
        """The vector f32[dimensions] of a request that wants one and whose prompt is computed."""
        pooling = self.request.pooling
        ends = [completion.finish_reason for completion in self.completions.values()]
        if pooling is None or ends != [FinishReason.LENGTH]:
            return None
        return pooling.finish(self.pooled, len(self.request.prompt.token_ids))
