"""`Turns`: steps of replicas that do not wait for each other."""

import time
from collections.abc import Sequence

from jaxvllm.engine.output_processor import OutputProcessor
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.engine.replica import Replica

# The interval of asking which of several replicas is done. While they have work, each device has its next step
# already, and asking eight takes 4% of a core.
POLL_SECONDS = 5e-4


class Turns:
    """Steps each replica for itself. Where several compute, it reads those that are done and waits for no other.

    Replicas that share experts have `Rounds` instead.
    """

    def __init__(self, replicas: Sequence[Replica]):
        self._replicas = replicas

    def dispatch(self, outputs: OutputProcessor) -> None:
        """Starts the next step of each replica that has something to compute and may have another step under way."""
        for replica in self._replicas:
            replica.dispatch(outputs)

    def collect(self, outputs: OutputProcessor) -> list[RequestOutput]:
        """Waits for a step that must be read now, if there is one, and returns what its tokens mean to callers."""
        return [result for replica in self._to_collect() for result in replica.collect(outputs)]

    def drop(self) -> None:
        """Forgets nothing: each replica has its own steps."""

    def _to_collect(self) -> list[Replica]:
        """Returns the replicas whose oldest step must be read now: of several, those that are done, so none waits."""
        busy = [replica for replica in self._replicas if replica.is_busy]
        due = [replica for replica in busy if replica.is_due]
        if len(busy) < 2:
            return due
        while not (ready := [replica for replica in due if replica.is_ready]) and len(due) == len(busy):
            time.sleep(POLL_SECONDS)
        return ready
