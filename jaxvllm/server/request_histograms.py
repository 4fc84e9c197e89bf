"""How long requests take and how large they are, told from their outputs alone."""

import time
from collections import Counter
from dataclasses import dataclass

from jaxvllm.core.sampling_params import RequestOutputKind, SamplingParams
from jaxvllm.engine.observer import LossReason
from jaxvllm.engine.outputs import RequestMetrics, RequestOutput
from jaxvllm.server.histogram import (
    COMPLETIONS,
    FIRST_TOKEN_SECONDS,
    REQUEST_SECONDS,
    REQUEST_TOKENS,
    TOKEN_SECONDS,
    Histogram,
)

TIMES = (
    ("time_to_first_token_seconds", "From a request's arrival to its first token.", FIRST_TOKEN_SECONDS),
    ("inter_token_latency_seconds", "From one output of a request to the next.", TOKEN_SECONDS),
    ("request_time_per_output_token_seconds", "Mean time of a request's tokens after the first.", TOKEN_SECONDS),
    ("e2e_request_latency_seconds", "From a request's arrival to its end.", REQUEST_SECONDS),
    ("request_queue_time_seconds", "From a request's arrival to the first step that worked on it.", REQUEST_SECONDS),
    ("request_prefill_time_seconds", "From a request's first step to its first token.", REQUEST_SECONDS),
    ("request_decode_time_seconds", "From a request's first token to its end.", REQUEST_SECONDS),
    ("request_inference_time_seconds", "From a request's first step to its end.", REQUEST_SECONDS),
)
TOKENS = (
    ("request_prompt_tokens", "Tokens of a request's prompt."),
    ("request_generation_tokens", "Tokens of a completion."),
    ("request_max_num_generation_tokens", "Tokens of a request's longest completion."),
    ("request_params_max_tokens", "The max_tokens of requests that gave one."),
)


@dataclass(slots=True)
class _Live:
    """A request between its first output and its last."""

    seen: float  # its latest output, in time.monotonic()
    num_tokens: list[int]  # of each completion so far
    num_ended: int = 0  # completions


class RequestHistograms:
    """Observes every output of every request, and remembers a request until its last output or its loss.

    Names and meanings are vLLM's; but a time is that of a request here, and of each of its `n` completions there.
    """

    def __init__(self) -> None:
        self.times = {name: Histogram(name, text, bounds) for name, text, bounds in TIMES}
        self.tokens = {name: Histogram(name, text, REQUEST_TOKENS) for name, text in TOKENS}
        self.params_n = Histogram("request_params_n", "The n of requests.", COMPLETIONS)
        self.num_ended = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})  # completions, by reason
        self._live: dict[str, _Live] = {}
        self._inter_token = self.times["inter_token_latency_seconds"]  # the one that every output needs

    @property
    def num_live(self) -> int:
        """Requests that have had an output and expect another."""
        return len(self._live)

    def on_output(self, output: RequestOutput, params: SamplingParams) -> None:
        """As `Observer.on_output`. 0.6 us in the middle of a stream, and 4 at the end of it."""
        now = time.monotonic()
        assert output.metrics is not None, "an output of an engine has its times"
        live = self._live.get(output.request_id)
        is_delta = params.output_kind is RequestOutputKind.DELTA
        if live is None:
            live = self._live[output.request_id] = _Live(now, [0] * params.n)
            self._took("time_to_first_token_seconds", output.metrics.arrival_time, output.metrics.first_token_time)
        else:
            # Several tokens may come at once: each gets its share of the time.
            count = max((len(completion.token_ids) for completion in output.outputs), default=0) if is_delta else 1
            if count:
                self._inter_token.observe((now - live.seen) / count, count)
            live.seen = now
        for completion in output.outputs:
            num_earlier = live.num_tokens[completion.index] if is_delta else 0
            live.num_tokens[completion.index] = num_earlier + len(completion.token_ids)
            # A delta tells each end once; the other kinds repeat it until the whole request has ended.
            if completion.finish_reason is not None and (is_delta or output.finished):
                self.num_ended[completion.finish_reason] += 1
                live.num_ended += 1
                self.tokens["request_generation_tokens"].observe(live.num_tokens[completion.index])
        if output.finished:
            del self._live[output.request_id]
            self._finish(output, output.metrics, params, max(live.num_tokens))

    def on_loss(self, request_id: str, params: SamplingParams, reason: LossReason) -> None:
        """As `Observer.on_loss`."""
        live = self._live.pop(request_id, None)
        self.num_ended[reason] += params.n - (live.num_ended if live else 0)

    def _finish(self, output: RequestOutput, times: RequestMetrics, params: SamplingParams, longest: int) -> None:
        self._took("e2e_request_latency_seconds", times.arrival_time, times.finished_time)
        self._took("request_queue_time_seconds", times.arrival_time, times.first_scheduled_time)
        self._took("request_prefill_time_seconds", times.first_scheduled_time, times.first_token_time)
        self._took("request_decode_time_seconds", times.first_token_time, times.finished_time)
        self._took("request_inference_time_seconds", times.first_scheduled_time, times.finished_time)
        self.tokens["request_prompt_tokens"].observe(len(output.prompt_token_ids))
        self.tokens["request_max_num_generation_tokens"].observe(longest)
        self.params_n.observe(params.n)
        if params.max_tokens is not None:
            self.tokens["request_params_max_tokens"].observe(params.max_tokens)
        if longest > 1 and times.first_token_time is not None and times.finished_time is not None:
            mean = (times.finished_time - times.first_token_time) / (longest - 1)
            self.times["request_time_per_output_token_seconds"].observe(mean)
            if params.output_kind is RequestOutputKind.FINAL_ONLY:  # nobody saw its tokens come: count what they took
                self._inter_token.observe(mean, longest - 1)

    def _took(self, name: str, start: float | None, end: float | None) -> None:
        if start is not None and end is not None:  # it came to that
            self.times[name].observe(end - start)
