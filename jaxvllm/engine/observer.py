"""Who wants to know what happens to requests and to the engine: metrics, and whoever else counts."""

from typing import Literal, Protocol

from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.engine import wire
from jaxvllm.engine.outputs import RequestOutput

type LossReason = Literal["abort", "error"]


class Observer(Protocol):
    """Is called in the event loop, and must be quick: a call comes with every output of every request."""

    def on_pulse(self, pulse: wire.Pulse) -> None:
        """The engine's counters, about twice a second while it works, and its latest steps."""
        return

    def on_output(self, output: RequestOutput, params: SamplingParams) -> None:
        """An output as the engine sent it, before any are joined. Of DELTA requests each has what is new alone."""
        return

    def on_loss(self, request_id: str, params: SamplingParams, reason: LossReason) -> None:
        """A request has ended without a last output: its client left it, or its engine died."""
        return

    def on_start(self, num_starts: int, facts: wire.EngineFacts) -> None:
        """The engine's process is ready, for the first time or again. Its counters begin at zero."""
        return
