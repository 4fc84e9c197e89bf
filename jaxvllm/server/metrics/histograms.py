"""Histograms of the times and sizes of requests, with the bounds that vLLM's dashboards expect."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.utils import floatToGoString

from jaxvllm.core.sampling_params import RequestOutputKind, SamplingParams
from jaxvllm.engine.outputs import RequestMetrics, RequestOutput
from jaxvllm.worker.observer import LossReason


def _one_two_five(first: int, last: int) -> tuple[float, ...]:
    return tuple(float(f"{factor}e{power}") for power in range(first, last) for factor in (1, 2, 5))


# These bounds are from vllm/v1/metrics/buckets.py. They are seconds unless the name says otherwise.
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COMPLETIONS = (1, 2, 5, 10, 20)
# vLLM's series ends at the model's length. `Histogram.buckets` shows this one up to that length.
REQUEST_TOKENS = _one_two_five(0, 8)
# These bounds are ours: planning a step takes 0.1 ms at best, and a step that waits for a compiler takes seconds.
STEP_SECONDS = _one_two_five(-4, 1)


class Histogram:
    """Counts the values up to each bound, and adds up all values.

    Unlike prometheus_client's histogram it has no locks, since the whole server is one event loop. A value takes 0.2 us
    instead of 1, and a request that ends brings twelve.
    """

    def __init__(self, name: str, documentation: str, bounds: Iterable[float]):
        self.name = name
        self.documentation = documentation
        self.sum = 0.0
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Counts `value` so many `times`."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def buckets(self, limit: float = float("inf")) -> list[tuple[str, float]]:
        """Returns (bound as Prometheus writes it, number of values up to it) for bounds up to `limit` and infinity."""
        upper = [*(bound for bound in self._bounds if bound <= limit), float("inf")]
        counts = [*accumulate(self._counts)]
        return list(zip(map(floatToGoString, upper), [*counts[: len(upper) - 1], counts[-1]], strict=True))


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

    seen: float  # time of its latest output, in time.monotonic() seconds
    num_tokens: list[int]  # of each completion so far
    num_ended: int = 0  # completions that have ended


class RequestHistograms:
    """Observes every output of every request, and remembers a request until its last output or its loss.

    Names and meanings are vLLM's, but times here are of whole requests, and vLLM's are of each of the `n` completions.
    """

    def __init__(self) -> None:
        self.times = {name: Histogram(name, text, bounds) for name, text, bounds in TIMES}
        self.tokens = {name: Histogram(name, text, REQUEST_TOKENS) for name, text in TOKENS}
        self.params_n = Histogram("request_params_n", "The n of requests.", COMPLETIONS)
        reasons = ("stop", "length", "repetition", "abort", "error")
        self.num_ended = Counter(dict.fromkeys(reasons, 0))  # completions
        self._live: dict[str, _Live] = {}  # requests that have had an output and expect another
        self._inter_token = self.times["inter_token_latency_seconds"]  # a shortcut, because every output needs it

    def on_output(self, output: RequestOutput, params: SamplingParams) -> None:
        """Implements `Observer.on_output`. It takes 0.6 us in the middle of a stream, and 4 us at its end."""
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
            # A delta contains each end once. The other kinds repeat it until the whole request has ended.
            if completion.finish_reason is not None and (is_delta or output.finished):
                self.num_ended[completion.finish_reason] += 1
                live.num_ended += 1
                self.tokens["request_generation_tokens"].observe(live.num_tokens[completion.index])
        if output.finished:
            del self._live[output.request_id]
            self._finish(output, output.metrics, params, max(live.num_tokens))

    def on_loss(self, request_id: str, params: SamplingParams, reason: LossReason) -> None:
        """Implements `Observer.on_loss`."""
        live = self._live.pop(request_id, None)
        if reason != "moved":  # the other engine counts it
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
            if params.output_kind is RequestOutputKind.FINAL_ONLY:  # its tokens came all at once: count their mean time
                self._inter_token.observe(mean, longest - 1)

    def _took(self, name: str, start: float | None, end: float | None) -> None:
        if start is not None and end is not None:  # both events happened
            self.times[name].observe(end - start)
