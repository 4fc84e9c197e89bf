"""Measures the steps of a real engine under loads of every size, for a table of step times."""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import numpy as np

from jaxvllm.core.step_plan import Ints, StepPlan
from jaxvllm.engine.engine import Engine
from jaxvllm.engine.output_processor import OutputProcessor
from jaxvllm.planner.target import CPU
from jaxvllm.simulator.arrival import Arrival, Segment
from jaxvllm.simulator.engine_run import streamed
from jaxvllm.simulator.engine_setup import BucketChoice
from jaxvllm.simulator.measured_cost import MeasuredCost, StepSample
from jaxvllm.simulator.step_cost import StepWork
from pallas_kernels.chips import chip_of

# Steps of a phase that are not counted: the burst pace learns, and caches of the processor fill.
_WARM_UP = 10


@dataclass(frozen=True)
class _Planned:
    """What a report of a step does not tell: where its rows began."""

    starts: Ints
    lengths: Ints
    is_burst: bool


class PlanRecorder(OutputProcessor):
    """The outputs of an engine that is measured: it also notes each plan, in the order in which steps are reported."""

    def __init__(self, engine: Engine):
        super().__init__(engine.tokenizer, engine.config.max_outputs_per_second)
        self.plans: list[_Planned] = []

    def scheduled(self, plan: StepPlan) -> None:
        super().scheduled(plan)
        self.plans.append(_Planned(plan.starts, plan.lengths, plan.width > 1))


def measure_steps(
    engine: Engine, seconds: float, model: str, device: str, tell: Callable[[str], object] = print
) -> MeasuredCost:
    """Returns the step times of `engine`, which is idle, has one replica and drafts nothing. Takes about `seconds`.

    The engine answers so many requests at a time, from one to `max_num_seqs`: first each time one ends another comes,
    then all of them come at once, with short prompts. Prompts have all lengths. Raises ValueError for another engine.
    """
    if len(engine.replicas) != 1:
        raise ValueError(f"step times are measured on one replica, not on a mesh of {engine.config.mesh}: use 1xM")
    if engine.config.speculation:
        raise ValueError("step times are those of steps without drafts: give --no-speculation")
    engine.wait_until_compiled()
    engine.outputs = recorder = PlanRecorder(engine)
    ladder = engine.replicas[0].runner.programs.ladder
    buckets = BucketChoice(ladder)
    sizes = [bucket.num_rows for bucket in ladder.buckets if bucket.is_decode]
    names = itertools.count(1)
    samples: list[StepSample] = []
    queueing: list[float] = []
    for number, (size, at_once) in enumerate(itertools.product(sizes, (False, True))):
        arrivals = _arrivals(engine, size, at_once, np.random.default_rng(number), names)
        deadline = time.perf_counter() + seconds / (2 * len(sizes))
        found = _phase(engine, recorder, buckets, arrivals, size, at_once, deadline, queueing)
        tell(f"{size:4} requests at a time, {'all at once' if at_once else 'one by one'}: {len(found)} steps")
        samples += found
    return MeasuredCost.fit(samples, float(np.median(queueing)), model, device)


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
    """Runs `size` requests at a time until the deadline, and then to their end. Returns the steps."""
    samples: list[StepSample] = []
    running, serial = 0, itertools.count()
    recorder.plans.clear()
    engine.take_reports()
    while running or time.perf_counter() < deadline:
        if time.perf_counter() < deadline and not (at_once and running):
            made = [streamed(engine, str(next(serial)), next(arrivals)) for _ in range(size - running)]
            for request in made:
                begin = time.perf_counter()
                engine.submit(request)
                queueing.append(time.perf_counter() - begin)
            running += len(made)
        running -= sum(result.finished for result in engine.step())
        for report in engine.take_reports():
            plan = recorder.plans.pop(0)
            is_decode = report.num_decode == report.num_rows
            bucket = buckets.of(report.num_decode + report.num_prefill, report.num_rows, is_decode, plan.is_burst)
            work = StepWork(bucket, plan.starts, plan.lengths, report.num_decode, report.num_steps)
            samples.append(StepSample(work, report.device_seconds, report.host_seconds))
    return samples[_WARM_UP:]
