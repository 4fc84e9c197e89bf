"""Turns sampled tokens into the outputs that a caller sees: text, stop strings and log-probabilities.

Only watched requests (they stream, have stop strings or want log-probabilities) cost anything per token. The others
are detokenized once, when they end. What fails at one request ends that request, and no other.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jaxvllm.core.beam import Beam
from jaxvllm.core.errors import belongs_to_work
from jaxvllm.core.readout import DISTRIBUTIONS, POOLED, WIDE_SCORES
from jaxvllm.core.request import FinishReason, GenerationRequest, Request
from jaxvllm.core.sampling_params import RequestOutputKind, SamplingParams
from jaxvllm.core.step_plan import Emitted, Finished, Pooled, Scored, StepOutput, StepPlan, StepUpdate
from jaxvllm.engine.explaining import explain
from jaxvllm.engine.exported_request import RequestProgress
from jaxvllm.engine.live_request import LiveCompletion, LiveRequest, is_watched
from jaxvllm.engine.outputs import CompletionOutput, FlatLogprobs, Logprob, RequestMetrics, RequestOutput
from jaxvllm.engine.token_ranks import TokenRanks
from jaxvllm.text.completion_text import CompletionText, StopMatch
from jaxvllm.text.draft_spans import DraftSpans
from jaxvllm.text.stop_strings import StopStrings
from jaxvllm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Processed:
    """The meaning of an update to callers."""

    outputs: list[RequestOutput]  # those that are due now
    stopped: list[str]  # ids of requests that a stop string or a failure has ended, and that the scheduler still runs
    num_dropped: int  # tokens after a stop string, which belong to no output


class OutputProcessor:
    """Keeps every live request's text and turns step updates into `RequestOutput`s."""

    def __init__(self, tokenizer: Tokenizer | None, outputs_per_second: int | None = None):
        """Limits all streaming requests together to `outputs_per_second`, so that a token may wait for the next output.

        The first and the last output of a request never wait. The limit exists because the reader of outputs has a
        cost for each one, no matter how much it contains.
        """
        self._tokenizer = tokenizer
        self._ranks = TokenRanks(tokenizer)
        self._seconds_per_output = 0.0 if outputs_per_second is None else 1 / outputs_per_second
        self._group_of: dict[str, LiveRequest] = {}  # by the id of the scheduler's request
        self._groups: dict[str, LiveRequest] = {}
        self._num_streaming = 0  # groups that have had their first output and not yet their last
        self._started: list[str] = []  # requests that have had their first token since `take_started`

    @property
    def num_requests(self) -> int:
        return len(self._groups)

    def is_known(self, name: str) -> bool:
        """Returns whether a live request, or one of the scheduler's requests for it, has this id."""
        return name in self._groups or name in self._group_of

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._groups

    def request(self, request_id: str) -> GenerationRequest:
        """Returns a live request."""
        return self._groups[request_id].request

    def children(self, request_id: str) -> list[str]:
        """Returns the ids of the scheduler's requests for `request_id` that have not ended."""
        group = self._groups.get(request_id)
        return [] if group is None else [i for i, c in group.completions.items() if c.finish_reason is None]

    def add(
        self, request: GenerationRequest, child_ids: Sequence[str], arrival_time: float, warnings: Sequence[str] = ()
    ) -> None:
        """Adds a request whose completions the scheduler knows as `child_ids`. All its outputs have the `warnings`."""
        params, prompt_ids = request.params, request.prompt.last_tokens
        stops = StopStrings(params.stop) if params.stop else None
        completions = {
            child_id: LiveCompletion(
                index,
                CompletionText.open(self._tokenizer, params, prompt_ids, stops) if self._tokenizer else None,
                _draft_spans(request),
            )
            for index, child_id in enumerate(child_ids)
        }
        group = LiveRequest(request, RequestMetrics(arrival_time), completions, list(warnings))
        if params.prompt_logprobs is not None:
            group.prompt_logprobs = [None] * len(prompt_ids)
        self._groups[request.request_id] = group
        for child_id in child_ids:
            self._group_of[child_id] = group

    def take_started(self) -> list[str]:
        """Returns the ids of the requests that have had their first token since the last call."""
        started, self._started = self._started, []
        return started

    def scheduled(self, plan: StepPlan) -> None:
        """Records the time at which requests are scheduled for the first time."""
        for admission in plan.admissions:
            group = self._group_of[admission.request.request_id]
            if group.metrics.first_scheduled_time is None:
                group.metrics = replace(group.metrics, first_scheduled_time=time.monotonic())
                group.num_cached_tokens = admission.request.num_cached_tokens or 0

    def process(self, update: StepUpdate, output: StepOutput) -> Processed:
        """Turns what a step yielded into outputs for callers."""
        now = time.monotonic()
        touched: dict[str, LiveRequest] = {}
        stopped: dict[str, Request] = {}
        num_dropped = 0
        for request in update.started:
            group = self._group_of[request.request_id]
            if group.metrics.first_token_time is None:
                group.metrics = replace(group.metrics, first_token_time=now)
                self._started.append(group.request.request_id)
        scored_groups = [self._group_of[scored.request.request_id] for scored in update.scored]
        for group, scored in zip(scored_groups, update.scored, strict=True):
            self._attempt(group, self._take_scores, group, scored, output)
        for pooled in update.pooled:
            group = self._group_of[pooled.request.request_id]
            self._attempt(group, self._take_pooled, group, pooled, output)
        ends = {end.request.request_id: end for end in update.finished}
        last_of = {emitted.request.request_id: emitted for emitted in update.emitted} if ends else {}
        for emitted in update.emitted:
            request_id = emitted.request.request_id
            if request_id in stopped:  # an earlier token of the same step completed a stop string
                num_dropped += 1
                continue
            group = touched[request_id] = self._group_of[request_id]
            end = ends.get(request_id) if emitted is last_of.get(request_id) else None
            match = self._attempt(group, self._take_token, group, emitted, end, output)
            if match is not None:
                self._stop_at(group.completions[request_id], match)
                group.completions[request_id].trail = emitted.request.trail
                stopped[request_id] = emitted.request
        for end in update.finished:
            request_id = end.request.request_id
            group = touched[request_id] = self._group_of[request_id]
            self._attempt(group, self._finish, group, group.completions[request_id], end)
        for request_id, request in (stopped | {name: end.request for name, end in ends.items()}).items():
            self._note_preemptions(touched[request_id], request)
        for child_id, group in touched.items():
            group.completions[child_id].has_news = True
        groups = dict.fromkeys([*touched.values(), *(group for group in scored_groups if group.failure is not None)])
        outputs = [self._emit(group, now) for group in groups if self._is_due(group, now)]
        failed = [name for group in groups if group.failure is not None for name in group.completions]
        left = [request_id for request_id in dict.fromkeys([*stopped, *failed]) if request_id not in ends]
        return Processed(outputs, left, num_dropped)

    def abort(self, request_id: str, children: Sequence[Request]) -> RequestOutput:
        """Ends `request_id` with the tokens it has. `children` are those that the scheduler has just ended for it."""
        group = self._groups[request_id]
        for child in children:
            group.completions[child.request_id].has_news = True
            end = Finished(child, FinishReason.ABORT)
            self._attempt(group, self._finish, group, group.completions[child.request_id], end)
            self._note_preemptions(group, child)
        for completion in group.completions.values():  # those that never reached the scheduler: `submit` broke off
            completion.finish_reason = completion.finish_reason or FinishReason.ABORT
        return self._emit(group, time.monotonic())

    def take_out(self, request_id: str) -> RequestProgress:
        """Forgets a request that goes on elsewhere, and returns what its callers know of it."""
        now, group = time.monotonic(), self._groups[request_id]
        progress = RequestProgress(
            completions=tuple(completion.progress() for completion in group.completions.values()),
            metrics=group.metrics.later_by(-now),
            num_cached_tokens=group.num_cached_tokens,
            prompt_logprobs=group.prompt_logprobs,
            was_shown=group.emitted_at is not None,
        )
        self._num_streaming -= progress.was_shown
        self._forget(group)
        return progress

    def put_back(
        self, request: GenerationRequest, child_ids: Sequence[str], progress: RequestProgress, warnings: Sequence[str]
    ) -> None:
        """Adds a request that another processor has `taken out`, where it left off."""
        now = time.monotonic()
        self.add(request, child_ids, now, warnings)
        group = self._groups[request.request_id]
        for completion, before in zip(group.completions.values(), progress.completions, strict=True):
            completion.restore(before, request.params)
        group.metrics = progress.metrics.later_by(now)
        group.num_cached_tokens = progress.num_cached_tokens
        group.prompt_logprobs = progress.prompt_logprobs
        group.emitted_at = now if progress.was_shown else None
        self._num_streaming += progress.was_shown

    @staticmethod
    def _attempt[**Arguments, Result](
        group: LiveRequest, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result | None:
        """Does work for one request, unless some has failed. What it raises is the failure of that request alone."""
        if group.failure is None:
            try:
                return work(*args, **kwargs)
            except BaseException as error:
                if not belongs_to_work(error):
                    raise
                logger.exception("the output of request %s could not be processed", group.request.request_id)
                group.failure = error
        return None

    def _take_token(
        self, group: LiveRequest, emitted: Emitted, end: Finished | None, output: StepOutput
    ) -> StopMatch | None:
        completion = group.completions[emitted.request.request_id]
        if group.request.is_prompt_only:
            return None
        completion.token_ids.append(emitted.token_id)
        if group.params.wants_logprobs or group.params.best_of is not None:
            self._take_logprobs(completion, group.params, emitted, output)
        ends_unseen = end is not None and end.hides_last and not group.params.include_stop_str_in_output
        if completion.stream is None or ends_unseen:
            return None
        completion.unread.append(emitted.token_id)
        if completion.spans is not None:
            completion.spans.expect(output.were_drafts is not None and bool(output.were_drafts.flat[emitted.at]))
        # Without stop strings the text is not needed before the output: detokenizing several tokens at once takes half
        # the time.
        return completion.read() if group.params.stop else None

    def _take_logprobs(
        self, completion: LiveCompletion, params: SamplingParams, emitted: Emitted, output: StepOutput
    ) -> None:
        if params.wants_distributions:
            distributions = DISTRIBUTIONS.of(output.reports)
            assert distributions is not None, "a row that wants distributions was planned without"
            ranked = self._ranks.chosen(distributions[emitted.at], emitted.token_id, params)
        else:
            assert output.logprobs is not None, "a row that wants log-probabilities was planned without"
            ranked = self._ranks.ranked(output.logprobs, emitted.at, emitted.token_id, params.logprobs or 0)
        completion.logprobs.append(ranked)
        completion.cumulative_logprob += ranked[emitted.token_id].logprob

    def _take_scores(self, group: LiveRequest, scored: Scored, output: StepOutput) -> None:
        """Stores scores of the prompt. A prompt interrupted by preemption is scored again, and stores them again."""
        scores = WIDE_SCORES.of(output.reports) if group.params.wants_wide_scores else output.scores
        assert scores is not None, "a prompt that is scored was planned without"
        assert group.prompt_logprobs is not None
        count = group.params.num_prompt_logprobs(scores.top.shape[1])  # all of a vocabulary are as many as there are
        for row, position in enumerate(scored.tokens, scored.first):
            token_id = group.request.prompt.token_list[position]
            group.prompt_logprobs[position] = self._ranks.ranked(scores, row, token_id, count)

    def _take_pooled(self, group: LiveRequest, pooled: Pooled, output: StepOutput) -> None:
        """Stores the report of a chunk. A prompt interrupted by preemption is pooled again from its first chunk on."""
        vectors, pooling = POOLED.of(output.reports), group.request.pooling
        assert vectors is not None and pooling is not None, "a prompt that is pooled was planned without"
        is_sum = pooling.kind == "MEAN" and pooled.start > 0
        group.pooled = group.pooled + vectors[pooled.row] if is_sum else vectors[pooled.row]

    def _stop_at(self, completion: LiveCompletion, match: StopMatch) -> None:
        dropped = zip(completion.logprobs[match.num_tokens :], completion.token_ids[match.num_tokens :], strict=False)
        completion.cumulative_logprob -= sum(ranked[token_id].logprob for ranked, token_id in dropped)
        del completion.token_ids[match.num_tokens :]
        del completion.logprobs[match.num_tokens :]
        completion.finish_reason = FinishReason.STOP
        completion.stop_reason = match.stop_reason

    def _finish(self, group: LiveRequest, completion: LiveCompletion, end: Finished) -> None:
        if completion.finish_reason is not None:  # a stop string was complete with the last token
            return
        completion.trail = end.request.trail
        if group.request.is_prompt_only:  # the token that was sampled after the prompt is never reported
            completion.finish_reason = FinishReason.ABORT if end.reason is FinishReason.ABORT else FinishReason.LENGTH
            return
        if end.beams is not None:
            completion.finish_reason = end.reason
            group.chosen = [self._found(group, index, beam) for index, beam in enumerate(end.beams)]
            return
        if not is_watched(group.request):
            completion.token_ids = end.request.output_token_ids.tolist()
            shown = completion.token_ids
            if end.hides_last and not group.params.include_stop_str_in_output:
                shown = shown[:-1]
            if completion.stream is not None:
                completion.stream.push(shown)
        completion.read()
        match = completion.stream.finish() if completion.stream is not None else None
        if match is not None:  # bytes that were held back until their run ended completed a stop string
            self._stop_at(completion, match)
            return
        completion.finish_reason = end.reason
        completion.stop_reason = end.stop_reason
        completion.wrong_param = end.wrong_param

    def _found(self, group: LiveRequest, index: int, beam: Beam) -> LiveCompletion:
        """Returns a completion that a beam search has found. EOS is never in its text, and in its tokens on demand."""
        search, params, path = group.request.beam_search, group.params, beam.path()
        assert search is not None, "only a beam search finds beams"
        shown = path[:-1] if beam.is_complete else path
        stream = (
            CompletionText.open(self._tokenizer, params, group.request.prompt.last_tokens) if self._tokenizer else None
        )
        if stream is not None:
            stream.push([one.token_id for one in shown])
            stream.finish()
        if search.include_stop_str_in_output:
            shown = path
        return LiveCompletion(
            index,
            stream,
            _draft_spans(group.request),
            token_ids=[one.token_id for one in shown],
            logprobs=[self._ranks.proposed(one) for one in shown] if params.logprobs is not None else [],
            cumulative_logprob=beam.cumulative_logprob,
            has_news=True,
            finish_reason=FinishReason.STOP if beam.is_complete else FinishReason.LENGTH,
            stop_reason=beam.token_id if beam.is_complete else None,
        )

    def _note_preemptions(self, group: LiveRequest, ended: Request) -> None:
        if ended.num_preemptions:
            total = group.metrics.num_preemptions + ended.num_preemptions
            group.metrics = replace(group.metrics, num_preemptions=total)

    def _is_due(self, group: LiveRequest, now: float) -> bool:
        if group.failure is not None:
            return True
        if group.finished or group.shows_end_only:
            return group.finished
        if group.emitted_at is None:
            return True
        interval = group.params.stream_interval
        if interval is not None and not any(c.num_new >= interval for c in group.completions.values()):
            return False
        return now - group.emitted_at >= self._seconds_per_output * self._num_streaming

    def _emit(self, group: LiveRequest, now: float) -> RequestOutput:
        """Returns the output of `group`, which is its last one if it has failed."""
        is_first = group.emitted_at is None
        if group.finished or group.failure is not None:
            group.metrics = replace(group.metrics, finished_time=time.monotonic())
        result = self._attempt(group, self._output, group) or self._failed(group)
        self._num_streaming += is_first - result.finished
        group.emitted_at = now
        if result.finished:
            self._forget(group)
        return result

    def _failed(self, group: LiveRequest) -> RequestOutput:
        """Returns the last output of a request whose processing broke off. Its text may be what cannot be had."""
        told = f"the output of this request could not be processed ({type(group.failure).__name__})"
        return RequestOutput(
            request_id=group.request.request_id,
            prompt=group.request.prompt.text,
            prompt_token_ids=group.request.prompt.token_list,
            outputs=[
                CompletionOutput(index, "", [], finish_reason="error", stop_reason=told)
                for index in range(group.params.n)
            ],
            finished=True,
            metrics=group.metrics,
            num_cached_tokens=group.num_cached_tokens,
            warnings=group.warnings,
        )

    def _output(self, group: LiveRequest) -> RequestOutput:
        """Returns what is to be told. A delta has only completions with something new, so that each ends once."""
        delta = group.params.output_kind == RequestOutputKind.DELTA
        if group.finished and group.params.best_of is not None:
            group.choose_best()
        shown = group.completions.values() if group.chosen is None else group.chosen
        completions = [c for c in shown if not delta or c.has_news]
        for completion in completions:
            completion.has_news = False
            completion.num_shown = len(completion.token_ids)
        return RequestOutput(
            request_id=group.request.request_id,
            prompt=group.request.prompt.text,
            prompt_token_ids=group.request.prompt.token_list,
            outputs=[self._completion_output(group, c) for c in completions],
            finished=group.finished,
            metrics=group.metrics,
            num_cached_tokens=group.num_cached_tokens,
            prompt_logprobs=_shaped(group.params, group.prompt_logprobs)
            if group.emitted_at is None or not delta
            else None,
            pooled=group.vector,
            warnings=group.warnings,
        )

    def _forget(self, group: LiveRequest) -> None:
        del self._groups[group.request.request_id]
        for child_id in group.completions:
            del self._group_of[child_id]

    def _completion_output(self, group: LiveRequest, completion: LiveCompletion) -> CompletionOutput:
        params, first = group.params, 0
        completion.read()
        text = completion.stream.text if completion.stream else ""
        if params.output_kind == RequestOutputKind.DELTA:
            first, completion.num_taken = completion.num_taken, len(completion.token_ids)
            text = completion.stream.take() if completion.stream else ""
        wants = params.wants_logprobs
        return CompletionOutput(
            index=completion.index,
            text=text,
            token_ids=completion.token_ids[first:],
            cumulative_logprob=completion.cumulative_logprob if wants or group.is_ranked else None,
            logprobs=_shaped(params, completion.logprobs[first:]) if wants else None,
            finish_reason=None if completion.finish_reason is None else completion.finish_reason.value,
            stop_reason=completion.stop_reason,
            wrong_param=completion.wrong_param,
            draft_spans=None if completion.spans is None else completion.spans.split(text),
            explanation=None if completion.trail is None else explain(group, completion, completion.trail, self._ranks),
        )


def _draft_spans(request: GenerationRequest) -> DraftSpans | None:
    """Returns what one completion needs in order to tell which parts of its text were drafts, if the caller wants it.

    All text so far would be told again with each output, so only deltas tell.
    """
    is_delta = request.params.output_kind is RequestOutputKind.DELTA
    return DraftSpans() if is_delta and request.wants_draft_spans else None


def _shaped[Ranked: (dict[int, Logprob], dict[int, Logprob] | None)](
    params: SamplingParams, values: list[Ranked] | None
) -> list[Ranked] | FlatLogprobs | None:
    """Returns log-probabilities in the form that the caller wants."""
    return FlatLogprobs.of(values) if params.flat_logprobs and values is not None else values
