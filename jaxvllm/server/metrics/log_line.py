"""`StatsLogger`: logs the engine's load in vLLM's words."""

import logging
import time
from dataclasses import dataclass

from jaxvllm.engine.stats import EngineStats, StepReport
from jaxvllm.server.metrics.prometheus import COUNTERS, EngineTotals
from jaxvllm.worker import wire
from jaxvllm.worker.observer import Observer

logger = logging.getLogger(__name__)


class StatsLogger(Observer):
    """Logs a line every `interval` seconds while the engine works, one more when it has stopped, and then no more.

    Pulses are its clock: even an idle engine sends one each second. Means and rates are those since the line before.
    """

    def __init__(self, interval: float, engine: int = 0):
        self._interval = interval
        self._engine = engine
        self._totals = EngineTotals()
        self._was_busy = False
        self._hit_rate = 0.0  # of the prefix cache, in the last line before which prompts were looked up
        self._begin()

    def of_engine(self, index: int) -> "StatsLogger":
        """Implements `Observer.of_engine`: each engine has its own line."""
        return StatsLogger(self._interval, index)

    def on_start(self, num_starts: int, facts: wire.EngineFacts) -> None:
        """Implements `Observer.on_start`."""
        self._totals.restart()
        self._begin()

    def on_pulse(self, pulse: wire.Pulse) -> None:
        """Implements `Observer.on_pulse`."""
        self._totals.update(pulse.stats)
        for step in pulse.steps:
            self._steps.add(step)
        seconds = time.monotonic() - self._since
        if seconds >= self._interval:
            is_busy = self._gained("num_steps") > 0
            if is_busy or self._was_busy:
                logger.info("Engine %03d: %s", self._engine, self._line(pulse.stats, seconds))
            self._was_busy = is_busy
            self._begin()

    def _begin(self) -> None:
        self._since = time.monotonic()
        self._earlier = {name: self._totals[name] for name in COUNTERS}
        self._steps = _StepSums()

    def _gained(self, name: str) -> int:
        return self._totals[name] - self._earlier[name]

    def _line(self, stats: EngineStats, seconds: float) -> str:
        steps = self._steps
        if num_queries := self._gained("num_prefix_queries"):
            self._hit_rate = self._gained("num_prefix_hits") / num_queries
        parts = [
            f"Avg prompt throughput: {steps.num_prefill / seconds:.1f} tokens/s",
            f"Avg generation throughput: {self._gained('num_output_tokens') / seconds:.1f} tokens/s",
            f"Running: {stats.num_running} reqs",
            f"Waiting: {stats.num_waiting} reqs",
            f"KV cache usage: {stats.num_pages_owned / stats.num_pages:.1%}",
            f"Prefix cache hit rate: {self._hit_rate:.1%}",
        ]
        drafted, accepted = self._gained("num_draft_tokens"), self._gained("num_accepted_tokens")
        if drafted:
            length = 1 + accepted / self._gained("num_verifications")
            parts.append(f"Draft acceptance rate: {accepted / drafted:.1%}, Mean acceptance length: {length:.2f}")
        if steps.count:
            host, device = 1e3 * steps.host_seconds / steps.count, 1e3 * steps.device_seconds / steps.count
            parts.append(f"padding {1 - (steps.num_tokens + drafted) / steps.bucket_tokens:.0%}")
            parts.append(f"host {host:.1f} ms and device {device:.1f} ms a step")
        return ", ".join(parts)


@dataclass(slots=True)
class _StepSums:
    """Sums over steps."""

    count: int = 0
    num_prefill: int = 0
    num_tokens: int = 0
    bucket_tokens: int = 0
    host_seconds: float = 0.0
    device_seconds: float = 0.0

    def add(self, step: StepReport) -> None:
        self.count += step.num_steps
        self.num_prefill += step.num_prefill
        self.num_tokens += step.num_steps * (step.num_decode + step.num_prefill)
        self.bucket_tokens += step.num_steps * step.bucket_tokens
        self.host_seconds += step.host_seconds
        self.device_seconds += step.device_seconds
