"""One copy of the model at work: its scheduler, its devices, and the steps under way between them."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.kv_events import KVEventLog
from jaxvllm.core.request import Request
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.core.step_plan import StepOutput, StepPlan
from jaxvllm.core.weight_version import WeightVersion
from jaxvllm.engine.decode_pace import DecodeChoice, DecodePace, DecodeTime
from jaxvllm.engine.expert_balancer import ExpertBalancer
from jaxvllm.engine.output_processor import OutputProcessor
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.engine.page_traffic import PageTraffic
from jaxvllm.engine.repetition_watch import RepetitionWatch
from jaxvllm.engine.seen_rows import SeenRows
from jaxvllm.engine.stats import StepReport
from jaxvllm.engine.step_recorder import StepNotes, StepRecorder
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.plan_runner import HeldStep, InFlight, PlanRunner

if TYPE_CHECKING:
    from jaxvllm.engine.kv_event_publisher import KVEventPublisher

# Steps on the device before the host must have read the oldest's output. With two, the device computes step N + 1
# while the host reads step N and plans step N + 2. With one, each waits for the other.
DEPTH = 2
DEPTH_IN_TURNS = 1
# So many reports are kept until somebody asks for them. An `LLM` never asks.
MAX_REPORTS = 1024


@dataclass(frozen=True)
class PlannedStep:
    """A step that is to be dispatched, and what the host has noted about it."""

    plan: StepPlan
    notes: StepNotes | None  # for explanations; None: nobody in it wants one
    start: float  # when the host began to plan it, on its monotonic clock

    def without_drafts(self) -> "PlannedStep":
        """Returns the step for a program without drafts, where each row yields one token."""
        return replace(self, plan=self.plan.without_drafts())


@dataclass(frozen=True)
class _UnderWay[Step: (InFlight, HeldStep)]:
    """A step under way, and what the host has noted about it."""

    step: Step
    notes: StepNotes | None  # for explanations; None: nobody in it wants one
    host_seconds: float
    is_paced: bool  # whether it was known how many decode steps a burst has; without that there is one
    version: WeightVersion  # of the weights that compute it


class Replica:
    """Schedules and dispatches steps, and collects each one step later; it knows nothing of other replicas."""

    def __init__(
        self,
        index: int,
        make_scheduler: Callable[[KVEventLog | None], Scheduler],
        runner: PlanRunner,
        pace: DecodePace,
        traffic: PageTraffic | None = None,
        publisher: "KVEventPublisher | None" = None,
        depth: int = DEPTH,
        balancer: ExpertBalancer | None = None,
    ):
        """Makes the scheduler. `pace` says what decode steps have, and replicas that step together have the same one.

        `traffic` moves pages to and from other places. `depth` is the number of steps on the device before the host
        must have read the oldest's output. The `balancer` moves experts between its steps.
        """
        self.index = index
        self._depth = depth
        self._publisher = publisher
        self.scheduler = make_scheduler(None if publisher is None else publisher.log)
        self.runner = runner
        self.traffic = traffic
        self.version = WeightVersion()  # of the weights that the next step has
        self._version_read = self.version  # of the last step that was read
        self.num_steps = 0
        self.num_output_tokens = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.num_bucket_tokens = 0
        self.num_padding_tokens = 0
        self.num_ended_tokens = 0
        self.num_bucket_rows = 0
        self.num_padding_rows = 0
        self.is_due = False  # it can start no other step before the output of its oldest is read
        self._balancer = balancer
        self._make_scheduler = make_scheduler
        self._in_flight: deque[_UnderWay[InFlight]] = deque()
        self._held: _UnderWay[HeldStep] | None = None  # after all that are in flight
        # Drafts that were verified, by their place after the last token of a row.
        self.num_drafted = np.zeros(runner.programs.ladder.drafts.num_drafts, np.int64)
        self.num_accepted = self.num_drafted.copy()
        self.pace = pace
        self._seen = SeenRows(self.scheduler.slots.num_slots)
        self._repetition = RepetitionWatch()
        self._recorder = StepRecorder(index)
        self._reports: deque[StepReport] = deque(maxlen=MAX_REPORTS)
        self._last_end = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work

    @property
    def is_busy(self) -> bool:
        """Whether steps are under way."""
        return bool(self._in_flight)

    @property
    def waits_for_pages(self) -> bool:
        """Whether pages are on their way to requests that wait for them."""
        return self.traffic is not None and self.traffic.has_loads

    @property
    def is_ready(self) -> bool:
        """Whether `collect` would not wait."""
        return self._in_flight[0].step.is_ready

    @property
    def is_full(self) -> bool:
        """Whether the oldest step must be read before there may be another one."""
        return self._num_under_way == self._depth

    def dispatch(self, outputs: OutputProcessor) -> None:
        """Starts the next step, if there is one to compute and fewer than `depth` are under way."""
        if self.is_full:
            return
        planned = self.plan(outputs, self.pace.choose([self]))
        self.started(planned, None if planned is None else self.runner.dispatch(planned.plan))

    def plan(self, outputs: OutputProcessor, choice: DecodeChoice) -> PlannedStep | None:
        """Decides what the next step computes, and returns it, if there is one. `started` must follow."""
        start = time.monotonic()
        programs = self.runner.programs
        self._move_pages()
        if self._balancer is not None:
            self._balancer.between_steps(self.num_steps)
        plan = self.scheduler.schedule(choice.num_steps, self.runner.step_sizes, programs.room, choice.num_drafts)
        if plan is None:
            return None
        self._count_prefixes(plan)
        outputs.scheduled(plan)
        if programs.ladder.blind and not plan.num_drafts and self._may_be_blind(plan, choice.num_rows):
            plan = replace(plan, is_blind=True)
        return PlannedStep(plan, self._recorder.begin(plan, self.scheduler), start)

    def started(self, planned: PlannedStep | None, step: InFlight | HeldStep | None) -> None:
        """Takes note of the step that was dispatched as `plan` has returned it, or that there was none."""
        if planned is not None:
            assert step is not None
            plan, notes = planned.plan, planned.notes
            if self.runner.programs.ladder.blind:
                self._seen.dispatched(plan, step.bucket.is_blind)
            self.num_steps += 1
            is_paced = self.pace.is_known(plan.num_rows, plan.num_drafts)
            host_seconds = time.monotonic() - planned.start
            if isinstance(step, HeldStep):
                self._held = _UnderWay(step, notes, host_seconds, is_paced, self.version)
                self._supply()
            else:
                self._in_flight.append(_UnderWay(step, notes, host_seconds, is_paced, self.version))
        self.is_due = bool(self._in_flight) and (planned is None or self.is_full)
        self.publish()

    def _move_pages(self) -> None:
        """Takes full pages out of the pool, and fills others with what has come, where a connector does such things."""
        if self.traffic is not None:
            self.traffic.save(self.scheduler)
            self.traffic.bring(self.scheduler)

    @property
    def num_decoding(self) -> int:
        """Implements `DecodingRows.num_decoding`."""
        return self.scheduler.num_decoding

    @property
    def have_drafts(self) -> NDArray[np.bool_]:
        """Implements `DecodingRows.have_drafts`."""
        return self._seen.all_steps_of(self.scheduler.slots.decoding())

    def repeat(self) -> bool:
        """Implements `DecodingRows.repeat`."""
        return self._repetition.is_found(self.scheduler.slots, self.num_output_tokens)

    def _may_be_blind(self, plan: StepPlan, num_decoding: int) -> bool:
        """Returns whether the proposer need not see the step, because its rows have no drafts before they are fewer.

        `num_decoding` rows were decoding when it was decided how many drafts they may have.
        """
        if plan.num_decode == plan.num_rows:
            return not self._seen.all_steps_of(plan.slots).any() or self.pace.may_be_blind(num_decoding)
        num_running = self.scheduler.num_running + self.scheduler.num_waiting
        return self.pace.may_be_blind(min(num_running, self.scheduler.slots.num_slots))

    def collect(self, outputs: OutputProcessor) -> list[RequestOutput]:
        """Waits for the oldest step under way, and returns what its tokens mean to callers."""
        results, decode_time = self.read(outputs)
        if decode_time is not None:
            self.pace.measured(decode_time)
        return results

    def read(self, outputs: OutputProcessor) -> tuple[list[RequestOutput], DecodeTime | None]:
        """Does what `collect` does, but leaves the pace alone: it returns what is to be measured, if anything is."""
        oldest = self._in_flight.popleft()
        step, plan, bucket, notes = oldest.step, oldest.step.plan, oldest.step.bucket, oldest.notes
        was_awaited = not step.is_ready
        output = self.runner.collect(step)
        start = time.monotonic()
        device_seconds, self._last_end = start - max(step.at, self._last_end), start
        if notes is not None:
            notes.arrived(self.scheduler)
        if oldest.version is not self._version_read:  # not its name, which weights may have had before
            self._version_read = oldest.version
            self.scheduler.begin_version(oldest.version.name)
        update = self.scheduler.update(plan, output)
        if notes is not None:
            notes.updated(output, update, bucket, device_seconds, oldest.host_seconds)
        self.runner.fork(update.forks)
        self._supply()
        processed = outputs.process(update, output)
        self.num_output_tokens += update.num_new_tokens - processed.num_dropped
        ended = [end.request for end in update.finished]
        ended += filter(None, map(self.scheduler.finish, processed.stopped))
        results = processed.outputs if self.traffic is None else self._with_transfers(ended, processed.outputs)
        self._move_pages()
        num_ran = int(output.num_steps.max())  # 0 if all rows had ended
        num_steps = max(num_ran, 1)
        decode_time: DecodeTime | None = None
        if bucket.is_decode and output.counts.any():  # or all rows had ended, and nothing was computed
            tokens = 1.0
            if output.drafts is not None:
                tokens = float(output.counts[output.counts > 0].mean()) / num_steps
                self.num_drafted[: plan.num_drafts] += output.drafts.drafted.sum(axis=0)
                self.num_accepted[: plan.num_drafts] += output.drafts.accepted.sum(axis=0)
            decode_time = DecodeTime(
                plan.num_rows, num_steps, plan.num_drafts, device_seconds, tokens, oldest.is_paced, bucket.is_blind
            )
        report = StepReport(
            replica=self.index,
            num_decode=plan.num_decode,
            num_prefill=plan.num_tokens - plan.num_decode,
            num_rows=plan.num_rows,
            num_steps=num_steps,
            num_drafts=plan.num_drafts,
            bucket_tokens=bucket.num_tokens,
            host_seconds=oldest.host_seconds + time.monotonic() - start,
            device_seconds=device_seconds,
            launch_seconds=oldest.host_seconds,
            was_awaited=was_awaited,
        )
        self._reports.append(report)
        self._count_padding(plan, bucket, output, num_ran)
        self.num_steps += num_steps - 1  # one was counted when it was dispatched
        self.publish()
        return results, decode_time

    def _with_transfers(self, ended: Sequence[Request], outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
        """Adds to `outputs` what others need to go on from the KV of the requests that have `ended`."""
        assert self.traffic is not None
        page_size = self.scheduler.cache.page_size
        params = {request.request_id: self.traffic.finished(request, page_size) for request in ended}
        return [replace(output, kv_transfer_params=params.get(output.request_id)) for output in outputs]

    @property
    def _num_under_way(self) -> int:
        return len(self._in_flight) + (self._held is not None)

    def _supply(self) -> None:
        """Gives the step that is held back its masks, if there is one and every token before it is known."""
        if self._held is None or self._in_flight:
            return
        held, self._held = self._held, None
        start = time.monotonic()
        masks = self.scheduler.masks(held.step.plan, self.runner.mask_words)
        if held.notes is not None:
            held.notes.masked(masks)
        step = self.runner.supply(held.step, masks)
        host_seconds = held.host_seconds + time.monotonic() - start
        self._in_flight.append(_UnderWay(step, held.notes, host_seconds, held.is_paced, held.version))

    def take_reports(self) -> list[StepReport]:
        """Returns the steps that were read since the last call, at most the `MAX_REPORTS` latest."""
        reports = list(self._reports)
        self._reports.clear()
        return reports

    def drop(self) -> None:
        """Forgets every request, and the prefix cache with them; the devices are `runner.reset`'s."""
        self._in_flight.clear()
        self._held = None
        self.is_due = False
        if self.traffic is not None:
            self.traffic.drop()
        pause = self.scheduler.pause_state
        if self._publisher is None:
            self.scheduler = self._make_scheduler(None)
        else:
            self.scheduler = self._make_scheduler(self._publisher.log)
            self._publisher.log.cleared()
            self._publisher.flush()
        self.scheduler.pause_state = pause

    def begin_version(self, version: WeightVersion, *, keeps_pages: bool) -> None:
        """Takes note that the next step has weights of another version. Prefixes are forgotten.

        Requests that run go on from the pages that they have, or compute all of their tokens again.
        """
        self.version = version
        if keeps_pages:
            self.scheduler.keep_old_pages()
        else:
            self.scheduler.preempt_all()
        self.forget_prefixes(elsewhere=True)

    def forget_prefixes(self, *, elsewhere: bool) -> None:
        """Forgets every cached prefix, and with `elsewhere` also what is on its way to or from other places."""
        if elsewhere and self.traffic is not None:
            self.traffic.forget(self.scheduler)
        self.scheduler.cache.reset_prefix_cache()
        self.publish()

    def publish(self) -> None:
        """Publishes what the prefix cache got and lost since the last call, if anybody wants to know."""
        if self._publisher is not None:
            self._publisher.flush()

    def _count_padding(self, plan: StepPlan, bucket: Bucket, output: StepOutput, num_ran: int) -> None:
        """Counts what the device computed of `bucket` in `num_ran` steps, and which part of it was for nothing."""
        # A program of several decode steps ends with the last of its rows, and may find none at all.
        num_steps = 1 if bucket.width == 1 else num_ran
        num_drafted = 0 if output.drafts is None else int(output.drafts.drafted.sum())
        num_accepted = 0 if output.drafts is None else int(output.drafts.accepted.sum())
        self.num_bucket_tokens += num_steps * bucket.num_tokens
        self.num_padding_tokens += num_steps * (bucket.num_tokens - plan.num_tokens) - num_drafted
        num_decoded = int(output.counts[: plan.num_decode].sum()) - num_accepted
        self.num_ended_tokens += num_steps * plan.num_decode - num_decoded
        self.num_bucket_rows += num_steps * bucket.num_rows
        self.num_padding_rows += num_steps * (bucket.num_rows - plan.num_rows)

    def count_idle_step(self, bucket: Bucket) -> None:
        """Counts a step of `bucket` that others took, and in which this replica's devices computed padding."""
        self.num_bucket_tokens += bucket.num_tokens
        self.num_padding_tokens += bucket.num_tokens
        self.num_bucket_rows += bucket.num_rows
        self.num_padding_rows += bucket.num_rows

    def _count_prefixes(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            request = admission.request
            if request.num_preemptions:  # it was counted when it came
                continue
            self.num_prefix_queries += len(request.prompt_token_ids)
            self.num_prefix_hits += request.num_cached_tokens or 0
