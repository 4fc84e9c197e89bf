"""One copy of the model at work: its scheduler, its devices, and the steps under way between them."""

from collections import deque
from collections.abc import Callable

from jaxvllm.core.scheduler import Scheduler
from jaxvllm.engine.output_processor import OutputProcessor
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.runtime.runner import InFlight, Runner

# Steps on the device before the host must have read the oldest's output. With two, the device computes step N + 1
# while the host reads step N and plans step N + 2.
DEPTH = 2


class Replica:
    """Schedules and dispatches steps, and collects each one step later; it knows nothing of other replicas."""

    def __init__(self, make_scheduler: Callable[[], Scheduler], runner: Runner):
        self.scheduler = make_scheduler()
        self.runner = runner
        self.num_steps = 0
        self.num_output_tokens = 0
        self.is_due = False  # it can start no other step before the output of its oldest is read
        self._make_scheduler = make_scheduler
        self._in_flight: deque[InFlight] = deque()

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work

    @property
    def is_busy(self) -> bool:
        """Whether steps are under way."""
        return bool(self._in_flight)

    @property
    def is_ready(self) -> bool:
        """Whether `collect` would not wait."""
        return bool(self._in_flight[0].output.token_ids.is_ready())  # type: ignore[attr-defined]  # jax hides it

    def dispatch(self, outputs: OutputProcessor) -> None:
        """Starts the next step, if there is one to compute and fewer than `DEPTH` are under way."""
        if len(self._in_flight) == DEPTH:
            return
        plan = self.scheduler.schedule()
        if plan is not None:
            outputs.scheduled(plan)
            self._in_flight.append(self.runner.dispatch(plan))
            self.num_steps += 1
        self.is_due = bool(self._in_flight) and (plan is None or len(self._in_flight) == DEPTH)

    def collect(self, outputs: OutputProcessor) -> list[RequestOutput]:
        """Waits for the oldest step under way, and returns what its tokens mean to callers."""
        done = self._in_flight.popleft()
        output = self.runner.collect(done)
        update = self.scheduler.update(done.plan, output)
        self.num_output_tokens += update.num_new_tokens
        results, stopped = outputs.process(update, output)
        for request_id in stopped:
            self.scheduler.finish(request_id)
        return results

    def drop(self) -> None:
        """Forgets every request, and the prefix cache with them; the devices are `runner.reset`'s."""
        self._in_flight.clear()
        self.is_due = False
        self.scheduler = self._make_scheduler()
