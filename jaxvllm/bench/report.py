"""A run as vLLM reports it: the table that people know, and the keys that their scripts read."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jaxvllm.bench.load import Outcome
from jaxvllm.bench.metrics import LATENCIES, Metrics
from jaxvllm.bench.traffic import Traffic

WIDTH = 50


@dataclass(frozen=True)
class Run:
    """One run and what was asked for in it."""

    traffic: Traffic
    outcome: Outcome
    metrics: Metrics
    shown: Sequence[str]  # latencies of the table and of the JSON, by their names in it

    def table(self) -> str:
        """The table, 50 columns wide."""
        metrics, traffic = self.metrics, self.traffic
        lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
        lines += [_line("Successful requests:", metrics.completed), _line("Failed requests:", metrics.failed)]
        if traffic.max_concurrency is not None:
            lines.append(_line("Maximum request concurrency:", traffic.max_concurrency))
        if not math.isinf(traffic.request_rate):
            lines.append(_line("Request rate configured (RPS):", float(traffic.request_rate)))
        lines += [
            _line("Benchmark duration (s):", metrics.duration),
            _line("Total input tokens:", metrics.total_input),
            _line("Total generated tokens:", metrics.total_output),
            _line("Request throughput (req/s):", metrics.request_throughput),
        ]
        if metrics.request_goodput is not None:
            lines.append(_line("Request goodput (req/s):", metrics.request_goodput))
        lines += [
            _line("Output token throughput (tok/s):", metrics.output_throughput),
            _line("Peak output token throughput (tok/s):", metrics.peak_output_tokens),
            _line("Peak concurrent requests:", float(metrics.peak_concurrency)),
            _line("Total token throughput (tok/s):", metrics.total_token_throughput),
        ]
        for name in self.shown:
            short, headline = LATENCIES[name]
            latency = metrics.latencies[name]
            lines.append(f"{headline:-^{WIDTH}}")
            lines += [_line(f"Mean {short} (ms):", latency.mean), _line(f"Median {short} (ms):", latency.median)]
            lines += [_line(f"P{_number(p)} {short} (ms):", value) for p, value in latency.percentiles.items()]
        return "\n".join([*lines, "=" * WIDTH])

    def details(self) -> dict[str, Any]:
        """vLLM's lists with an entry a request."""
        records = self.outcome.records
        return {
            "input_lens": [record.num_prompt_tokens for record in records],
            "output_lens": [record.num_output_tokens for record in records],
            "ttfts": [record.ttft for record in records],
            "itls": [record.itl for record in records],
            "latencies": [record.latency for record in records],
            "start_times": [record.start for record in records],
            "queue_times": [record.queued for record in records],
            "generated_texts": [record.text for record in records],
            "errors": [record.error for record in records],
        }

    def figures(self) -> dict[str, Any]:
        """All others under vLLM's keys."""
        metrics = self.metrics
        result: dict[str, Any] = {
            "request_rate": "inf" if math.isinf(self.traffic.request_rate) else self.traffic.request_rate,
            "burstiness": self.traffic.burstiness,
            "max_concurrency": self.traffic.max_concurrency,
            "duration": metrics.duration,
            "completed": metrics.completed,
            "failed": metrics.failed,
            "total_input_tokens": metrics.total_input,
            "total_output_tokens": metrics.total_output,
            "request_throughput": metrics.request_throughput,
            "request_goodput": metrics.request_goodput,
            "output_throughput": metrics.output_throughput,
            "total_token_throughput": metrics.total_token_throughput,
            "max_output_tokens_per_s": metrics.peak_output_tokens,
            "max_concurrent_requests": metrics.peak_concurrency,
            "client_cpu_seconds": self.outcome.cpu_seconds,
        }
        for name in self.shown:
            latency = metrics.latencies[name]
            result |= {
                f"mean_{name}_ms": latency.mean,
                f"median_{name}_ms": latency.median,
                f"std_{name}_ms": latency.std,
            }
            result |= {f"p{_number(p)}_{name}_ms": value for p, value in latency.percentiles.items()}
        return result


def file_name(label: str, traffic: Traffic, model: str, now: datetime) -> str:
    """Where vLLM would save the result."""
    at_most = "" if traffic.max_concurrency is None else f"-concurrency{traffic.max_concurrency}"
    return f"{label}-{traffic.request_rate}qps{at_most}-{model.rstrip('/').split('/')[-1]}-{now:%Y%m%d-%H%M%S}.json"


def _line(name: str, value: float) -> str:
    return f"{name:<40} {value:<10}" if isinstance(value, int) else f"{name:<40} {value:<10.2f}"


def _number(percentile: float) -> str:
    return f"{percentile:g}"
