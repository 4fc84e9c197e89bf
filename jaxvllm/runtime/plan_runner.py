"""The host's half of a runner: turns plans into calls of the devices, and what these compute into host values."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import batched
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.lora import LoraAdapter
from jaxvllm.core.step_plan import Admission, DraftCounts, Fork, StepOutput, StepPlan, TopLogprobs
from jaxvllm.core.step_sizes import StepSizes
from jaxvllm.runtime.batch import pack
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.forks import FORK_BATCH, pack_forks
from jaxvllm.runtime.multihost.calls import (
    Admit,
    AdmitRare,
    Call,
    FillSideRows,
    ForkSlots,
    Forward,
    Mask,
    Read,
    Recall,
    Recount,
    SampleRows,
    Step,
)
from jaxvllm.runtime.page_copies import PageContents
from jaxvllm.runtime.programs import Programs
from jaxvllm.runtime.readouts import BY_NAME, DEVICE_READOUTS
from jaxvllm.runtime.sampler import DeviceLogprobs
from jaxvllm.runtime.side_rows import SideShape
from jaxvllm.runtime.slot_fields import SlotSizes
from jaxvllm.runtime.state import ADMISSION_BATCH, pack_admissions, pack_rare, pack_recalls, pack_recounts
from jaxvllm.runtime.step_model import DRAFT_MARK, DeviceOutput
from jaxvllm.runtime.step_program import StepProgram
from jaxvllm.runtime.token_mask import MASK_BATCH, mask_words, pack_masks


@partial(jax.tree_util.register_dataclass, data_fields=["output", "reports"], meta_fields=[])
@dataclass(frozen=True)
class StepResult:
    """The future results of a dispatched step: tokens, and the reports of readouts."""

    output: DeviceOutput
    reports: dict[str, list[Any]] = field(default_factory=dict)  # of each call of a readout's program, by its name


@dataclass(frozen=True)
class HeldStep:
    """A step whose forward pass was dispatched, and which samples when the host has supplied masks."""

    plan: StepPlan
    bucket: Bucket


@dataclass(frozen=True)
class InFlight:
    """A dispatched step; its output may not exist yet."""

    plan: StepPlan
    bucket: Bucket
    result: StepResult
    at: float  # when it could begin, on the host's monotonic clock

    @property
    def is_ready(self) -> bool:
        """Whether reading the tokens would not wait."""
        return bool(self.result.output.yielded.is_ready())  # type: ignore[attr-defined]  # jax hides it


class PlanRunner(ABC):
    """Runs the plans of one replica. A subclass makes the calls on its devices."""

    programs: Programs[StepProgram]
    sizes: SlotSizes
    side: SideShape | None  # of the store of side inputs
    overhead: int  # what a step costs beside its tokens, in tokens

    @abstractmethod
    def call(self, call: Call) -> StepResult | None:
        """Makes `call` on the devices of the replica; a step has a result."""

    @abstractmethod
    def take_pages(self, pages: Sequence[NDArray[np.int32]]) -> list[PageContents]:
        """Copies pages, i32[N] of each group, after all steps that were dispatched, and returns at once.

        Each entry has the next `COPY_BATCH` of them; what is after the last one means nothing.
        """

    @abstractmethod
    def put_pages(self, pages: Sequence[NDArray[np.int32]], contents: Sequence[NDArray[np.generic]]) -> None:
        """Fills pages, i32[N] of each group, after all steps that were dispatched, and returns at once.

        `contents` are [N, L, K, S, W], of each array of the cache.
        """

    @abstractmethod
    def bring_adapter(self, slot: int, adapter: LoraAdapter) -> None:
        """Puts an adapter into a slot after all steps that were dispatched, and returns at once."""

    @property
    def step_sizes(self) -> StepSizes:
        """The sizes of the steps with prompts that are compiled so far."""
        return StepSizes(self.programs.mixed_sizes, self.overhead)

    def dispatch(self, plan: StepPlan) -> InFlight | HeldStep:
        """Starts the step and returns at once: the next may be dispatched before this one's output is read.

        A plan with masked rows is held after its forward pass: `supply` starts the other half.
        """
        self.bring_in(plan.admissions)
        bucket = self.programs.choose(plan)
        packed = pack(plan, bucket, self.sizes)
        if not plan.is_split:
            return self.in_flight(plan, bucket, self.call(Step(bucket, packed)))
        self.call(Forward(bucket, packed))
        return HeldStep(plan, bucket) if plan.is_masked else self._sample(plan, bucket)

    def bring_in(self, of_step: Sequence[Admission]) -> None:
        """Tells the devices of requests that get a slot in a step which is not dispatched yet."""
        for admission in of_step:
            if admission.brings_adapter:
                assert admission.request.adapter is not None
                self.bring_adapter(admission.adapter_slot, admission.request.adapter)
        for admissions in batched(of_step, ADMISSION_BATCH):
            self.call(Admit(pack_admissions(admissions, self.sizes)))
            for admission in admissions:
                if (rare := pack_rare(admission, self.sizes)) is not None:
                    self.call(AdmitRare(rare))
                for packed in pack_recalls(admission):
                    self.call(Recall(packed))
                for packed in pack_recounts(admission):
                    self.call(Recount(packed))
                for filled in admission.side_rows:
                    assert self.side is not None, "there is no side store"
                    for packed in self.side.pack(filled):
                        self.call(FillSideRows(packed))

    @property
    def mask_words(self) -> int:
        """Words of the mask of a row."""
        return mask_words(self.sizes.vocab_size)

    def supply(self, held: HeldStep, masks: Iterable[tuple[int, NDArray[np.int32]]]) -> InFlight:
        """Starts the half of the step that was held back, which samples under the masks of these slots."""
        for rows in batched(masks, MASK_BATCH):
            self.call(Mask(pack_masks(rows, self.sizes)))
        return self._sample(held.plan, held.bucket)

    def _sample(self, plan: StepPlan, bucket: Bucket) -> InFlight:
        """Starts the second half of a step, and what must come before it."""
        for number, readout in enumerate(DEVICE_READOUTS):
            if readout.name in plan.readouts:
                for words in readout.calls(plan, bucket):
                    self.call(Read(bucket, words, number))
        return self.in_flight(plan, bucket, self.call(SampleRows(bucket)))

    def fork(self, forks: Iterable[Fork]) -> None:
        """Does `forks` after all steps that were dispatched. Several of one beam search have distinct slots."""
        for some in batched(forks, FORK_BATCH):
            self.call(ForkSlots(pack_forks(some, self.sizes)))

    def in_flight(self, plan: StepPlan, bucket: Bucket, result: StepResult | None) -> InFlight:
        """Returns the step under way whose `result` is to come, and begins to bring its tokens to the host."""
        assert result is not None
        result.output.yielded.copy_to_host_async()
        return InFlight(plan, bucket, result, time.monotonic())

    def collect(self, step: InFlight) -> StepOutput:
        """Waits for the output of `step` and brings it to the host; log-probabilities only when a row wants them."""
        plan, result = step.plan, step.result
        yielded = np.asarray(result.output.yielded)[: plan.num_rows]
        self.programs.compile_more()
        tokens, drafts, were_drafts = yielded[:, 1 : 1 + plan.row_tokens], None, None
        if plan.num_drafts:
            drafted, accepted = np.split(yielded[:, 1 + step.bucket.row_tokens :], 2, axis=1)
            drafts = DraftCounts(drafted, accepted)
            tokens, were_drafts = tokens % DRAFT_MARK, tokens >= DRAFT_MARK
        return StepOutput(
            tokens,
            yielded[:, 0],
            _by_row(result.output.logprobs, plan) if plan.wants_logprobs else None,
            {name: BY_NAME[name].report(plan, parts) for name, parts in result.reports.items()},
            drafts,
            were_drafts,
        )


def _by_row(logprobs: DeviceLogprobs, plan: StepPlan) -> TopLogprobs:
    """Returns the log-probabilities of [Y, R] tokens on the host: number `r * Y + y` is token y of row r."""

    def flat(x: jax.Array) -> np.ndarray:
        values = np.swapaxes(np.asarray(x), 0, 1)[: plan.num_rows, : plan.row_tokens]
        return values.reshape(-1, *values.shape[2:])

    return TopLogprobs(*(flat(x) for x in (logprobs.token, logprobs.ranks, logprobs.top_ids, logprobs.top)))
