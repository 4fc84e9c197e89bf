"""Reports a run as vLLM does: with the same table, and with JSON under the keys that people's scripts read."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jaxvllm.bench.drafts import DraftTotals
from jaxvllm.bench.load import LoadOutcome
from jaxvllm.bench.summary import LATENCIES, Summary
from jaxvllm.bench.traffic import Traffic

WIDTH = 50


@dataclass(frozen=True)
class BenchRun:
    """One run, with its traffic and its results."""

    traffic: Traffic
    outcome: LoadOutcome
    summary: Summary
    shown: Sequence[str]  # the latencies in the table and in the JSON, by their names in the JSON
    drafts: DraftTotals  # that the server verified meanwhile, for whatever client

    def table(self) -> str:
        """Returns the table, 50 columns wide."""
        summary, traffic = self.summary, self.traffic
        lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
        lines += [line("Successful requests:", summary.completed), line("Failed requests:", summary.failed)]
        if traffic.max_concurrency is not None:
            lines.append(line("Maximum request concurrency:", traffic.max_concurrency))
        if not math.isinf(traffic.request_rate):
            lines.append(line("Request rate configured (RPS):", float(traffic.request_rate)))
        lines += [
            line("Benchmark duration (s):", summary.duration),
            line("Total input tokens:", summary.total_input),
            line("Total generated tokens:", summary.total_output),
            line("Request throughput (req/s):", summary.request_throughput),
        ]
        if summary.request_goodput is not None:
            lines.append(line("Request goodput (req/s):", summary.request_goodput))
        lines += [
            line("Output token throughput (tok/s):", summary.output_throughput),
            line("Peak output token throughput (tok/s):", summary.peak_output_tokens),
            line("Peak concurrent requests:", float(summary.peak_concurrency)),
            line("Total token throughput (tok/s):", summary.total_token_throughput),
        ]
        for name in self.shown:
            short, headline = LATENCIES[name]
            latency = summary.latencies[name]
            lines.append(f"{headline:-^{WIDTH}}")
            lines += [line(f"Mean {short} (ms):", latency.mean), line(f"Median {short} (ms):", latency.median)]
            lines += [line(f"P{_number(p)} {short} (ms):", value) for p, value in latency.percentiles.items()]
        if self.drafts.drafts:
            lines += self._draft_lines()
        return "\n".join([*lines, "=" * WIDTH])

    def _draft_lines(self) -> list[str]:
        drafts = self.drafts
        return [
            f"{'Speculative Decoding':-^{WIDTH}}",
            line("Acceptance rate (%):", drafts.acceptance_rate),
            line("Acceptance length:", drafts.acceptance_length),
            line("Drafts:", drafts.drafts),
            line("Draft tokens:", drafts.draft_tokens),
            line("Accepted tokens:", drafts.accepted_tokens),
            "Per-position acceptance (%):",
            *(line(f"  Position {at}:", 100 * rate) for at, rate in enumerate(drafts.rates_per_pos)),
        ]

    def details(self) -> dict[str, Any]:
        """Returns vLLM's lists that have an entry for each request."""
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
        """Returns all other results under vLLM's keys."""
        summary = self.summary
        result: dict[str, Any] = {
            "request_rate": "inf" if math.isinf(self.traffic.request_rate) else self.traffic.request_rate,
            "burstiness": self.traffic.burstiness,
            "max_concurrency": self.traffic.max_concurrency,
            "duration": summary.duration,
            "completed": summary.completed,
            "failed": summary.failed,
            "total_input_tokens": summary.total_input,
            "total_output_tokens": summary.total_output,
            "request_throughput": summary.request_throughput,
            "request_goodput": summary.request_goodput,
            "output_throughput": summary.output_throughput,
            "total_token_throughput": summary.total_token_throughput,
            "max_output_tokens_per_s": summary.peak_output_tokens,
            "max_concurrent_requests": summary.peak_concurrency,
            "client_cpu_seconds": self.outcome.cpu_seconds,
        }
        for name in self.shown:
            latency = summary.latencies[name]
            result |= {
                f"mean_{name}_ms": latency.mean,
                f"median_{name}_ms": latency.median,
                f"std_{name}_ms": latency.std,
            }
            result |= {f"p{_number(p)}_{name}_ms": value for p, value in latency.percentiles.items()}
        return result | (self.drafts.record() if self.drafts.drafts else {})


def file_name(label: str, traffic: Traffic, model: str, now: datetime) -> str:
    """Returns the name of the file that vLLM would save the result to."""
    at_most = "" if traffic.max_concurrency is None else f"-concurrency{traffic.max_concurrency}"
    return f"{label}-{traffic.request_rate}qps{at_most}-{model.rstrip('/').split('/')[-1]}-{now:%Y%m%d-%H%M%S}.json"


def line(name: str, value: float) -> str:
    return f"{name:<40} {value:<10}" if isinstance(value, int) else f"{name:<40} {value:<10.2f}"


def _number(percentile: float) -> str:
    return f"{percentile:g}"
