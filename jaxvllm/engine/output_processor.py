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
from jaxvllm.core.readout import DISTRIBUTIONS, POOLED, ROUTED, SCORES, WIDE_SCORES
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
        self._live_of: dict[str, LiveRequest] = {}  # by the id of the scheduler's request
        self._live: dict[str, LiveRequest] = {}
        self._num_streaming = 0  # requests that have had their first output and not yet their last
        self._started: list[str] = []  # requests that have had their first token since `take_started`

    @property
    def num_requests(self) -> int:
        return len(self._live)

    @property
    def request_ids(self) -> list[str]:
        """The ids of the live requests."""
        return list(self._live)

    def is_known(self, name: str) -> bool:
        """Returns whether a live request, or one of the scheduler's requests for it, has this id."""
        return name in self._live or name in self._live_of

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def request(self, request_id: str) -> GenerationRequest:
        """Returns a live request."""
        return self._live[request_id].request

    def children(self, request_id: str) -> list[str]:
        """Returns the ids of the scheduler's requests for `request_id` that have not ended."""
        live = self._live.get(request_id)
        return [] if live is None else [i for i, c in live.completions.items() if c.finish_reason is None]

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
        live = LiveRequest(request, RequestMetrics(arrival_time), completions, list(warnings))
        if params.prompt_logprobs is not None:
            live.prompt_logprobs = [None] * len(prompt_ids)
        self._live[request.request_id] = live
        for child_id in child_ids:
            self._live_of[child_id] = live

    def take_started(self) -> list[str]:
        """Returns the ids of the requests that have had their first token since the last call."""
        started, self._started = self._started, []
        return started

    def scheduled(self, plan: StepPlan) -> None:
        """Records the time at which requests are scheduled for the first time."""
        for admission in plan.admissions:
            live = self._live_of[admission.request.request_id]
            if live.metrics.first_scheduled_time is None:
                live.metrics = replace(live.metrics, first_scheduled_time=time.monotonic())
                live.num_cached_tokens = admission.request.num_cached_tokens or 0

    def process(self, update: StepUpdate, output: StepOutput) -> Processed:
        """Turns what a step yielded into outputs for callers."""
        now = time.monotonic()
        touched: dict[str, LiveRequest] = {}
        stopped: dict[str, Request] = {}
        num_dropped = 0
        for request in update.started:
            live = self._live_of[request.request_id]
            if live.metrics.first_token_time is None:
                live.metrics = replace(live.metrics, first_token_time=now)
                self._started.append(live.request.request_id)
        scored_live = [self._live_of[scored.request.request_id] for scored in update.scored]
        for live, scored in zip(scored_live, update.scored, strict=True):
            self._attempt(live, self._take_scores, live, scored, output)
        for pooled in update.pooled:
            live = self._live_of[pooled.request.request_id]
            self._attempt(live, self._take_pooled, live, pooled, output)
        if update.routed:
            experts = ROUTED.of(output.reports)
            assert experts is not None, "a row whose experts are told was planned without"
            for routed in update.routed:
                request_id = routed.request.request_id
                part = routed.start, experts[routed.rows].copy()
                self._live_of[request_id].completions[request_id].routed.append(part)
        ends = {end.request.request_id: end for end in update.finished}
        last_of = {emitted.request.request_id: emitted for emitted in update.emitted} if ends else {}
        for emitted in update.emitted:
            request_id = emitted.request.request_id
            if request_id in stopped:  # an earlier token of the same step completed a stop string
                num_dropped += 1
                continue
            live = touched[request_id] = self._live_of[request_id]
            end = ends.get(request_id) if emitted is last_of.get(request_id) else None
            match = self._attempt(live, self._take_token, live, emitted, end, output)
            if match is not None:
                self._stop_at(live.completions[request_id], match)
                live.completions[request_id].trail = emitted.request.trail
                stopped[request_id] = emitted.request
        for end in update.finished:
            request_id = end.request.request_id
            live = touched[request_id] = self._live_of[request_id]
            self._attempt(live, self._finish, live, live.completions[request_id], end)
        for request_id, request in (stopped | {name: end.request for name, end in ends.items()}).items():
            self._note_preemptions(touched[request_id], request)
        for child_id, live in touched.items():
            live.completions[child_id].has_news = True
        changed = dict.fromkeys([*touched.values(), *(live for live in scored_live if live.failure is not None)])
        outputs = [self._emit(live, now) for live in changed if self._is_due(live, now)]
        failed = [name for live in changed if live.failure is not None for name in live.completions]
        left = [request_id for request_id in dict.fromkeys([*stopped, *failed]) if request_id not in ends]
        return Processed(outputs, left, num_dropped)

    def abort(self, request_id: str, children: Sequence[Request]) -> RequestOutput:
        """Ends `request_id` with the tokens it has. `children` are those that the scheduler has just ended for it."""
        live = self._live[request_id]
        for child in children:
            live.completions[child.request_id].has_news = True
            end = Finished(child, FinishReason.ABORT)
            self._attempt(live, self._finish, live, live.completions[child.request_id], end)
            self._note_preemptions(live, child)
        for completion in live.completions.values():  # those that never reached the scheduler: `submit` broke off
            completion.finish_reason = completion.finish_reason or FinishReason.ABORT
        return self._emit(live, time.monotonic())

    def take_out(self, request_id: str) -> RequestProgress:
        """Forgets a request that goes on elsewhere, and returns what its callers know of it."""
        now, live = time.monotonic(), self._live[request_id]
        progress = RequestProgress(
            completions=tuple(completion.progress() for completion in live.completions.values()),
            metrics=live.metrics.later_by(-now),
            num_cached_tokens=live.num_cached_tokens,
            prompt_logprobs=live.prompt_logprobs,
            was_shown=live.emitted_at is not None,
        )
        self._num_streaming -= progress.was_shown
        self._forget(live)
        return progress

    def put_back(
        self, request: GenerationRequest, child_ids: Sequence[str], progress: RequestProgress, warnings: Sequence[str]
    ) -> None:
        """Adds a request that another processor has `taken out`, where it left off."""
        now = time.monotonic()
        self.add(request, child_ids, now, warnings)
        live = self._live[request.request_id]
        for completion, before in zip(live.completions.values(), progress.completions, strict=True):
            completion.restore(before, request.params)
        live.metrics = progress.metrics.later_by(now)
        live.num_cached_tokens = progress.num_cached_tokens
        live.prompt_logprobs = progress.prompt_logprobs
        live.emitted_at = now if progress.was_shown else None
        self._num_streaming += progress.was_shown

    @staticmethod
    def _attempt[**Arguments, Result](
        live: LiveRequest, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result | None:
        """Does work for one request, unless some has failed. What it raises is the failure of that request alone."""
        if live.failure is None:
            try:
                return work(*args, **kwargs)
            except BaseException as error:
                if not belongs_to_work(error):
                    raise
                logger.exception("the output of request %s could not be processed", live.request.request_id)
                live.failure = error
        return None

    def _take_token(
        self, live: LiveRequest, emitted: Emitted, end: Finished | None, output: StepOutput
    ) -> StopMatch | None:
        completion = live.completions[emitted.request.request_id]
        if live.request.is_prompt_only:
            return None
        completion.token_ids.append(emitted.token_id)
        completion.weight_starts = emitted.request.weight_starts
        if live.params.wants_logprobs or live.params.best_of is not None:
            self._take_logprobs(completion, live.params, emitted, output)
        ends_unseen = end is not None and end.hides_last and not live.params.include_stop_str_in_output
        if completion.stream is None or ends_unseen:
            return None
        completion.unread.append(emitted.token_id)
        if completion.spans is not None:
            completion.spans.expect(output.were_drafts is not None and bool(output.were_drafts.flat[emitted.at]))
        # Without stop strings the text is not needed before the output: detokenizing several tokens at once takes half
        # the time.
        return completion.read() if live.params.stop else None

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

    def _take_scores(self, live: LiveRequest, scored: Scored, output: StepOutput) -> None:
        """Stores scores of the prompt. A prompt interrupted by preemption is scored again, and stores them again."""
        scores = (WIDE_SCORES if live.params.wants_wide_scores else SCORES).of(output.reports)
        assert scores is not None, "a prompt that is scored was planned without"
        assert live.prompt_logprobs is not None
        count = live.params.num_prompt_logprobs(scores.top.shape[1])  # all of a vocabulary are as many as there are
        for row, position in enumerate(scored.tokens, scored.first):
            token_id = live.request.prompt.token_list[position]
            live.prompt_logprobs[position] = self._ranks.ranked(scores, row, token_id, count)

    def _take_pooled(self, live: LiveRequest, pooled: Pooled, output: StepOutput) -> None:
        """Stores the report of a chunk. A prompt interrupted by preemption is pooled again from its first chunk on."""
        vectors, pooling = POOLED.of(output.reports), live.request.pooling
        assert vectors is not None and pooling is not None, "a prompt that is pooled was planned without"
        is_sum = pooling.kind == "MEAN" and pooled.start > 0
        live.pooled = live.pooled + vectors[pooled.row] if is_sum else vectors[pooled.row]

    def _stop_at(self, completion: LiveCompletion, match: StopMatch) -> None:
        dropped = zip(completion.logprobs[match.num_tokens :], completion.token_ids[match.num_tokens :], strict=False)
        completion.cumulative_logprob -= sum(ranked[token_id].logprob for ranked, token_id in dropped)
        del completion.token_ids[match.num_tokens :]
        del completion.logprobs[match.num_tokens :]
        completion.finish_reason = FinishReason.STOP
        completion.stop_reason = match.stop_reason

    def _finish(self, live: LiveRequest, completion: LiveCompletion, end: Finished) -> None:
        if completion.finish_reason is not None:  # a stop string was complete with the last token
            return
        completion.trail = end.request.trail
        if live.request.is_prompt_only:  # the token that was sampled after the prompt is never reported
            completion.finish_reason = FinishReason.ABORT if end.reason is FinishReason.ABORT else FinishReason.LENGTH
            return
        if end.beams is not None:
            completion.finish_reason = end.reason
            live.chosen = [self._found(live, index, beam) for index, beam in enumerate(end.beams)]
            return
        if not is_watched(live.request):
            completion.token_ids = end.request.output_token_ids.tolist()
            completion.weight_starts = end.request.weight_starts
            shown = completion.token_ids
            if end.hides_last and not live.params.include_stop_str_in_output:
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

    def _found(self, live: LiveRequest, index: int, beam: Beam) -> LiveCompletion:
        """Returns a completion that a beam search has found. EOS is never in its text, and in its tokens on demand."""
        search, params, path = live.request.beam_search, live.params, beam.path()
        assert search is not None, "only a beam search finds beams"
        shown = path[:-1] if beam.is_complete else path
        stream = (
            CompletionText.open(self._tokenizer, params, live.request.prompt.last_tokens) if self._tokenizer else None
        )
        if stream is not None:
            stream.push([one.token_id for one in shown])
            stream.finish()
        if search.include_stop_str_in_output:
            shown = path
        return LiveCompletion(
            index,
            stream,
            _draft_spans(live.request),
            token_ids=[one.token_id for one in shown],
            logprobs=[self._ranks.proposed(one) for one in shown] if params.logprobs is not None else [],
            cumulative_logprob=beam.cumulative_logprob,
            has_news=True,
            finish_reason=FinishReason.STOP if beam.is_complete else FinishReason.LENGTH,
            stop_reason=beam.token_id if beam.is_complete else None,
        )

    def _note_preemptions(self, live: LiveRequest, ended: Request) -> None:
        if ended.num_preemptions:
            total = live.metrics.num_preemptions + ended.num_preemptions
            live.metrics = replace(live.metrics, num_preemptions=total)

    def _is_due(self, live: LiveRequest, now: float) -> bool:
        if live.failure is not None:
            return True
        if live.finished or live.shows_end_only:
            return live.finished
        if live.emitted_at is None:
            return True
        interval = live.params.stream_interval
        if interval is not None and not any(c.num_new >= interval for c in live.completions.values()):
            return False
        return now - live.emitted_at >= self._seconds_per_output * self._num_streaming

    def _emit(self, live: LiveRequest, now: float) -> RequestOutput:
        """Returns the output of `live`, which is its last one if it has failed."""
        is_first = live.emitted_at is None
        if live.finished or live.failure is not None:
            live.metrics = replace(live.metrics, finished_time=time.monotonic())
        result = self._attempt(live, self._output, live) or self._failed(live)
        self._num_streaming += is_first - result.finished
        live.emitted_at = now
        if result.finished:
            self._forget(live)
        return result

    def _failed(self, live: LiveRequest) -> RequestOutput:
        """Returns the last output of a request whose processing broke off. Its text may be what cannot be had."""
        told = f"the output of this request could not be processed ({type(live.failure).__name__})"
        return RequestOutput(
            request_id=live.request.request_id,
            prompt=live.request.prompt.text,
            prompt_token_ids=live.request.prompt.token_list,
            outputs=[
                CompletionOutput(index, "", [], finish_reason="error", stop_reason=told)
                for index in range(live.params.n)
            ],
            finished=True,
            metrics=live.metrics,
            num_cached_tokens=live.num_cached_tokens,
            warnings=live.warnings,
        )

    def _output(self, live: LiveRequest) -> RequestOutput:
        """Returns what is to be told. A delta has only completions with something new, so that each ends once."""
        delta = live.params.output_kind == RequestOutputKind.DELTA
        if live.finished and live.params.best_of is not None:
            live.choose_best()
        shown = live.completions.values() if live.chosen is None else live.chosen
        completions = [c for c in shown if not delta or c.has_news]
        for completion in completions:
            completion.has_news = False
            completion.num_shown = len(completion.token_ids)
        return RequestOutput(
            request_id=live.request.request_id,
            prompt=live.request.prompt.text,
            prompt_token_ids=live.request.prompt.token_list,
            outputs=[self._completion_output(live, c) for c in completions],
            finished=live.finished,
            metrics=live.metrics,
            num_cached_tokens=live.num_cached_tokens,
            prompt_logprobs=_shaped(live.params, live.prompt_logprobs)
            if live.emitted_at is None or not delta
            else None,
            pooled=live.vector,
            warnings=live.warnings,
        )

    def _forget(self, live: LiveRequest) -> None:
        del self._live[live.request.request_id]
        for child_id in live.completions:
            del self._live_of[child_id]

    def _completion_output(self, live: LiveRequest, completion: LiveCompletion) -> CompletionOutput:
        params, first = live.params, 0
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
            cumulative_logprob=completion.cumulative_logprob if wants or live.is_ranked else None,
            logprobs=_shaped(params, completion.logprobs[first:]) if wants else None,
            finish_reason=None if completion.finish_reason is None else completion.finish_reason.value,
            stop_reason=completion.stop_reason,
            wrong_param=completion.wrong_param,
            weight_versions=completion.weight_versions,
            routed_experts=completion.routed_experts(len(live.request.prompt.token_ids)),
            draft_spans=None if completion.spans is None else completion.spans.split(text),
            explanation=None if completion.trail is None else explain(live, completion, completion.trail, self._ranks),
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
