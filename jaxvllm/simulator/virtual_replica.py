"""`VirtualReplica`: the real scheduler of a replica, with devices that only tell how long each step takes.

It follows `engine.replica.Replica`: up to `DEPTH` steps are under way, and the output of a step is read one step later.
A run of decode steps in which nothing can change is planned as one, so that long answers cost little: no request
arrives before the last of its calls would be planned, and no row ends before that call. That is why it is no `Replica`
on another device and another clock, which would plan each step: a load of 51,402 steps, of 300 requests that mostly run
alone, then takes 7.2 s of CPU and not 0.5, for the same figures.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.request import Request
from jaxvllm.core.step_plan import StepOutput, StepPlan
from jaxvllm.engine.burst_pace import BurstPace
from jaxvllm.engine.replica import DEPTH
from jaxvllm.simulator.engine_setup import BucketChoice, EngineSetup
from jaxvllm.simulator.ledger import Ledger
from jaxvllm.simulator.step_cost import StepCost, StepWork

# Decode steps of a run that is planned as one: its outputs are an array of this width.
MOST_JOINED = 1024


@dataclass(frozen=True)
class VirtualRequest:
    """The simulator's knowledge of a request, beside what its scheduler knows."""

    number: int  # in the ledger
    answer: int  # the token that it generates, again and again
    is_computed: bool  # elsewhere, so that it finds its pages by their transfer


@dataclass(frozen=True)
class _StepUnderWay:
    """A step under way, which may be several calls of a program, one after the other.

    The step without a plan stands for all of these calls but the last: until the last one is the only one that is under
    way, no other step can be planned.
    """

    ends: NDArray[np.float64]  # when the device is done with each call
    plan: StepPlan | None = None
    width: int = 1  # decode steps of a call
    launched: float = 0.0
    read_seconds: float = 0.0  # of the host

    @property
    def ready_at(self) -> float:
        return float(self.ends[-1])


@dataclass
class ReplicaCounts:
    """The work of a replica so far."""

    num_calls: int = 0  # of programs
    num_steps: int = 0  # of which a call may take several
    num_output_tokens: int = 0
    num_bucket_tokens: int = 0  # computed, padding included
    num_padding_tokens: int = 0
    num_prefix_queries: int = 0  # prompt tokens
    num_prefix_hits: int = 0
    device_seconds: float = 0.0  # in which it computed


class VirtualReplica:
    """One replica in virtual time. The host's clock is its engine's, which gives the time and gets it back."""

    def __init__(
        self,
        setup: EngineSetup,
        cost: StepCost,
        ledger: Ledger,
        about: Callable[[Request], VirtualRequest],
        buckets: BucketChoice,
    ):
        self.scheduler = setup.make_scheduler()
        self.counts = ReplicaCounts()
        self.is_due = False  # it can start no other step before the output of its oldest is read
        self._setup = setup
        self._cost = cost
        self._ledger = ledger
        self._about = about
        self._buckets = buckets
        self._jitter = np.array(cost.jitter)
        self._rng = np.random.default_rng(0)  # the same load takes the same time, every time
        self._pace = BurstPace(setup.burst_seconds)
        self._in_flight: deque[_StepUnderWay] = deque()
        self._busy_until = 0.0  # of the device
        self._had_prompts = False  # the latest step that was launched
        self._seen = 0.0  # when the latest output was read
        self._numbers = np.zeros(setup.max_num_seqs, np.int64)  # in the ledger, by slot
        self._answers = np.zeros(setup.max_num_seqs, np.int32)
        self._learn_pace()

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work

    @property
    def is_busy(self) -> bool:
        return bool(self._in_flight)

    @property
    def ready_at(self) -> float:
        """The second at which the output of the oldest step is there."""
        return self._in_flight[0].ready_at

    def dispatch(self, now: float, horizon: float, num_busy: int) -> float:
        """Starts the next step, if there is one and fewer than `DEPTH` are under way. Returns the time afterwards.

        No request comes before `horizon`. So many replicas share the host that it may be what they wait for.
        """
        if len(self._in_flight) >= DEPTH:
            return now
        num_rows = self.scheduler.num_decoding
        width = self._pace.width(num_rows, self._setup.burst_width)
        joined = self._num_joined(now, horizon, num_rows, width) if num_rows else 1
        plan = self.scheduler.schedule(width * joined, self._setup.step_sizes)
        if plan is not None:
            now = self._launch(plan, width, now, num_busy)
        self.is_due = bool(self._in_flight) and (plan is None or len(self._in_flight) >= DEPTH)
        return now

    def collect(self, now: float) -> tuple[float, tuple[Request, ...]]:
        """Reads the oldest step, which is ready. Returns the time afterwards, and the requests that ended then."""
        step = self._in_flight.popleft()
        start, plan = now, step.plan
        now += step.read_seconds
        if plan is None:
            self._seen = start
            return now, ()
        num_calls = len(step.ends)
        seconds = start - max(step.launched, self._seen)
        self._seen = start
        if plan.num_decode == plan.num_rows:
            if num_calls > 1:  # all calls but the last have been seen
                seconds = float(step.ends[-1] - step.ends[-2])
            for _ in range(num_calls - 1):
                self._pace.measured(plan.num_rows, step.width, seconds)
            last = int(plan.max_new.max()) - (num_calls - 1) * step.width
            self._pace.measured(plan.num_rows, min(last, step.width), seconds)
        slots = plan.slots.astype(np.intp)  # numpy would do it again wherever they are an index
        tokens = self._answers[slots][:, None].repeat(plan.row_tokens, axis=1)
        slots = slots[(self.scheduler.slots.epoch[slots] == plan.epochs) & plan.samples]
        update = self.scheduler.update(plan, StepOutput(tokens, plan.max_new))
        if len(slots):
            # The host reads the outputs of a call when the device is done with it, and so does not delay the next one.
            times = step.ends + (now - step.ready_at)
            self._ledger.take(self._numbers[slots], times, update.num_new_tokens)
        self.counts.num_output_tokens += update.num_new_tokens
        return now, tuple([end.request for end in update.finished])

    def _num_joined(self, now: float, horizon: float, num_rows: int, width: int) -> int:
        """Returns how many calls of `width` decode steps can be planned as one, since nothing can change meanwhile."""
        # When the device begins with the first call, the second one would be planned.
        begin = max(now, self._busy_until)
        if begin >= horizon or self.scheduler.num_waiting or not self._pace.is_known(num_rows):
            return 1
        slots = self.scheduler.slots
        decoding = slots.decoding()
        # In the last of these calls a row may end.
        least = int((slots.limit[decoding] - slots.num_tokens[decoding]).min())
        alike = self._pace.num_alike(num_rows, self._setup.burst_width)
        most = int(min(-(-least // width), MOST_JOINED // width, alike))
        if most <= 1:
            return 1
        starts = slots.num_computed[decoding] + most * width
        bucket = self._buckets.of(num_rows, num_rows, True, width > 1)
        work = StepWork(bucket, starts, np.ones_like(starts), num_rows, width)
        begin += self._cost.launch_seconds(work)
        if begin >= horizon:
            return 1
        # Each later call would be planned a call later.
        return int(min(most, (horizon - begin) / self._cost.device_seconds(work) + 2))

    def _learn_pace(self) -> None:
        """Lets the pace know the steps of whole bursts, as that of a server does which has run for a while.

        Without it the first steps would be single ones. Where the host needs half of the time of a burst for each, they
        would look so slow that no burst ever followed.
        """
        width = self._setup.burst_width
        for bucket in (one for one in self._setup.ladder.buckets if one.is_decode and width > 1):
            rows = np.zeros(bucket.num_rows, np.int32)
            work = StepWork(bucket, rows, np.ones_like(rows), bucket.num_rows, width)
            host_seconds = self._cost.launch_seconds(work) + self._cost.read_seconds(work)
            seconds = max(self._cost.device_seconds(work), host_seconds)
            self._pace.measured(bucket.num_rows, width, seconds)

    def _launch(self, plan: StepPlan, width: int, now: float, num_busy: int) -> float:
        """Starts a plan of decode steps, `width` of them a call, or of anything else. Returns the time afterwards."""
        bucket = self._buckets.of_plan(plan)
        for admission in plan.admissions:
            self._admit(admission.slot, admission.request)
        num_steps = int(plan.max_new.max()) if plan.row_tokens > 1 else 1
        width = min(width, num_steps)
        work = StepWork.of(plan, bucket, width)
        launch_seconds, read_seconds = self._cost.launch_seconds(work), self._cost.read_seconds(work)
        launched = now + launch_seconds
        seconds = self._call_seconds(work, num_steps)
        has_prompts = work.num_prompts > 0
        if launched < self._busy_until and (has_prompts or self._had_prompts):
            behind = self._cost.device_seconds(replace(work, is_behind=True))
            seconds[0] += behind - self._cost.device_seconds(work)
        self._had_prompts = has_prompts
        if len(self._jitter) > 1:
            seconds = seconds * self._rng.choice(self._jitter, len(seconds))
        if len(seconds) > 1:
            # Where the host needs longer than the device, each call waits for it.
            seconds = np.maximum(seconds, (launch_seconds + read_seconds) * num_busy)
        ends = max(launched, self._busy_until) + seconds.cumsum()
        if len(seconds) > 1:
            self._in_flight.append(_StepUnderWay(ends[:-1], read_seconds=read_seconds))
        self._in_flight.append(_StepUnderWay(ends, plan, width, launched, read_seconds))
        self._busy_until = float(ends[-1])
        self._count(plan, bucket.num_tokens, len(seconds), num_steps, float(seconds.sum()))
        return launched

    def _call_seconds(self, first: StepWork, num_steps: int) -> NDArray[np.float64]:
        """Returns the device's time for each call of so many steps in all, the first of which is `first`, f64[calls].

        Contexts grow by the same number of tokens from call to call, and so does the time, but for the last call, which
        may be shorter.
        """
        width = first.num_steps
        num_calls = -(-num_steps // width)
        if num_calls == 1:
            return np.array([self._cost.device_seconds(first)])
        last = first.later((num_calls - 1) * width)
        seconds = np.linspace(self._cost.device_seconds(first), self._cost.device_seconds(last), num_calls)
        num_left = num_steps - (num_calls - 1) * width
        if num_left < width:
            seconds[-1] = self._cost.device_seconds(replace(last, num_steps=num_left))
        return seconds

    def _admit(self, slot: int, request: Request) -> None:
        about = self._about(request)
        self._numbers[slot], self._answers[slot] = about.number, about.answer
        if not (request.num_preemptions or about.is_computed):  # or it was counted when it came
            self.counts.num_prefix_queries += request.num_prompt_tokens
            self.counts.num_prefix_hits += request.num_cached_tokens or 0

    def _count(self, plan: StepPlan, bucket_tokens: int, num_calls: int, num_steps: int, seconds: float) -> None:
        counts = self.counts
        counts.num_calls += num_calls
        counts.num_steps += num_steps
        counts.num_bucket_tokens += num_steps * bucket_tokens
        counts.num_padding_tokens += num_steps * (bucket_tokens - plan.num_tokens)
        counts.device_seconds += seconds
