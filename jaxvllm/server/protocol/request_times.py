"""The times of a request, which answers have with --enable-per-request-metrics."""

from typing import Any

from jaxvllm.engine.outputs import RequestMetrics
from jaxvllm.server.protocol.fields import Reply


class RequestTimes(Reply):
    """The times of a request in the engine, in milliseconds, by vLLM's names. null: it did not come so far."""

    time_to_first_token_ms: float | None  # from the first step that worked on the request
    generation_time_ms: float | None  # from the first token to the last
    queue_time_ms: float | None  # from arrival to the first step that worked on the request
    mean_itl_ms: float | None  # between two tokens
    tokens_per_second: float | None  # from the first step to the last token


def times_of(metrics: RequestMetrics | None, num_tokens: int) -> dict[str, Any] | None:
    """Returns the `RequestTimes` of a request that has ended with so many tokens, as they are encoded."""
    if metrics is None:
        return None
    generation = _milliseconds(metrics.first_token_time, metrics.finished_time)
    inference = _milliseconds(metrics.first_scheduled_time, metrics.finished_time)
    return {
        "time_to_first_token_ms": _milliseconds(metrics.first_scheduled_time, metrics.first_token_time),
        "generation_time_ms": generation,
        "queue_time_ms": _milliseconds(metrics.arrival_time, metrics.first_scheduled_time),
        "mean_itl_ms": None if generation is None or num_tokens < 2 else generation / (num_tokens - 1),
        "tokens_per_second": 1000 * num_tokens / inference if inference else None,
    }


def _milliseconds(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else 1000 * (end - start)
