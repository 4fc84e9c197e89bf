"""The metrics that Prometheus reads at /metrics: vLLM's metrics under vLLM's names, and some of our own."""

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.engine.stats import EngineStats, StepReport
from jaxvllm.server.metrics.histograms import STEP_SECONDS, STEP_TOKENS, Histogram, RequestHistograms
from jaxvllm.worker import wire
from jaxvllm.worker.observer import LossReason, Observer

# The counters that the engine keeps: the name in `EngineStats`, the metric's name and its description.
ENGINE_COUNTERS = (
    ("num_prompt_tokens", "prompt_tokens", "Tokens of the prompts that were accepted."),
    ("num_output_tokens", "generation_tokens", "Tokens that were generated."),
    ("num_prefix_queries", "prefix_cache_queries", "Tokens of prompts that were looked for in the prefix cache."),
    ("num_prefix_hits", "prefix_cache_hits", "Tokens of prompts that were found in the prefix cache."),
    (
        "num_external_queries",
        "external_prefix_cache_queries",
        "Tokens of prompts that the prefix cache lacked and the KV connector was asked for.",
    ),
    ("num_external_hits", "external_prefix_cache_hits", "Tokens of prompts that came from the KV connector."),
    ("num_failed_loads", "kv_failed_loads", "Requests for which the KV connector brought less than it had promised."),
    ("num_saved_pages", "kv_saved_pages", "Pages that the KV connector was given and could keep."),
    ("num_preemptions", "num_preemptions", "Times that a running request lost its pages to another."),
    ("num_programs", "num_compiles", "Programs that were compiled, or read from the compilation cache."),
    ("num_steps", "num_steps", "Steps of the model."),
    ("num_bucket_tokens", "bucket_tokens", "Tokens computed, padding included."),
    ("num_padding_tokens", "padding_tokens", "Padding computed, in tokens."),
    ("num_ended_tokens", "ended_row_tokens", "Tokens computed for rows that had ended."),
    ("num_verifications", "spec_decode_num_drafts", "Times that draft tokens were verified for a row."),
    ("num_draft_tokens", "spec_decode_num_draft_tokens", "Draft tokens that were verified."),
    ("num_accepted_tokens", "spec_decode_num_accepted_tokens", "Draft tokens that were accepted."),
    ("num_expert_placements", "expert_placements", "Times that the experts of a layer were moved by their loads."),
    (
        "mean_expert_load",
        "expert_load_mean",
        "Tokens that chose an expert of a device, on average, in the windows after which experts were placed.",
    ),
    ("most_expert_load", "expert_load_most", "The same of the busiest device of each layer."),
)
# Names that vLLM has given up, and that its production-stack still reads.
OLD_NAMES = {
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "prefix_cache_queries": "gpu_prefix_cache_queries",
    "prefix_cache_hits": "gpu_prefix_cache_hits",
}
COUNTERS = tuple(name for name, _, _ in ENGINE_COUNTERS)


class Metrics(Observer, Collector):
    """Counts events of the engines, as their `Observer`, and of the HTTP server, and renders them for Prometheus.

    Each engine has its own label. There are no locks, because all calls come from one event loop.
    """

    def __init__(self, prefix: str, model_name: str):
        """Gives every metric a name of the form `prefix:name`, and the label `model_name`."""
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", prefix):
            raise ValueError(f"metrics_prefix must have letters, digits and underscores alone, not {prefix!r}")
        self._families = MetricFamilies(prefix, {"model_name": model_name})
        self._engines: dict[int, EngineMetrics] = {}
        self._num_streams = 0
        self._answers: Counter[tuple[str, ...]] = Counter()
        self._others: dict[int, wire.CountHttp] = {}  # of API processes, by their starts
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def of_engine(self, index: int) -> "EngineMetrics":
        """Implements `Observer.of_engine`. The engine is shown from now on until its end.

        One that comes back under its number goes on with its counts.
        """
        if index not in self._engines:
            families = replace(self._families, labels={**self._families.labels, "engine": str(index)})
            self._engines[index] = EngineMetrics(families)
        self._engines[index].is_shown = True
        return self._engines[index]

    def render(self) -> tuple[bytes, str]:
        """Returns the body of an answer to Prometheus, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    # ---- events of the HTTP server ----

    def on_http(self, path: str, status: int) -> None:
        """Counts an answer. `path` is a route's template, never a client's path, because each one is kept forever."""
        self._answers[path, str(status)] += 1

    @contextmanager
    def http_stream(self) -> Iterator[None]:
        """Counts a streaming answer while it is open."""
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    # ---- other processes that answer HTTP ----

    def http_counts(self) -> wire.CountHttp:
        """Returns what this process has answered, for another's `count_http`."""
        answers = [(path, status, count) for (path, status), count in self._answers.items()]
        return wire.CountHttp(answers, self._num_streams)

    def count_http(self, source: int, counts: wire.CountHttp) -> None:
        """Takes in all that an API process has answered since its start number `source`."""
        self._others[source] = counts

    def http_ended(self, source: int) -> None:
        """Takes note that an API process has ended. Its answers still count."""
        if source in self._others:
            self._others[source] = wire.CountHttp(self._others[source].answers, num_streams=0)

    # ---- the metrics for Prometheus ----

    def collect(self) -> Iterator[Metric]:
        """Yields every metric with its present values, for prometheus_client."""
        families: dict[str, Metric] = {}
        for engine in self._engines.values():
            for family in engine.collect() if engine.is_shown else ():
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        yield from families.values()
        answers, num_streams = self._answers.copy(), self._num_streams
        for counts in self._others.values():
            num_streams += counts.num_streams
            for path, status, count in counts.answers:
                answers[path, status] += count
        yield self._families.counters("http_requests", "HTTP answers.", ("path", "status"), answers)
        yield self._families.gauge("num_http_streams", "Streaming answers that are open.", num_streams)


class EngineMetrics(Observer):
    """Counts events of one engine, whose replicas in one process count as one."""

    def __init__(self, families: "MetricFamilies"):
        self.is_shown = True
        self._engine = families
        self._requests = RequestHistograms()
        self._totals = EngineTotals()
        self._stats: EngineStats | None = None  # of the engine's present process
        self._stats_at = 0.0  # when it came, in seconds since 1970
        self._facts: wire.EngineFacts | None = None
        self._steps = (
            Histogram("iteration_tokens_total", "Tokens of a step.", STEP_TOKENS),
            Histogram("step_host_seconds", "Time that the host needs for a step.", STEP_SECONDS),
            Histogram("step_device_seconds", "Time that the device needs for a step.", STEP_SECONDS),
        )
        self._num_starts = 0  # of the present engine with this number
        self._num_starts_before = 0

    def on_start(self, num_starts: int, facts: wire.EngineFacts) -> None:
        """Implements `Observer.on_start`. From then on, histograms of tokens are shown, up to the context's length."""
        self._facts = facts
        if num_starts <= self._num_starts:  # it is another engine with the number of one that is closed
            self._num_starts_before += self._num_starts
        self._num_starts = num_starts
        self._totals.restart()
        self._stats = None  # nothing runs or waits in a new engine

    def on_end(self) -> None:
        """Implements `Observer.on_end`. Engines that are gone have no metrics."""
        self._stats = None
        self.is_shown = False

    def on_pulse(self, pulse: wire.Pulse) -> None:
        """Implements `Observer.on_pulse`."""
        self._stats, self._stats_at = pulse.stats, time.time()
        self._totals.update(pulse.stats)
        for step in pulse.steps:
            self._add_step(step)

    def on_output(self, output: RequestOutput, params: SamplingParams) -> None:
        """Implements `Observer.on_output`."""
        self._requests.on_output(output, params)

    def on_loss(self, request_id: str, params: SamplingParams, reason: LossReason) -> None:
        """Implements `Observer.on_loss`."""
        self._requests.on_loss(request_id, params, reason)

    def _add_step(self, step: StepReport) -> None:
        num_tokens, count = step.num_decode + step.num_prefill, step.num_steps
        values = num_tokens, step.host_seconds / count, step.device_seconds / count
        for histogram, value in zip(self._steps, values, strict=True):
            histogram.observe(value, times=count)

    def collect(self) -> Iterator[Metric]:
        """Yields every metric of the engine with its present values."""
        yield from self._collect_engine()
        yield from self._collect_requests()
        yield from self._collect_steps()

    def _collect_engine(self) -> Iterator[Metric]:
        engine, stats = self._engine, self._stats
        usage = 0.0 if stats is None else stats.num_pages_owned / stats.num_pages
        yield engine.gauge("num_requests_running", "Requests in the batch.", stats.num_running if stats else 0)
        yield engine.gauge("num_requests_waiting", "Requests in the queue.", stats.num_waiting if stats else 0)
        for name in _all_names("kv_cache_usage_perc"):
            yield engine.gauge(name, "Share of the pages that requests own, from 0 to 1.", usage)
        for field, first_name, text in ENGINE_COUNTERS:
            for name in _all_names(first_name):
                yield engine.counter(name, text, self._totals[field])
        name, text = "spec_decode_num_accepted_tokens_per_pos", "Draft tokens that were accepted, by their position."
        by_position: dict[tuple[str, ...], float] = {
            (str(position),): count for position, count in enumerate(self._totals.accepted_per_pos)
        }
        yield engine.counters(name, text, ("position",), by_position)
        if stats is not None and stats.max_loras:
            adapters = {
                "max_lora": str(stats.max_loras),
                "running_lora_adapters": ",".join(stats.running_adapters),
                "waiting_lora_adapters": ",".join(stats.waiting_adapters),
            }
            info = replace(engine, labels={**engine.labels, **adapters})
            text = "The time of this state, in seconds since 1970: the adapters of running and of waiting requests."
            yield info.gauge("lora_requests_info", text, self._stats_at)
        starts = self._num_starts_before + self._num_starts
        yield engine.counter("engine_starts", "Times that the engine's process was started.", starts)
        if self._facts is not None:
            sizes = {"block_size": str(self._facts.page_size), "num_gpu_blocks": str(self._facts.num_pages)}
            pool = replace(engine, labels={**engine.labels, **sizes})
            yield pool.gauge("cache_config_info", "Always 1: the sizes of the page pool are labels.", 1)

    def _collect_requests(self) -> Iterator[Metric]:
        requests = self._requests
        ended: dict[tuple[str, ...], float] = {(reason,): count for reason, count in requests.num_ended.items()}
        yield self._engine.counters("request_success", "Completions that ended.", ("finished_reason",), ended)
        for histogram in (*requests.times.values(), requests.params_n):
            yield self._engine.histogram(histogram)
        if self._facts is not None:
            for histogram in requests.tokens.values():
                yield self._engine.histogram(histogram, limit=self._facts.max_model_len)

    def _collect_steps(self) -> Iterator[Metric]:
        for histogram in self._steps:
            yield self._engine.histogram(histogram)


def _all_names(name: str) -> tuple[str, ...]:
    """Returns the name of a metric, and the one that it had before, if it had another."""
    return (name, OLD_NAMES[name]) if name in OLD_NAMES else (name,)


class EngineTotals:
    """Adds up the counters of `EngineStats` over all processes of the engine. Each process begins at zero.

    Some counters also begin at zero within a process: the engine makes new schedulers after a step that broke off.
    """

    def __init__(self) -> None:
        # By the counter's name in `EngineStats`, and accepted drafts by their position.
        self._before: Counter[str | int] = Counter()  # counted before the last start from zero
        self._now: Counter[str | int] = Counter()

    def restart(self) -> None:
        """Takes note that the engine has a new process."""
        for key in [*self._now]:
            self._begin(key)

    def update(self, stats: EngineStats) -> None:
        """Takes over the counts of the present process."""
        counts: dict[str | int, int] = {name: getattr(stats, name) for name in COUNTERS}
        counts |= enumerate(stats.num_accepted_per_pos)
        for key, count in counts.items():
            if count < self._now[key]:
                self._begin(key)
            self._now[key] = count

    def __getitem__(self, name: str) -> int:
        """Returns the total of the counter `name` of `EngineStats`."""
        return self._before[name] + self._now[name]

    @property
    def accepted_per_pos(self) -> list[int]:
        """The total of accepted drafts for each position."""
        positions = sorted(key for key in self._now if isinstance(key, int))
        return [self._before[position] + self._now[position] for position in positions]

    def _begin(self, key: str | int) -> None:
        self._before[key] += self._now[key]
        self._now[key] = 0


@dataclass(frozen=True)
class MetricFamilies:
    """Makes metric families that are named `prefix:name`, with `labels` on every sample."""

    prefix: str
    labels: Mapping[str, str]

    def gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{self.prefix}:{name}", text, labels=[*self.labels])
        family.add_metric([*self.labels.values()], value)
        return family

    def counter(self, name: str, text: str, value: float) -> Metric:
        """Makes a family of one counter. Its sample is called `name_total`."""
        return self.counters(name, text, (), {(): value})

    def counters(
        self, name: str, text: str, more_labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
    ) -> Metric:
        """Makes one family of counters. The keys of `values` are the values of `more_labels`."""
        family = CounterMetricFamily(f"{self.prefix}:{name}", text, labels=[*self.labels, *more_labels])
        for more, value in values.items():
            family.add_metric([*self.labels.values(), *more], value)
        return family

    def histogram(self, histogram: Histogram, limit: float = float("inf")) -> Metric:
        """Makes a family of one histogram, without the buckets above `limit`."""
        family = HistogramMetricFamily(
            f"{self.prefix}:{histogram.name}", histogram.documentation, labels=[*self.labels]
        )
        family.add_metric([*self.labels.values()], histogram.buckets(limit), histogram.sum)
        return family
