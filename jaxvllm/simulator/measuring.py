"""Measures the steps of a real engine under loads of every size, for a table of step times."""

import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxvllm.core.step_plan import Ints, StepPlan
from jaxvllm.engine.engine import Engine
from jaxvllm.engine.output_processor import OutputProcessor
from jaxvllm.engine.stats import StepReport
from jaxvllm.planner.target import CPU
from jaxvllm.simulator.arrival import Arrival, Segment
from jaxvllm.simulator.engine_run import frozen_heap, streamed
from jaxvllm.simulator.engine_setup import BucketChoice
from jaxvllm.simulator.measured_cost import MeasuredCost, StepSample
from jaxvllm.simulator.step_cost import StepWork
from pallas_kernels.chips import chip_of

# Steps of a phase that are not counted: the burst pace learns, and caches of the processor fill.
_WARM_UP = 10
# Steps of a phase, however slow the machine is.
_LEAST_STEPS = 100
# The mean time until a client asks again. Requests find an engine that has slept, as those of a server do, and some
# come in the middle of bursts.
_PAUSE_SECONDS = 0.01


@dataclass(frozen=True)
class _Planned:
    """The part of a step that its report does not tell: the places where its rows began."""

    starts: Ints
    lengths: Ints
    is_burst: bool
    num_admissions: int
    was_idle: bool  # the device began with it when it was launched
    is_behind: bool  # see `StepWork`


class PlanRecorder(OutputProcessor):
    """The outputs of an engine that is measured: it also notes each plan, in the order in which steps are reported."""

    def __init__(self, engine: Engine):
        super().__init__(engine.tokenizer, engine.config.max_outputs_per_second)
        self._replica = engine.replicas[0]
        self._had_prompts = False
        self.plans: list[_Planned] = []

    def scheduled(self, plan: StepPlan) -> None:
        super().scheduled(plan)
        was_idle, has_prompts = not self._replica.is_busy, plan.num_decode < plan.num_rows
        is_behind = not was_idle and (has_prompts or self._had_prompts)
        self._had_prompts = has_prompts
        num_admissions = len(plan.admissions)
        planned = _Planned(plan.starts, plan.lengths, plan.row_tokens > 1, num_admissions, was_idle, is_behind)
        self.plans.append(planned)


@dataclass
class StepMeasurement:
    """Steps that an engine took, and how long it took to queue each request."""

    samples: list[StepSample] = field(default_factory=list)
    queueing: list[float] = field(default_factory=list)

    def table(self, model: str, device: str) -> MeasuredCost:
        """Raises ValueError when there are too few steps."""
        if not self.queueing:
            raise ValueError("a table of step times needs requests: measure for longer")
        return MeasuredCost.fit(self.samples, float(np.mean(self.queueing)), model, device)


def measure_steps(
    engine: Engine, seconds: float, measured: StepMeasurement, tell: Callable[[str], object] = print
) -> None:
    """Adds steps of `engine`, which is idle, has one replica and drafts nothing, to `measured`. Takes about `seconds`.

    The engine answers so many requests at a time, from one to `max_num_seqs`: first another comes some time after one
    has ended, then all of them come at once, with short prompts. Prompts have all lengths. Raises ValueError for
    another engine.
    """
    if len(engine.replicas) != 1:
        raise ValueError(f"step times are measured on one replica, not on a mesh of {engine.config.mesh}: use 1xM")
    if engine.config.speculation:
        raise ValueError("step times are those of steps without drafts: give --no-speculation")
    engine.wait_until_compiled()
    engine.reset_prefix_cache()
    outputs, recorder = engine.outputs, PlanRecorder(engine)
    engine.outputs = recorder
    ladder = engine.replicas[0].runner.programs.ladder
    buckets = BucketChoice(ladder)
    sizes = [bucket.num_rows for bucket in ladder.buckets if bucket.is_decode]
    names = itertools.count(1)
    for number, (size, at_once) in enumerate(itertools.product(sizes, (False, True))):
        arrivals = _arrivals(engine, size, at_once, np.random.default_rng(number), names)
        with frozen_heap():  # which may take longer than the phase
            deadline = time.perf_counter() + seconds / (2 * len(sizes))
            found = _phase(engine, recorder, buckets, arrivals, size, at_once, deadline, measured.queueing)
        tell(f"{size:4} requests at a time, {'all at once' if at_once else 'one by one'}: {len(found)} steps")
        measured.samples += found
    engine.outputs = outputs


def device_name() -> str:
    """Returns the planner's name of the device at hand. Raises ValueError for one that it does not know."""
    device = jax.devices()[0]
    return CPU if device.platform == "cpu" else chip_of(device.device_kind).name


def _arrivals(
    engine: Engine, size: int, at_once: bool, rng: np.random.Generator, names: Iterator[int]
) -> Iterator[Arrival]:
    """Yields requests for ever. Their prompts are as often of 8 to 16 tokens as of 256 to 512, if all have room."""
    replica = engine.replicas[0].scheduler
    # So that all of them have pages, and the model takes each.
    room = min(engine.max_model_len, replica.cache.num_pages * replica.cache.page_size // size)
    most_answer = max(min(64, room // 2), 1)
    most_prompt = max(min(room - most_answer, replica.max_num_batched_tokens // size if at_once else room), 1)
    while True:
        prompt = int(np.exp(rng.uniform(0, np.log(most_prompt + 1))))
        answer = int(rng.integers(1, most_answer + 1))
        yield Arrival(0.0, (Segment(next(names), max(prompt, 1)),), Segment(next(names), answer))


def _phase(
    engine: Engine,
    recorder: PlanRecorder,
    buckets: BucketChoice,
    arrivals: Iterator[Arrival],
    size: int,
    at_once: bool,
    deadline: float,
    queueing: list[float],
) -> list[StepSample]:
    """Runs at most `size` requests at a time until the deadline, and then to their end. Returns the steps.

    Where these would be too few, it goes on after the deadline.
    """
    samples: list[StepSample] = []
    running, serial, saw_end = 0, itertools.count(), False
    recorder.plans.clear()
    engine.take_reports()
    rng = np.random.default_rng(size)
    together = size if at_once else 1
    coming = [time.perf_counter()] * (size // together)  # when the next requests come, a heap
    while running or time.perf_counter() < deadline or len(samples) < _LEAST_STEPS:
        if len(samples) < _LEAST_STEPS:
            deadline = max(deadline, time.perf_counter() + _PAUSE_SECONDS)
        while coming and coming[0] <= time.perf_counter() < deadline:
            heapq.heappop(coming)
            for request in [streamed(engine, str(next(serial)), next(arrivals)) for _ in range(together)]:
                begin = time.perf_counter()
                engine.submit(request)
                if not at_once:  # one that comes after another takes less
                    queueing.append(time.perf_counter() - begin)
            running += together
        if not running:
            time.sleep(max(min(coming[0], deadline) - time.perf_counter(), 0))
            continue
        ended = sum(result.finished for result in engine.step())
        running -= ended
        for _ in range(int(not running) if at_once else ended):
            heapq.heappush(coming, time.perf_counter() + rng.exponential(_PAUSE_SECONDS))
        for report in engine.take_reports():
            plan = recorder.plans.pop(0)
            samples.append(_sample(plan, report, buckets, saw_begin=saw_end or plan.was_idle))
            saw_end = report.was_awaited
    return samples[_WARM_UP:]


def _sample(plan: _Planned, report: StepReport, buckets: BucketChoice, saw_begin: bool) -> StepSample:
    """Returns what is known of a step. `saw_begin`: the host saw when the device began with it."""
    is_decode = report.num_decode == report.num_rows
    bucket = buckets.of(report.num_decode + report.num_prefill, report.num_rows, is_decode, plan.is_burst)
    work = StepWork(
        bucket,
        plan.starts,
        plan.lengths,
        report.num_decode,
        report.num_steps,
        plan.num_admissions,
        plan.is_behind,
    )
    read_seconds = report.host_seconds - report.launch_seconds
    return StepSample(work, report.device_seconds, saw_begin, report.was_awaited, report.launch_seconds, read_seconds)
