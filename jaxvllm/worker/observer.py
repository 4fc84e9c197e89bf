"""`Observer`: the interface of objects, such as metrics, that watch requests and the engine."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.worker import wire

logger = logging.getLogger(__name__)

# moved: another engine computes it, and tells its outputs
type LossReason = Literal["abort", "error", "moved"]


class Observer(Protocol):
    """Receives events in the event loop. Its methods must be quick, because each output of each request is a call."""

    def of_engine(self, index: int) -> "Observer":
        """Returns the observer of engine number `index`. By default one observes all engines."""
        return self

    def on_pulse(self, pulse: wire.Pulse) -> None:
        """Takes the engine's counters and its latest steps, about twice a second while it works."""
        return

    def on_output(self, output: RequestOutput, params: SamplingParams) -> None:
        """Takes an output as the engine sent it, before outputs are joined. DELTA requests get only news."""
        return

    def on_loss(self, request_id: str, params: SamplingParams, reason: LossReason) -> None:
        """Takes note of a request that ended without a last output: its client left it, or its engine died or ends."""
        return

    def on_start(self, num_starts: int, facts: wire.EngineFacts) -> None:
        """Takes note that the engine's process is ready, for the first time or again. Its counters begin at zero."""
        return

    def on_end(self) -> None:
        """Takes note that the engine is closed: nothing runs or waits in it. An engine of its number may follow."""
        return


@dataclass
class Observers:
    """The observers of one engine. What one of them raises is logged, and ends neither the engine nor the others."""

    listed: list[Observer] = field(default_factory=list)

    def tell(self, what: Callable[[Observer], None]) -> None:
        for observer in self.listed:
            try:
                what(observer)
            except Exception:
                logger.exception("an observer of the engine failed")
